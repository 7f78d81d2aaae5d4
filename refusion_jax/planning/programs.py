"""Lowers the programs that `plan` compiles: the training step and the decoding of a batch.

Configs are passed as JSON, because these functions are called in a child process.
"""

import json
import math

import jax
import jax.numpy as jnp
import ml_collections
from etils import epath
from flax import nnx

from refusion_jax.checkpoints.contents import read_model_config
from refusion_jax.cli.errors import SettingError
from refusion_jax.config import check, check_mesh
from refusion_jax.config.model import model_config
from refusion_jax.decoding import queue
from refusion_jax.decoding.auxiliary import check_auxiliaries, joined
from refusion_jax.decoding.memory import admissions
from refusion_jax.decoding.requests import prepare
from refusion_jax.decoding.settings import Settings
from refusion_jax.distributed import sharding
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.shape import ModelConfig
from refusion_jax.model.transformer import abstract_transformer
from refusion_jax.planning.compiler import tpu_devices
from refusion_jax.systems.api import decoder_for
from refusion_jax.training.program import Program, train_program


def lower_train(config: str, topology: str, slices: int) -> jax.stages.Lowered:
    """The training step as `train` runs it with this config; UserError if it cannot run there."""
    c = ml_collections.ConfigDict(json.loads(config))
    check(c)
    mesh = sharding.make_mesh(c.mesh, tpu_devices(topology, slices))
    check_mesh(c, mesh)
    program = train_program(c, model_config(c), mesh)
    with jax.set_mesh(mesh):
        return program.step.lower(program.state, program.rows)


def lower_decode(config: str, topology: str, slices: int, settings: Settings) -> jax.stages.Lowered:
    """The decoding of a batch with the model of a config, with prompts that fill the cache up to the new tokens.

    Weights have the dtype of computation and are sharded as in training; rows are split over the batch axes. Raises
    UserError if the config cannot run there.
    """
    c = ml_collections.ConfigDict(json.loads(config))
    check(c)
    mesh = sharding.make_mesh(c.mesh, tpu_devices(topology, slices))
    shape = model_config(c)
    capacity = settings.cache_length or c.row_length
    settings = settings.for_model(shape).fill_in(capacity - 1)  # a prompt has at least one token
    length, rows = capacity - settings.new_tokens, settings.batch_size
    if length < 1:
        raise SettingError(
            "decode", "max_new_tokens", settings.new_tokens, f"leaves no room for a prompt in a cache of {capacity}"
        )
    if rows % (parts := sharding.shard_count(mesh, "batch")):
        next_size = -(-rows // parts) * parts
        settings.refuse("batch_size", f"does not divide into {parts} parts; the next size that does is {next_size}")
    check_auxiliaries(settings, settings)

    def abstract_model(shape: ModelConfig, head_rows: int = 0) -> LanguageModel:
        kinds = head_rows, settings.weights, settings.cache
        return nnx.merge(*abstract_transformer(shape, c.dtype, mesh, "config.mesh", *kinds))

    paths = {name: epath.Path(getattr(settings, name)) for name in settings.auxiliary_models}
    others = {name: abstract_model(read_model_config(path)) for name, path in paths.items()}
    model = joined(abstract_model(shape, settings.head_rows), others)
    graphdef, target = nnx.split(model)
    requests = prepare([[0] * length], settings, shape)
    decoder = decoder_for(requests, shape)
    newcomers = queue.newcomers({0: requests[0]}, admissions(rows, mesh)[-1], rows, decoder)
    newcomers = sharding.placed(newcomers, sharding.sharding(mesh))
    with jax.set_mesh(mesh):
        program = jax.jit(queue.decode_once, static_argnames=("graphdef", "rows", "decoder"))
        return program.lower(graphdef, target, newcomers, rows, decoder)


def state_bytes(program: Program) -> float:
    """Bytes per chip of weights, optimizer state and counters."""
    state = jax.tree.leaves(program.state)
    return float(sum(jnp.dtype(x.dtype).itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in state))

"""The training program of a run: the jitted step and the shapes and shardings of its state, from the config alone."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from etils import epath
from flax import nnx
from jax.sharding import Mesh

from refusion_jax.batch.rows import Rows
from refusion_jax.checkpoints.contents import read_model_config
from refusion_jax.checkpoints.load import load_params
from refusion_jax.cli.errors import SettingError
from refusion_jax.config import make_objective
from refusion_jax.config.model import find_target_model
from refusion_jax.distributed import sharding
from refusion_jax.distributed.xla_options import compiler_options
from refusion_jax.model.lora import Lora, add_adapters, combine, read_lora
from refusion_jax.model.packed_attention import backend_for
from refusion_jax.model.shape import ModelConfig
from refusion_jax.model.transformer import Transformer, abstract_transformer, logical_axes
from refusion_jax.systems.interface import Objective, train_flops_per_row
from refusion_jax.training.optimizer import make_optimizer, make_schedule
from refusion_jax.training.train_step import TrainState, init_state, make_train_step, state_shardings

TARGET = "target_model"  # of a transformer, and of its weights


@dataclasses.dataclass(frozen=True)
class Program:
    """The program that `train` runs and `plan` compiles."""

    step: Callable  # jitted: (TrainState, Rows) -> (TrainState, metrics); the state is donated
    initial_state: Callable[..., TrainState]  # jitted: the state of step 0, from all weights (donated) or random ones
    rows: Rows  # a batch, with a jax.ShapeDtypeStruct and its sharding for every array
    state: TrainState  # the same for the state
    base: dict  # the same for the weights to start from
    lora: Lora | None
    graphdef: nnx.GraphDef  # of the transformer
    objective: Objective
    flops_per_row: float  # forward and backward, and the forward pass through the layers of the target model

    def compiled_step(self, state: TrainState) -> jax.stages.Compiled:
        """The step, compiled for a state, given as arrays or as their shapes and shardings."""
        return self.step.lower(state, self.rows).compile()

    def given_weights(self, init_from: epath.PathLike | None) -> dict[str, Any] | None:
        """The weights of a model to start from, and of the target model; None if there are neither."""
        given = load_params(epath.Path(init_from), self.base) if init_from else {}
        if self.objective.reads:
            given[TARGET] = load_params(epath.Path(self.objective.reads), self.state.frozen[TARGET])
        return given or None


def split(weights: dict[str, Any], lora: Lora | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """(trained weights, frozen ones); the latter include those of the target model."""
    own = {name: value for name, value in weights.items() if name != TARGET}
    trained, frozen = lora.split(own) if lora else (own, {})
    return trained, frozen | {name: weights[name] for name in weights.keys() - own.keys()}


def train_program(config: ml_collections.ConfigDict, shape: ModelConfig, mesh: Mesh) -> Program:
    """The program of a config for a model on a mesh, whose devices may be abstract."""
    if config.quantization != "none" and shape.num_experts:
        raise SettingError("config", "quantization", config.quantization, "models with experts support only `none`")
    platform = mesh.devices.flat[0].platform
    backend = backend_for(platform, config.row_length // mesh.shape["sequence"], config.model.head_dim, config.dtype)

    lora, objective = read_lora(config.lora), make_objective(config, shape.mask_token_id, shape.eos_token_id)
    read = read_model_config(path) if (path := find_target_model(config)[1]) else None
    if read:  # refuses a mesh that cannot split its weights
        abstract_transformer(read, config.dtype, mesh, "config.mesh")

    def build(rngs: nnx.Rngs, quantization: str = "none") -> Transformer:
        model = Transformer(shape, rngs, config.dtype, config.remat, backend, quantization)
        if lora:
            add_adapters(model.layers, lora, rngs)
        if read:
            model.target_model = Transformer(read, rngs, config.dtype, backend=backend)
        return model

    abstract_model = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    graphdef, axes = nnx.graphdef(abstract_model), logical_axes(abstract_model)
    # Only training steps round: what is evaluated is the model that is saved.
    rounded = nnx.graphdef(nnx.eval_shape(lambda: build(nnx.Rngs(0), config.quantization)))
    trained, schedule = split(axes, lora)[0], make_schedule(config)
    if lora and lora.full and not any(re.fullmatch(lora.full, name) for name in (*trained, *trained["layers"])):
        names = lora.without_adapters(axes)["layers"].keys() | axes.keys() - {"layers", TARGET}
        raise SettingError("config", "lora.full", lora.full, f"names none of {', '.join(sorted(names))}")
    optimizer = make_optimizer(config, schedule, trained)
    how = schedule, config.seed, config.accumulation, config.guard.spike, config.debug_nans
    step = make_train_step(rounded, objective, optimizer, *how)

    def fresh_state(weights: dict | None = None) -> TrainState:
        params = combine(weights or {}, nnx.to_pure_dict(nnx.state(build(nnx.Rngs(config.seed)))))
        params, frozen = split(params, lora)
        return init_state(params, optimizer, jax.tree.map(lambda w: w.astype(config.dtype), frozen))

    abstract = jax.eval_shape(fresh_state)
    shardings = state_shardings(mesh, axes, abstract)
    of_rows, dtypes = (config.batch_size, config.row_length), (jnp.int32, jnp.int32, jnp.bool_)
    rows = jax.eval_shape(lambda: Rows(*(jnp.zeros(of_rows, dtype) for dtype in dtypes)))
    state = sharding.placed(abstract, shardings)
    own = {name: x for name, x in state.weights.items() if name != TARGET}
    return Program(
        step=jax.jit(
            step,
            donate_argnums=0,
            out_shardings=(shardings, sharding.sharding(mesh)),  # every host reads the metrics
            compiler_options=compiler_options(mesh),
        ),
        initial_state=jax.jit(fresh_state, donate_argnums=0, out_shardings=shardings),
        rows=sharding.placed(rows, sharding.sharding(mesh, "batch", "length")),
        state=state,
        base=lora.without_adapters(own) if lora else own,
        lora=lora,
        graphdef=graphdef,
        objective=objective,
        flops_per_row=train_flops_per_row(objective, shape, config.row_length, lora, read),
    )

"""The training program of a run: the jitted step and the shapes and shardings of its state, from the config alone."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_collections
from flax import nnx
from jax.sharding import Mesh

from refusion_jax.batch.rows import Rows
from refusion_jax.cli.errors import SettingError
from refusion_jax.config import make_objective
from refusion_jax.distributed import sharding
from refusion_jax.distributed.xla_options import compiler_options
from refusion_jax.model.lora import Lora, add_adapters, combine, read_lora
from refusion_jax.model.packed_attention import backend_for
from refusion_jax.model.shape import ModelConfig
from refusion_jax.model.transformer import Transformer, logical_axes
from refusion_jax.systems.interface import Objective, train_flops_per_row
from refusion_jax.training.optimizer import make_optimizer, make_schedule
from refusion_jax.training.train_step import TrainState, init_state, make_train_step, state_shardings


@dataclasses.dataclass(frozen=True)
class Program:
    """The program that `train` runs and `plan` compiles."""

    step: Callable  # jitted: (TrainState, Rows) -> (TrainState, metrics); the state is donated
    initial_state: Callable[..., TrainState]  # jitted: of step 0, from all weights, which are donated, or random ones
    rows: Rows  # of a batch: jax.ShapeDtypeStruct of every array, with its sharding
    target: TrainState  # the same of the state
    base: dict  # the same of the weights to start from
    lora: Lora | None
    graphdef: nnx.GraphDef  # of the transformer
    objective: Objective
    flops_per_row: float  # of forward and backward

    def compiled_step(self, state: TrainState) -> jax.stages.Compiled:
        """The step, compiled for a state: its arrays, or their shapes and shardings."""
        return self.step.lower(state, self.rows).compile()


def train_program(config: ml_collections.ConfigDict, shape: ModelConfig, mesh: Mesh) -> Program:
    """The program of a config for a model on a mesh, whose devices may be abstract.

    Raises:
      SettingError: where products of experts should be in int8.
    """
    if config.quantization == "int8" and shape.num_experts:
        raise SettingError("config", "quantization", config.quantization, "a model with experts needs none")
    platform = mesh.devices.flat[0].platform
    backend = backend_for(platform, config.row_length // mesh.shape["sequence"], config.model.head_dim, config.dtype)

    lora = read_lora(config.lora)

    def build(rngs: nnx.Rngs) -> Transformer:
        model = Transformer(shape, rngs, config.dtype, config.remat, backend, config.quantization)
        if lora:
            add_adapters(model.layers, lora, rngs)
        return model

    abstract_model = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    graphdef, axes = nnx.split(abstract_model)[0], logical_axes(abstract_model)
    schedule = make_schedule(config)
    optimizer = make_optimizer(config, schedule, lora.split(axes)[0] if lora else axes)
    objective = make_objective(config, shape.mask_token_id)
    guards = config.guard.spike, config.debug_nans
    step = make_train_step(graphdef, objective, optimizer, schedule, config.seed, config.accumulation, *guards)

    def fresh_state(weights: dict | None = None) -> TrainState:
        params = combine(weights or {}, nnx.to_pure_dict(nnx.state(build(nnx.Rngs(config.seed)))))
        if not lora:
            return init_state(params, optimizer)
        params, frozen = lora.split(params)
        return init_state(params, optimizer, jax.tree.map(lambda w: w.astype(config.dtype), frozen))

    abstract = jax.eval_shape(fresh_state)
    shardings = state_shardings(mesh, axes, abstract)
    of_rows, dtypes = (config.batch_size, config.row_length), (jnp.int32, jnp.int32, jnp.bool_)
    rows = jax.eval_shape(lambda: Rows(*(jnp.zeros(of_rows, dtype) for dtype in dtypes)))
    return Program(
        step=jax.jit(
            step,
            donate_argnums=0,
            out_shardings=(shardings, sharding.sharding(mesh)),  # every host reads the metrics
            compiler_options=compiler_options(mesh),
        ),
        initial_state=jax.jit(fresh_state, donate_argnums=0, out_shardings=shardings),
        rows=sharding.placed(rows, sharding.sharding(mesh, "batch", "length")),
        target=(target := sharding.placed(abstract, shardings)),
        base=lora.without_adapters(target.weights) if lora else target.params,
        lora=lora,
        graphdef=graphdef,
        objective=objective,
        flops_per_row=train_flops_per_row(objective, shape, config.row_length),
    )

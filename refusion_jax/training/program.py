"""The training program of a run: the jitted step and the shapes and shardings of its state, from the config alone."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_collections
import optax
from flax import nnx
from jax.sharding import Mesh

from refusion_jax.batch.rows import Rows
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
    """What `train` runs and `plan` compiles."""

    step: Callable  # jitted: (TrainState, Rows) -> (TrainState, metrics); the state is donated
    target: TrainState  # jax.ShapeDtypeStruct of every array, with its sharding
    base: dict  # of the weights to start from, the same as `target`
    lora: Lora | None
    optimizer: optax.GradientTransformation
    fresh_state: Callable[..., TrainState]  # from all weights, or random ones
    graphdef: nnx.GraphDef  # of the transformer
    objective: Objective
    flops_per_row: float  # of forward and backward

    @property
    def shardings(self) -> TrainState:
        """The sharding of each array of the state."""
        return jax.tree.map(lambda x: x.sharding, self.target)

    def initial_state(self, weights: dict | None = None) -> TrainState:
        """The state of step 0: with these weights, which are donated, or random ones."""
        start = jax.jit(self.fresh_state, donate_argnums=0, out_shardings=self.shardings)
        return start() if weights is None else start(weights)


def train_program(config: ml_collections.ConfigDict, shape: ModelConfig, mesh: Mesh) -> Program:
    """The program of a config for a model on a mesh, whose devices may be abstract."""
    platform = mesh.devices.flat[0].platform
    backend = backend_for(platform, config.row_length // mesh.shape["sequence"], config.model.head_dim, config.dtype)

    lora = read_lora(config.lora)

    def build(rngs: nnx.Rngs) -> Transformer:
        model = Transformer(shape, rngs, config.dtype, config.remat, backend)
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
    return Program(
        step=jax.jit(
            step,
            donate_argnums=0,
            out_shardings=(shardings, sharding.sharding(mesh)),  # every host reads the metrics
            compiler_options=compiler_options(mesh),
        ),
        target=(target := sharding.placed(abstract, shardings)),
        base=lora.without_adapters(target.weights) if lora else target.params,
        lora=lora,
        optimizer=optimizer,
        fresh_state=fresh_state,
        graphdef=graphdef,
        objective=objective,
        flops_per_row=train_flops_per_row(objective, shape, config.row_length),
    )


def compile_step(
    step: Callable, state: TrainState, config: ml_collections.ConfigDict, mesh: Mesh
) -> jax.stages.Compiled:
    """The step of a `Program`, compiled for a state: its arrays, or their shapes and shardings."""
    return step.lower(state, abstract_rows(config, mesh)).compile()


def abstract_rows(config: ml_collections.ConfigDict, mesh: Mesh) -> Rows:
    """The shapes and shardings of a batch of rows."""
    shape = config.batch_size, config.row_length
    dtypes = jnp.int32, jnp.int32, jnp.bool_
    rows = jax.eval_shape(lambda: Rows(*(jnp.zeros(shape, dtype) for dtype in dtypes)))
    return sharding.placed(rows, sharding.sharding(mesh, "batch", "length"))

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
from refusion_jax.model.packed_attention import backend_for
from refusion_jax.model.transformer import ModelConfig, Transformer, logical_axes
from refusion_jax.systems.interface import Objective
from refusion_jax.training.optimizer import make_optimizer, make_schedule
from refusion_jax.training.train_step import TrainState, init_state, make_train_step, state_shardings


@dataclasses.dataclass(frozen=True)
class Program:
    """What `train` runs and `plan` compiles."""

    step: Callable  # jitted: (TrainState, Rows) -> (TrainState, metrics); the state is donated
    target: TrainState  # jax.ShapeDtypeStruct of every array, with its sharding
    optimizer: optax.GradientTransformation
    fresh_state: Callable[[], TrainState]
    graphdef: nnx.GraphDef  # of the transformer
    objective: Objective

    @property
    def shardings(self) -> TrainState:
        """The sharding of each array of the state."""
        return jax.tree.map(lambda x: x.sharding, self.target)


def train_program(config: ml_collections.ConfigDict, shape: ModelConfig, mesh: Mesh) -> Program:
    """The program of a config for a model on a mesh, whose devices may be abstract."""
    platform = mesh.devices.flat[0].platform
    backend = backend_for(platform, config.row_length // mesh.shape["sequence"], config.model.head_dim, config.dtype)

    def build(rngs: nnx.Rngs) -> Transformer:
        return Transformer(shape, rngs, config.dtype, config.remat, backend)

    abstract_model = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    graphdef, axes = nnx.split(abstract_model)[0], logical_axes(abstract_model)
    schedule = make_schedule(config)
    optimizer = make_optimizer(config, schedule, axes)
    objective = make_objective(config, shape.mask_token_id)
    guards = config.guard.spike, config.debug_nans
    step = make_train_step(graphdef, objective, optimizer, schedule, config.seed, config.accumulation, *guards)

    def fresh_state() -> TrainState:
        return init_state(nnx.to_pure_dict(nnx.state(build(nnx.Rngs(config.seed)))), optimizer)

    abstract = jax.eval_shape(fresh_state)
    shardings = state_shardings(mesh, axes, abstract)
    return Program(
        step=jax.jit(
            step,
            donate_argnums=0,
            out_shardings=(shardings, sharding.sharding(mesh)),  # every host reads the metrics
            compiler_options=compiler_options(mesh),
        ),
        target=sharding.placed(abstract, shardings),
        optimizer=optimizer,
        fresh_state=fresh_state,
        graphdef=graphdef,
        objective=objective,
    )


def abstract_rows(config: ml_collections.ConfigDict, mesh: Mesh) -> Rows:
    """The shapes and shardings of a batch of rows."""
    shape = config.batch_size, config.row_length
    dtypes = jnp.int32, jnp.int32, jnp.bool_
    rows = jax.eval_shape(lambda: Rows(*(jnp.zeros(shape, dtype) for dtype in dtypes)))
    return sharding.placed(rows, sharding.sharding(mesh, "batch", "length"))

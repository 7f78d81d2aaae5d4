"""The training step: a pure function of (state, rows), jitted and sharded by its caller.

Noise depends on (seed, step, index of the row in the batch) and all normalizers are counted over the global batch
before anything is split, so the result does not depend on devices, hosts or accumulation.

Axes: B rows of the global batch, A micro-batches, T row length.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from refusion_jax.batch.batch import is_labelled, weigh
from refusion_jax.batch.rows import Rows, noise_keys
from refusion_jax.runtime import sharding
from refusion_jax.systems.interface import Objective


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step changes, and that a checkpoint must hold."""

    step: jax.Array  # int32 scalar, steps taken
    tokens: jax.Array  # [2] uint32, high and low word: real tokens trained on (int32 would last for 2 G tokens)
    params: dict[str, Any]  # float32 master weights
    opt_state: optax.OptState


def init_state(params: dict, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), jnp.zeros((2,), jnp.uint32), params, optimizer.init(params))


def state_shardings(mesh: Mesh, axes: dict, abstract: TrainState) -> TrainState:
    """Where each array of the state lives: weights by their logical axes, their optimizer moments alike.

    A moment that lacks one axis of its weight (means over rows or columns) is split as the axes that are left.

    Args:
      mesh: the devices.
      axes: logical axis names of every weight, as a tree.
      abstract: shapes of the state.
    """
    params = jax.tree.map(lambda names: sharding.sharding(mesh, *names), axes, is_leaf=lambda x: isinstance(x, tuple))
    everywhere = sharding.sharding(mesh)

    own = {_names(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}
    weights = {_names(path): leaf for path, leaf in jax.tree.leaves_with_path(abstract.params)}

    def like_weight(path, moment):
        names = _names(path)
        name = next((names[i:] for i in range(len(names)) if names[i:] in weights), None)
        return everywhere if name is None else _moment_sharding(moment, weights[name], own[name])

    opt_state = jax.tree.map_with_path(like_weight, abstract.opt_state)
    return TrainState(everywhere, everywhere, params, opt_state)


def _names(path: tuple) -> tuple[str, ...]:
    """The dictionary keys on a path: of an array of the optimizer they end with those of its weight."""
    return tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))


def _moment_sharding(moment: Any, weight: Any, own: NamedSharding) -> NamedSharding:
    if moment.shape == weight.shape:
        return own
    parts = [*own.spec, *[None] * (weight.ndim - len(own.spec))]
    for axis in range(weight.ndim):
        if moment.shape == weight.shape[:axis] + weight.shape[axis + 1 :]:
            return NamedSharding(own.mesh, PartitionSpec(*parts[:axis], *parts[axis + 1 :]))
    return NamedSharding(own.mesh, PartitionSpec())


def make_train_step(
    graphdef: nnx.GraphDef,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    seed: int,
    accumulation: int,
) -> Callable[[TrainState, Rows], tuple[TrainState, dict[str, jax.Array]]]:
    """Builds the step.

    Args:
      graphdef: of the transformer; the state carries its weights.
      objective: what to train on.
      optimizer: how.
      schedule: the learning rate by step, for the metrics.
      seed: of the noise.
      accumulation: A; the step runs A forwards and backwards over B/A rows each.
    """

    def loss_fn(params, batch):
        model = nnx.merge(graphdef, params)
        terms = weigh(
            model.cross_entropy(batch.inputs, batch.positions, batch.visibility, batch.labels, is_labelled(batch)),
            batch,
        )
        return sum(objective.coefficients[name] * term for name, term in terms.items()), terms

    def train_step(state: TrainState, rows: Rows):
        batch = objective.corrupt(rows, noise_keys(seed, state.step, rows.tokens.shape[0]))
        batch = dataclasses.replace(batch, facts={})  # for reports only

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        if accumulation == 1:
            (loss, terms), grads = grad_fn(state.params, batch)
        else:
            zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(grad_fn, state.params, batch))
            (loss, terms), grads = jax.lax.scan(
                lambda total, micro: (jax.tree.map(jnp.add, total, grad_fn(state.params, micro)), None),
                zeros,
                split_batch(batch, accumulation),
            )[0]

        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        metrics = {
            "loss": loss,
            **{f"loss_{name}": term for name, term in terms.items()},
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": schedule(state.step),
            "tokens": add_wide(state.tokens, jnp.sum(rows.segment_ids > 0)),
        }
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, metrics["tokens"], params, opt_state), metrics

    return train_step


def split_batch(batch: Any, parts: int) -> Any:
    """Splits every [B, ...] array into [parts, B / parts, ...], by striding, so that each device keeps its own rows."""

    def split(x):
        x = x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
        return sharding.constrain(x, None, "batch", *(None,) * (x.ndim - 2))

    return jax.tree.map(split, batch)


def add_wide(words: jax.Array, count: jax.Array) -> jax.Array:
    """Adds a count below 2^31 to a 64-bit number held as [high, low] uint32 words."""
    low = words[1] + count.astype(jnp.uint32)
    return jnp.stack([words[0] + (low < words[1]), low])


def wide_to_int(words: jax.Array) -> int:
    """The number that [high, low] words hold."""
    high, low = jax.device_get(words).tolist()
    return (high << 32) + low

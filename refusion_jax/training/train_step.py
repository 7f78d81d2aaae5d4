"""The training step: a pure function of (state, rows), jitted and sharded by its caller.

Noise depends on (seed, step, index of the row in the batch) and all normalizers are counted over the global batch
before anything is split, so the result does not depend on devices, hosts or accumulation.

Axes: B rows of the global batch, A micro-batches, T row length, V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, Bool, Float32, Int32, UInt32

from refusion_jax.batch.batch import Batch, is_labelled, weigh
from refusion_jax.batch.rows import Rows, noise_keys
from refusion_jax.distributed import sharding
from refusion_jax.model.experts import balance
from refusion_jax.model.lora import combine
from refusion_jax.model.transformer import Transformer
from refusion_jax.systems.interface import Objective

SPIKE_AFTER = 20  # good steps before spikes are detected
_SPIKE_DECAY = 0.95  # decay of the running mean of the loss, per step


@struct.dataclass
class Guard:
    """The state of spike detection: scalars, all zero at the start of a run."""

    loss_mean: Float32[Array, ""]  # running mean over good steps
    good: Int32[Array, ""]  # steps that counted
    skipped: Int32[Array, ""]  # steps whose update was left out
    in_a_row: Int32[Array, ""]  # how many of the last steps in a row were left out

    def after(self, is_good: Bool[Array, ""], loss: Float32[Array, ""]) -> "Guard":
        """The guard after a step with this loss, which counts if `is_good`."""
        mean = jnp.where(self.good == 0, loss, _SPIKE_DECAY * self.loss_mean + (1 - _SPIKE_DECAY) * loss)
        return Guard(
            loss_mean=jnp.where(is_good, mean, self.loss_mean),
            good=self.good + is_good,
            skipped=self.skipped + ~is_good,
            in_a_row=jnp.where(is_good, 0, self.in_a_row + 1),
        )


@struct.dataclass
class TrainState:
    """Everything that a step changes and a checkpoint holds."""

    step: Int32[Array, ""]  # steps taken
    tokens: UInt32[Array, "2"]  # high and low word of the number of real tokens so far (int32 would overflow at 2 G)
    params: dict[str, Any]  # the trained weights: float32 master weights
    opt_state: optax.OptState
    guard: Guard
    frozen: dict[str, Any] = dataclasses.field(default_factory=dict)  # the other weights; no checkpoint holds them

    @property
    def weights(self) -> dict[str, Any]:
        return combine(self.params, self.frozen)

    def rest(self) -> dict[str, Any]:
        """The arrays that a checkpoint holds apart from the weights."""
        return {"step": self.step, "tokens": self.tokens, "opt_state": self.opt_state}

    def counters(self) -> dict[str, float]:
        """The guard, which a checkpoint holds as JSON."""
        return {name: value.item() for name, value in jax.device_get(vars(self.guard)).items()}

    def restored(self, params: dict[str, Any], rest: dict[str, Any], counters: dict[str, float]) -> "TrainState":
        """The state that a checkpoint holds; self has the shapes, dtypes and shardings."""
        guard = {name: _replicate(counters.get(name, 0), like) for name, like in vars(self.guard).items()}
        return TrainState(params=params, guard=Guard(**guard), frozen=self.frozen, **rest)


def _replicate(value: float, target: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.jit(lambda: jnp.asarray(value, target.dtype), out_shardings=target.sharding)()


def init_state(params: dict, optimizer: optax.GradientTransformation, frozen: dict | None = None) -> TrainState:
    """The state before the first step."""
    step, *counts = (jnp.zeros((), jnp.int32) for _ in range(4))  # not one array: the state is donated buffer by buffer
    guard = Guard(jnp.zeros(()), *counts)
    return TrainState(step, jnp.zeros((2,), jnp.uint32), params, optimizer.init(params), guard, frozen or {})


def state_shardings(mesh: Mesh, axes: dict, abstract: TrainState) -> TrainState:
    """The sharding of each array of the state: weights by their logical axes, optimizer moments like their weights.

    A moment without one axis of its weight (means over rows or columns) is split by the remaining axes. `axes` are the
    logical axis names of every weight, as a tree; `abstract` has the shapes of the state.
    """
    own = {name: sharding.sharding(mesh, *names) for name, names in flatten_dict(axes).items()}
    weights = flatten_dict(abstract.weights)

    def like_weight(path, x):
        # The path of an array of the optimizer ends with the names of its weight.
        names = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        name = next((names[i:] for i in range(len(names)) if names[i:] in weights), None)
        return sharding.sharding(mesh) if name is None else _moment_sharding(x, weights[name], own[name])

    return jax.tree.map_with_path(like_weight, abstract)


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
    spike: float = 0.0,
    debug_nans: bool = False,
) -> Callable[[TrainState, Rows], tuple[TrainState, dict[str, Any]]]:
    """Builds the step, which runs A = `accumulation` forward and backward passes over B/A rows each.

    A step whose loss or gradient is not finite, whose loss is a spike (above `spike` times its running mean; 0: never),
    or whose batch has invalid token ids, leaves weights and optimizer as they are. `schedule` is only for the metrics,
    to which `debug_nans` adds `finite`: whether each weight, gradient and update is.
    """

    def train_step(state: TrainState, rows: Rows):
        batch = objective.batch(rows, noise_keys(seed, state.step, rows.tokens.shape[0])).replace(diagnostics={})
        (loss, terms), grads = _gradient(graphdef, objective, state, batch, accumulation)
        grad_norm = optax.tree.norm(grads)
        invalid_ids = _invalid_ids(batch, nnx.merge(graphdef, state.weights).config.vocab_size)
        is_good = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & (invalid_ids == 0)
        if spike:
            is_good &= (state.guard.good < SPIKE_AFTER) | (loss <= spike * state.guard.loss_mean)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        new, old = (optax.apply_updates(state.params, updates), opt_state), (state.params, state.opt_state)
        params, opt_state = jax.tree.map(lambda new, old: jnp.where(is_good, new, old), new, old)
        tokens, guard = add_wide(state.tokens, jnp.sum(rows.segment_ids > 0)), state.guard.after(is_good, loss)
        metrics = {
            "loss": loss,
            **{f"loss_{name}": term for name, term in terms.items()},
            "grad_norm": grad_norm,
            "learning_rate": schedule(state.step - state.guard.skipped),  # the optimizer does not count skipped ones
            "tokens": tokens,
            "invalid_ids": invalid_ids,
            "skipped": guard.skipped,
            "in_a_row": guard.in_a_row,
        }
        if debug_nans:
            trees = {"weight": state.params, "gradient": grads, "update": updates}
            metrics["finite"] = jax.tree.map(lambda x: jnp.all(jnp.isfinite(x)), trees)
        return TrainState(state.step + 1, tokens, params, opt_state, guard, state.frozen), metrics

    return train_step


def _gradient(graphdef: nnx.GraphDef, objective: Objective, state: TrainState, batch: Batch, accumulation: int) -> Any:
    """((loss, its terms), gradient of the trained weights) of a batch, summed over its micro-batches."""

    def loss_fn(params, micro, counts=None):
        return _loss(nnx.merge(graphdef, combine(params, state.frozen)), objective, micro, counts)

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    if accumulation == 1:
        return grad_fn(state.params, batch)
    micros = sharding.split_batch(batch, accumulation)
    counts = _expert_counts(nnx.merge(graphdef, state.weights), micros)

    def add(total, micro):
        return jax.tree.map(jnp.add, total, grad_fn(state.params, micro, counts)), None

    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(grad_fn, state.params, batch, counts))
    return jax.lax.scan(add, zeros, micros)[0]


def _loss(model: Transformer, objective: Objective, batch: Batch, counts: Array | None) -> tuple[Array, dict]:
    """(loss, its terms); `counts` are the tokens per expert of the whole batch, if this is a micro-batch."""
    ce, load = model.cross_entropy(batch)
    terms = weigh(ce, batch)
    loss = sum(objective.coefficients[name] * term for name, term in terms.items())
    if load and (coefficient := model.config.router_aux_loss_coef):
        share = balance(load.counts if counts is None else counts, model.config.num_experts_per_tok)
        terms["router"] = jnp.sum(share * load.probabilities)
        loss += coefficient * terms["router"]
    return loss, terms


def _expert_counts(model: Transformer, micros: Batch) -> Array | None:
    """Tokens per expert in the whole batch, which the gradient of each micro-batch needs; one more forward pass."""
    if not (model.config.num_experts and model.config.router_aux_loss_coef):
        return None
    inputs = micros.inputs, micros.positions, micros.visibility
    return jnp.sum(jax.lax.map(lambda micro: model.hidden_and_load(*micro)[1].counts, inputs), axis=0)


def _invalid_ids(batch: Batch, V: int) -> Int32[Array, ""]:
    """How many ids are outside the vocabulary: they would silently be read, and learnt, as other tokens."""
    return jnp.sum((batch.inputs % V != batch.inputs) | is_labelled(batch) & (batch.labels % V != batch.labels))


def add_wide(words: UInt32[Array, "2"], count: Int32[Array, ""]) -> UInt32[Array, "2"]:
    """Adds a count below 2^31 to a 64-bit number held as [high, low] uint32 words."""
    low = words[1] + count.astype(jnp.uint32)
    return jnp.stack([words[0] + (low < words[1]), low])


def wide_to_int(words: UInt32[ArrayLike, "2"]) -> int:
    """The number that [high, low] words hold."""
    high, low = jax.device_get(words).tolist()
    return (high << 32) + low

"""A mixture of experts in place of an MLP: a router sends each token to the k experts with the highest scores.

Tokens are sorted by expert, so that the products of all experts are one product of ragged groups. No expert has a
capacity and no token is dropped; all shapes are static. If the mesh splits the experts, chips gather each other's
tokens, apply their own experts to them, and sum the results: with as many chips as a token has experts, this moves no
more data than sending tokens to their experts would.

Axes: B rows, T tokens of a row, D hidden size, E experts (of one chip, where they are split), F width of an expert, k
experts of a token, N tokens of all chips that share the experts, P = N k pairs of a token and one of its experts, S
slots, in which pairs are sorted, R slots of a tile.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int32

from refusion_jax.distributed import sharding
from refusion_jax.model.families import FAMILIES
from refusion_jax.model.int8 import Int8Array, factors
from refusion_jax.model.remat import EXPERT, GATHERED
from refusion_jax.model.shape import ModelConfig

NAMES = ("gate_proj", "up_proj", "down_proj")
_AXES = {"gate_proj": ("experts", "expert_embed", "mlp"), "down_proj": ("experts", "mlp", "expert_embed")}
_AXES["up_proj"] = _AXES["gate_proj"]


class Load(NamedTuple):
    """How much a router sends to each expert, summed over real tokens of one layer, or of all layers."""

    counts: Float32[Array, "E"]  # tokens sent to the expert
    probabilities: Float32[Array, "E"]  # their probabilities of being sent there


def route(
    logits: Float32[Array, "N E"], bias: Float32[Array, "E"] | None, c: ModelConfig
) -> tuple[Float32[Array, "N k"], Int32[Array, "N k"], Float32[Array, "N E"]]:
    """(weights of each token's experts, their indices, the probability of every expert).

    With softmax over all experts as in Qwen3-MoE; with sigmoid of each as in DeepSeek-V3 (arXiv 2412.19437, section
    2.1.2), where a bias in the choice balances the experts, and a token chooses from a few groups of them, those with
    the highest sum of their two best scores. We do not train the bias.
    """
    is_softmax = FAMILIES[c.family].router == "softmax"
    scores = jax.nn.softmax(logits) if is_softmax else jax.nn.sigmoid(logits)
    rank = scores if bias is None else scores + bias[None]
    if c.n_group > 1:
        grouped = rank.reshape(len(rank), c.n_group, -1)
        best = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)  # [N, groups]
        chosen = jax.lax.top_k(best, c.topk_group)[1]
        is_open = jnp.any(jax.nn.one_hot(chosen, c.n_group, dtype=bool), axis=1)
        rank = jnp.where(is_open[:, :, None], grouped, -jnp.inf).reshape(rank.shape)
    expert = jax.lax.top_k(rank, c.num_experts_per_tok)[1]
    weight = jnp.take_along_axis(scores, expert, axis=1)
    if c.norm_topk_prob:
        weight = weight / (jnp.sum(weight, axis=1, keepdims=True) + 1e-20)
    probability = scores if is_softmax else scores / (jnp.sum(scores, axis=1, keepdims=True) + 1e-20)
    return c.routed_scaling_factor * weight, expert, probability


def balance(counts: Float32[Array, "E"], chosen: int) -> Float32[Array, "E"]:
    """The coefficient of each expert's probability in the balancing loss, from its tokens in the batch and all layers.

    `sum(balance(counts, k) * probabilities)` is E sum_e f_e P_e of Switch Transformers (arXiv 2101.03961, equation 4)
    for k experts per token: over the tokens of all layers, f_e is the share that goes to e, and P_e the mean
    probability of e. It is k if all experts are equally loaded.
    """
    tokens = jnp.maximum(jnp.sum(counts) / chosen, 1)
    return counts * (counts.size / tokens**2)


def mixture(
    x: Float[Array, "B T D"],
    weights: Mapping[str, Array | Int8Array],
    c: ModelConfig,
    activation: Callable,
    is_real: Bool[Array, "B T"] | None,
) -> tuple[Float[Array, "B T D"], Load | None]:
    """The sum of the k experts of each token, weighted by the router.

    Args:
      x: split over the mesh as "batch", "length", None.
      weights: of one layer: router [D, E] and, if it has one, expert_bias [E], both float32, gate_proj and up_proj
        [E, D, F], down_proj [E, F, D].
      c, activation: how tokens choose experts, and the function that is applied to the gate.
      is_real: tokens that count for the load; None: no load is computed.
    """

    def on_chip(x, is_real, matrix, bias, *projections):
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        logits = jnp.matmul(x.astype(jnp.float32), matrix, precision="highest")
        weight, expert, probability = route(logits, bias, c)
        load = None
        if is_real is not None:
            real = is_real.reshape(-1, 1).astype(jnp.float32)
            counts = jnp.sum(jnp.sum(jax.nn.one_hot(expert, matrix.shape[1]), axis=1) * real, axis=0)
            load = sharding.all_sum(Load(counts, jnp.sum(probability * real, axis=0)), "batch", "length")
        x, weight, expert = (
            sharding.all_gather(each, "experts", axis=0) for each in (x, weight.astype(x.dtype), expert)
        )
        y = _apply(x, weight, expert, [_whole(w, name) for w, name in zip(projections, NAMES, strict=True)], activation)
        return sharding.all_sum(sharding.scatter_sum(y, "experts", axis=0), "mlp").reshape(shape), load

    tokens = sharding.spec("batch", "length", None)
    flags = None if is_real is None else sharding.spec("batch", "length")
    bias = weights.get("expert_bias")
    whole = sharding.spec(None, None), None if bias is None else sharding.spec(None)
    split = [jax.tree.map(functools.partial(_spec, _AXES[name]), weights[name]) for name in NAMES]
    run = sharding.on_each_chip(
        on_chip, (tokens, flags, *whole, *split), (tokens, None if is_real is None else sharding.spec(None))
    )
    return run(x, is_real, weights["router"], bias, *(weights[name] for name in NAMES))


def _spec(axes: tuple[str, ...], x: Array) -> jax.sharding.PartitionSpec:
    """The sharding of a weight, or of its scale in int8, some of whose axes have size 1."""
    return sharding.spec(*(axis if size > 1 else None for axis, size in zip(axes, x.shape, strict=True)))


def _whole(w: Array | Int8Array, name: str) -> Array | Int8Array:
    """The weights of this chip's experts, gathered along the hidden size."""
    axis = _AXES[name].index("expert_embed")
    gathered = jax.tree.map(lambda x: sharding.all_gather(x, "expert_embed", axis) if x.shape[axis] > 1 else x, w)
    return checkpoint_name(gathered, GATHERED)


def _apply(x, weight, expert, projections, activation: Callable) -> jax.Array:
    """[N, D], the contribution of this chip's experts, from x [N, D], weight and expert [N, k]."""
    gate_proj, up_proj, down_proj = projections
    experts, parts = gate_proj.shape[0], sharding.shard_count_here("experts")
    own = expert.ravel() - experts * sharding.shard_index("experts")  # [P]
    own = jnp.where((own >= 0) & (own < experts), own, experts)  # those of other chips come last
    slots = _Slots.of(own, experts, len(x) * min(expert.shape[1], experts), parts)
    source = slots.source // expert.shape[1]  # the token of each slot; out of bounds in empty slots
    place = slots.place.reshape(expert.shape)

    h = _to_slots(x, source, place)  # [S, D]
    gate, up = (checkpoint_name(slots.product(h, w), EXPERT) for w in (gate_proj, up_proj))
    h = activation(gate) * up * _to_slots(weight.reshape(-1, 1), slots.source, slots.place[:, None])
    return _to_tokens(slots.product(h, down_proj), place, source)


class _Slots(NamedTuple):
    """The places of the pairs of a token and one of its experts, sorted by expert; each expert begins with a tile.

    With tiles of one slot there is padding only after the last pair, up to the most pairs that a chip may get. Example:
    four pairs and two experts, in tiles of two slots (P: 4, out of bounds):

        expert of each pair    1 0 1 1
        place                  2 0 3 4        slot       0 1   2 3   4 5
                                              source     1 P   0 2   3 P
    """

    source: Int32[Array, "S"]  # index of its pair; out of bounds in padding
    place: Int32[Array, "P"]  # slot of a pair; out of bounds where the expert is on another chip
    expert: Int32[Array, "S"]
    sizes: Int32[Array, "E"]  # slots of each expert
    tile: int  # R
    share: int  # pairs of this chip, if all experts are equally loaded

    @classmethod
    def of(cls, expert: Int32[Array, "P"], experts: int, most: int, parts: int) -> "_Slots":
        """Sorts pairs by expert, E for those of other chips; at most `most` pairs, with experts split into `parts`."""
        P, share = len(expert), len(expert) // parts
        tile = _tile(share / experts)
        S = min(most, most // tile + experts) * tile if tile > 1 else most
        counts = jnp.sum(expert[None] == jnp.arange(experts)[:, None], axis=1, dtype=jnp.int32)
        sizes = -(-counts // tile) * tile
        # Number of pairs or slots before each expert's first; the last entry is for pairs of other chips.
        pairs, slots = (jnp.pad(jnp.cumsum(each, dtype=jnp.int32), (1, 0)) for each in (counts, sizes))
        order = jnp.argsort(expert, stable=True).astype(jnp.int32)  # the pairs by expert

        # From pairs to slots: the number of a pair among those of its expert is its offset from the first slot.
        number = jnp.argsort(order).astype(jnp.int32) - pairs[expert]
        place = jnp.where(expert < experts, slots[expert] + number, S)

        # And back, from slots to pairs.
        slot = jnp.arange(S, dtype=jnp.int32)
        owner = jnp.minimum(jnp.sum(slots[1:, None] <= slot[None], axis=0, dtype=jnp.int32), experts - 1)
        number = slot - slots[owner]
        source = jnp.where(number < counts[owner], order[jnp.minimum(pairs[owner] + number, P - 1)], P)
        return cls(source, place, owner, sizes, tile, share)

    def product(self, x: Float[Array, "S _"], w: Float[Array, "E _ _"] | Int8Array) -> Float[Array, "S _"]:
        """Each slot times the weight of its expert; undefined in the padding after the last pair."""
        w, scale = factors(w, x.dtype)
        if self.tile == 1:
            with jax.named_scope(f"pairs_{self.share}_of_{len(x)}"):  # as planning/costs.py reads it
                y = jax.lax.ragged_dot(x, w, self.sizes)
        else:
            y = _tiled(x, w, self.expert[:: self.tile], jnp.sum(self.sizes) // self.tile)
        return y if scale is None else (y * scale[:, 0][self.expert]).astype(x.dtype)


def _tile(pairs: float) -> int:
    """Slots of a tile: 1, except on a CPU, where XLA computes `ragged_dot` for all experts: about an expert's pairs."""
    if sharding.device_kind_here() != "cpu":
        return 1
    return 2 ** min(max(round(math.log2(max(pairs, 1))), 2), 7)


@jax.custom_vjp
def _tiled(x, w, expert, tiles) -> jax.Array:
    """[S, F], from x [S, D] in tiles of one expert each, w [E, D, F], expert [S/R] of a tile, and how many tiles count.

    The gradient of w is summed in place, tile by tile, which differentiation of a scan would not do.
    """
    blocks = x.reshape(len(expert), -1, x.shape[1])
    y = jnp.zeros((*blocks.shape[:2], w.shape[2]), x.dtype)
    return jax.lax.fori_loop(0, tiles, lambda i, y: y.at[i].set(blocks[i] @ w[expert[i]]), y).reshape(len(x), -1)


def _tiled_backward(kept, dy):
    x, w, expert, tiles = kept
    blocks, dblocks = (each.reshape(len(expert), -1, each.shape[1]) for each in (x, dy))
    dx = _tiled(dy, w.swapaxes(1, 2), expert, tiles)
    dw = jax.lax.fori_loop(0, tiles, lambda i, dw: dw.at[expert[i]].add(blocks[i].T @ dblocks[i]), jnp.zeros_like(w))
    return dx, dw, None, None


_tiled.defvjp(lambda *args: (_tiled(*args), args), _tiled_backward)


# The gradient of a gather is a scatter-add; as the indices are known in both directions, here it is a gather, too.


@jax.custom_vjp
def _to_slots(x: Float[Array, "N D"], source: Int32[Array, "S"], place: Int32[Array, "N k"]) -> Float[Array, "S D"]:
    """The token of each slot; 0 where there is none."""
    return x.at[source].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _to_tokens(y: Float[Array, "S D"], place: Int32[Array, "N k"], source: Int32[Array, "S"]) -> Float[Array, "N D"]:
    """The sum of the slots of each token."""
    return jnp.sum(y.at[place].get(mode="fill", fill_value=0), axis=1)


_to_slots.defvjp(
    lambda x, source, place: (_to_slots(x, source, place), (source, place)),
    lambda kept, dy: (_to_tokens(dy, *kept[::-1]), None, None),
)
_to_tokens.defvjp(
    lambda y, place, source: (_to_tokens(y, place, source), (place, source)),
    lambda kept, dx: (_to_slots(dx, *kept[::-1]), None, None),
)

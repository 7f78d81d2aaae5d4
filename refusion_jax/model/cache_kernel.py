"""Attention over a cache and new tokens in one TPU kernel, which reads only the filled part of each row's cache.

The products to which XLA compiles `cached_attention` read as many entries of every row as the fullest one has, and
write float32 scores to memory: with 128 rows many times the bytes of the cache (benchmarks/results/tpu_decoding.md).
Here a grid walks over (row, key head, block of cached entries) and normalizes as it goes (online softmax:
FlashAttention-2, arXiv 2307.08691, section 3.1). Past the last filled block the grid names that block again, so that
nothing is fetched. The last step of a row adds the new tokens, by their mask. JAX's paged kernels take one query per
row, or causal masks only.

Axes: B rows, T new tokens of a row, N query heads, K key/value heads, G = N / K query heads a key head serves,
R = T G queries that it serves, S cached entries, L layers, H head size.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int32

from refusion_jax.distributed import sharding

_KEYS = 512  # cached entries of a block: 128 KiB in bfloat16, fetched while the block before is multiplied
_QUERIES = 256  # multiplied at once
_LEAST_NEW = 8  # keys in a product; Mosaic of libtpu 0.0.51 fails on a single one
_HIDDEN = float(jnp.finfo(jnp.float32).min)


def cache_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    visible: Bool[Array, "B T T"],
    cached_k: Float[Array, "L B K S H"],
    cached_v: Float[Array, "L B K S H"],
    layer: Int32[Array, ""],
    length: Int32[Array, "B"],
    fed: Int32[Array, "B"],
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """`cached_attention` on every chip's own rows and heads, for one layer of a cache of all layers.

    All new tokens of a row see the leading `length` entries of its cache. Only the leading `fed` tokens of a row count;
    the result is undefined for the others. `interpret` emulates the kernel on another platform, for tests.
    """
    B, T, N, H = q.shape
    K, G = k.shape[2], N // k.shape[2]
    queries = (q * H**-0.5).reshape(B, T, K, G, H).transpose(0, 2, 1, 3, 4).reshape(B, K, T * G, H)
    padding = (0, max(_LEAST_NEW - T, 0))
    seen = jnp.pad(jnp.repeat(visible, G, axis=1).astype(q.dtype), ((0, 0), (0, 0), padding))  # [B, R, T]
    rows, heads = sharding.spec("batch"), sharding.spec("batch", "kv_heads", None, None)
    cache = sharding.spec("layers", "batch", "kv_heads", None, None)
    specs = sharding.spec(None), rows, rows, heads, cache, cache, heads, heads, sharding.spec("batch", None, None)
    run = sharding.on_each_chip(functools.partial(_on_chip, G, interpret), specs, heads)
    new = (jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), padding, (0, 0))) for x in (k, v))
    out = run(layer[None], length, fed, queries, cached_k, cached_v, *new, seen)
    return out.reshape(B, K, T, G, H).transpose(0, 2, 1, 3, 4).reshape(q.shape)


def _on_chip(groups: int, interpret: bool, layer, length, fed, q, cached_k, cached_v, k, v, seen):
    (B, K, R, H), T, S = q.shape, k.shape[2], cached_k.shape[3]
    block, itemsize = min(_KEYS, S), q.dtype.itemsize

    def own(b, h, s, *_):
        return b, h, 0, 0

    def of_cache(b, h, s, layer, length, fed):
        filled = jnp.where(fed[b] > 0, length[b], 0)
        return layer[0], b, h, jnp.minimum(s, jnp.maximum(pl.cdiv(filled, block) - 1, 0)), 0

    queries, new = pl.BlockSpec((1, 1, R, H), own), pl.BlockSpec((1, 1, T, H), own)
    cache = pl.BlockSpec((1, 1, 1, block, H), of_cache)
    return pl.pallas_call(
        functools.partial(_kernel, groups=groups),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(B, K, pl.cdiv(S, block)),
            in_specs=[queries, cache, cache, new, new, pl.BlockSpec((1, R, T), lambda b, h, s, *_: (b, 0, 0))],
            out_specs=queries,
            scratch_shapes=[pltpu.VMEM((R, size), jnp.float32) for size in (H, 1, 1)],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(  # of a full cache: planning/costs.py reads it
            flops=4 * B * K * R * H * (S + T),
            transcendentals=B * K * R * (S + T),
            bytes_accessed=itemsize * B * (2 * K * H * (R + S + T) + R * T),
        ),
        name="cache_attention",
        interpret=interpret,
    )(layer, length, fed, q, cached_k, cached_v, k, v, seen)


def _kernel(
    layer, length, fed, q, cached_k, cached_v, k, v, seen, out, mixed, highest, total, *, groups: int
):  # fmt: skip
    """One step of the grid: the queries of a row and key head attend to a block of cached entries."""
    row, step, block = pl.program_id(0), pl.program_id(2), cached_k.shape[3]
    R = q.shape[2]

    def meet(queries, keys, values, mask):
        """Adds keys to the running softmax of queries."""
        scores = jax.lax.dot_general(
            q[0, 0, queries], keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )  # fmt: skip
        scores = jnp.where(mask, scores, _HIDDEN)
        before = highest[queries]
        now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights, kept = jnp.exp(scores - now), jnp.exp(before - now)
        highest[queries] = now
        total[queries] = total[queries] * kept + jnp.sum(weights, axis=1, keepdims=True)
        mixed[queries] = mixed[queries] * kept + jnp.dot(
            weights.astype(values.dtype), values, preferred_element_type=jnp.float32
        )

    @pl.when(step == 0)
    def _():
        mixed[...], total[...] = jnp.zeros_like(mixed), jnp.zeros_like(total)
        highest[...] = jnp.full_like(highest, _HIDDEN)

    for first in range(0, R, _QUERIES):
        queries, is_fed = pl.ds(first, min(_QUERIES, R - first)), first < fed[row] * groups
        left = length[row] - step * block

        @pl.when(is_fed & (left > 0))
        def _(queries=queries, left=left):
            is_filled = jax.lax.broadcasted_iota(jnp.int32, (block, 1), 0) < left  # others may hold anything
            values = jnp.where(is_filled, cached_v[0, 0, 0], 0)
            mask = jax.lax.broadcasted_iota(jnp.int32, (1, block), 1) < left
            meet(queries, cached_k[0, 0, 0], values, mask)

        @pl.when(is_fed & (step == pl.num_programs(2) - 1))
        def _(queries=queries):
            meet(queries, k[0, 0], v[0, 0], seen[0, queries].astype(jnp.float32) > 0)

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        out[0, 0] = (mixed[...] / jnp.maximum(total[...], 1e-30)).astype(out.dtype)

"""Attention by the splash kernel of JAX, on TPUs: only those tiles of packed rows in which a query sees a key.

The kernel works on tiles of queries x keys. They are selected twice: by the pattern, when the program is built, and by
the documents of the batch, when it runs. A causal row of 2,048 tokens, with documents of 600, in tiles of 512:

    pattern      documents    The kernel reads from a table (`block_mask`) whether a tile is to be worked on, and from
    x . . .      x . . .      another (`data_next`) what to fetch for it. Both are arrays that it gets when it runs; JAX
    x x . .      x x . .      fills them from the pattern only, we also from the documents. A skipped tile still takes a
    x x x .      . x x .      turn of the grid, half as long as work on it (from timings on v5p in
    x x x x      . . x x      github.com/marin-community/marin/pull/6330).

Axes: B rows, T row length, S the part of a row whose queries a chip has, N query heads, K key/value heads, H head size;
Q, U tiles of queries and of keys in a row, W tiles of keys that any query needs.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo, process_mask
from jaxtyping import Array, Bool, Float, Int32

from refusion_jax.batch.folding import Folded
from refusion_jax.batch.visibility import CAUSAL, Pattern, Visibility
from refusion_jax.distributed import sharding
from refusion_jax.model import remat

Kernel = splash.SplashAttentionKernel
# Side of the tiles that the kernel works on: the largest of these that divides S. On v6e tiles of 1,024 make the kernel
# a third faster (github.com/apple/axlearn/pull/958; MaxText's configs for v6e have 1,024 and 2,048, those for v4, v5e
# and v5p its default, 512), in rows long enough that the tiles on the diagonal, which are computed whole, do not undo
# it: 2,560 keys per query at T = 4,096, 2,304 with tiles of 512. Both fit the vector memory that a program may use
# (head size 128, bfloat16, libtpu 0.0.51).
_TILES = (1024, 512, 256, 128)
_LARGEST = {"TPU v6 lite": 1024}  # by jax.Device.device_kind, for rows of 4,096 tokens and more; 512 otherwise

# One kernel for the gradients of queries, keys and values computes the scores once: 5 products instead of 7, 2.3 %
# less of a step of 8B as counted for v5p, v5e and v6e. It writes the gradient of the queries once per tile of keys, to
# be summed: as many arrays as a row has tiles, too many for the memory with long rows. It takes one row.
_MOST_TILES, _MOST_ROWS = 8, 8


def splash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    visibility: Visibility,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """`packed_attention` by the splash kernel, where visibility has a pattern, on every chip's own rows and heads.

    If rows are split over the mesh, each chip attends from its part of the queries to the keys of whole rows. T is a
    multiple of 128 x the mesh's sequence axis. `interpret` emulates the kernel on another platform, for tests.
    """
    parts, heads, shards = (sharding.shard_count_here(axis) for axis in ("length", "heads", "batch"))
    kernel, tiles = _kernel(visibility.pattern, q.shape[1], q.shape[2] // heads, parts, len(q) // shards, interpret)
    queries, own = sharding.spec("batch", "length", "heads", None), sharding.spec("batch", "length")
    keys, whole = sharding.spec("batch", None, "kv_heads", None), sharding.spec("batch", None)
    kernel_spec, mesh = None, jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        kernel_spec = kernel.manual_sharding_spec(jax.NamedSharding(mesh, sharding.spec(None, "length")))
    attend = functools.partial(_attend, tiles)
    run = sharding.on_each_chip(attend, (kernel_spec, queries, keys, keys, own, whole), queries)
    # The kernel does not scale the scores.
    return run(kernel, q * q.shape[-1] ** -0.5, k, v, visibility.segment_ids, visibility.segment_ids)


def _attend(
    tiles: int,
    kernel: Kernel,
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    q_segments: Int32[Array, "B S"],
    k_segments: Int32[Array, "B T"],
) -> Float[Array, "B S N H"]:
    """Attention on one chip: the kernel takes all rows as one, with different numbers for the documents of each.

    If one kernel computes all gradients, it is called row by row.
    """
    if len(q) > 1 and kernel.kwargs["block_sizes"].use_fused_bwd_kernel:
        done = []
        for row in range(len(q)):
            own = [x[row : row + 1] for x in (q, k, v, q_segments, k_segments)]
            if done:  # one row at a time, also in the backward pass: there is memory for the sums of one
                own[0], done[-1] = jax.lax.optimization_barrier((own[0], done[-1]))
            done.append(_attend(tiles, kernel, *own))
        return jnp.concatenate(done)
    first = (jnp.arange(len(q)) * (jnp.max(k_segments) + 1))[:, None]
    q_segments, k_segments = q_segments + first, k_segments + first
    segments = splash.SegmentIds(q_segments.ravel(), k_segments.ravel())
    rows = (x.reshape(-1, *x.shape[2:]).swapaxes(0, 1) for x in (q, k, v))  # concatenated: [N, B*T, H]
    with jax.named_scope(f"rows_{len(q)}_tiles_{tiles}"):  # a name that stays: planning/costs.py reads it
        heads = of_documents(kernel, q_segments, k_segments)(*rows, segments)
    return heads.swapaxes(0, 1).reshape(q.shape)


def of_documents(kernel: Kernel, q_segments: Int32[Array, "B S"], k_segments: Int32[Array, "B T"]) -> Kernel:
    """The kernel for B rows one after the other, working only on tiles whose queries and keys share a document.

    Documents must have different numbers in every row. A tile counts as holding all documents between its smallest
    number and its largest, so that none is missed, whatever their order.
    """
    sizes = kernel.kwargs["block_sizes"]

    def skipping(info: MaskInfo, queries: int, keys: int, over_queries: bool) -> MaskInfo:
        """One pass: its tables are [1, Q, W], or [1, W, U] in the pass over queries."""
        low_q, high_q = _range(q_segments, queries)
        low_k, high_k = _range(k_segments, keys)
        shared = (low_q[:, :, None] <= high_k[:, None]) & (low_k[:, None] <= high_q[:, :, None])  # [B, Q, U]
        if over_queries:
            turn = _flip(_pass(_flip(info), shared.swapaxes(1, 2)))
        else:
            turn = _pass(info, shared)
        places = info.q_sequence  # of the queries of one row; the rows are concatenated
        if places is not None:
            rows, length = k_segments.shape
            places = (places[None] + length * jnp.arange(rows)[:, None]).ravel()
        return turn._replace(q_sequence=places)

    return Kernel(
        skipping(kernel.fwd_mask_info, sizes.block_q, sizes.block_kv, over_queries=False),
        kernel.dq_mask_info and skipping(kernel.dq_mask_info, sizes.block_q_dq, sizes.block_kv_dq, over_queries=False),
        skipping(kernel.dkv_mask_info, sizes.block_q_dkv, sizes.block_kv_dkv, over_queries=True),
        **kernel.kwargs,
    )


def _range(segments: Int32[Array, "B T"], tile: int) -> tuple[Int32[Array, "B Q"], Int32[Array, "B Q"]]:
    """The smallest and the largest number in each tile."""
    tiles = segments.reshape(len(segments), -1, tile)
    return tiles.min(axis=-1), tiles.max(axis=-1)


def _pass(info: MaskInfo, shared: Bool[Array, "B Q U"]) -> MaskInfo:
    """The tables of one pass over the keys of each tile of queries, [1, B * Q, W].

    Example: a tile of queries that sees four tiles of keys by the pattern, the last one in part, and shares documents
    with the last two alone:

        block_mask    2 2 2 1    becomes    0 0 2 1        0: skip, 1: by a mask, 2: all of the tile
        data_next     0 1 2 3               2 2 2 3        skipped tiles fetch nothing: they name the one that is
                                                           already there, or the next one
    """
    rows, _, count = shared.shape
    index = info.data_next.astype(jnp.int32)  # [1, Q, W]
    # In place of a gather, which a TPU computes one element at a time; [B, Q, W].
    is_shared = jnp.any(shared[:, :, None] & (index[..., None] == jnp.arange(count)[None, None, None]), axis=-1)
    works = is_shared & (info.block_mask > 0)
    first = jnp.min(jnp.where(works, index, count - 1), axis=-1, keepdims=True)
    last = jnp.max(jnp.where(works, index, 0), axis=-1, keepdims=True)
    index = jnp.clip(index, first, last) + count * jnp.arange(rows)[:, None, None]
    index_type = jnp.int16 if rows * count <= np.iinfo(np.int16).max else jnp.int32  # scalar memory is small

    def joined(table):
        return table.reshape(1, -1, table.shape[-1])

    return info._replace(
        data_next=joined(index.astype(index_type)),
        block_mask=joined(jnp.where(works, info.block_mask, 0)),
        mask_next=None if info.mask_next is None else joined(jnp.broadcast_to(info.mask_next, works.shape)),
    )


def _flip(info: MaskInfo) -> MaskInfo:
    """The tables with keys and queries exchanged."""
    data_next, mask_next, block_mask = (None if x is None else x.swapaxes(1, 2) for x in info[:3])
    return info._replace(data_next=data_next, mask_next=mask_next, block_mask=block_mask)


def _kernel(pattern: Pattern, length: int, heads: int, parts: int, rows: int, interpret: bool) -> tuple[Kernel, int]:
    """The kernel for `heads` heads of `rows` rows of `length` tokens, whose queries are split into `parts`.

    Also the number of tiles that it works on in a row with a single document, in the part with most.
    """
    one_head = masks.CausalMask((length, length)) if pattern == CAUSAL else _PatternMask(pattern, length)
    largest = _LARGEST.get(sharding.device_kind_here(), 512) if length >= 4096 else 512
    # Folded rows have two parts per chip: tiles stay within one part if it has room for one.
    own = length // parts // (2 if isinstance(pattern, Folded) and length // parts % (2 * _TILES[-1]) == 0 else 1)
    tile = next(tile for tile in _TILES if tile <= largest and own % tile == 0)
    fused = parts == 1 and length // tile <= _MOST_TILES and rows <= _MOST_ROWS
    passes = "q", "kv", "q_dkv", "kv_dkv", "kv_dkv_compute", *(() if fused else ("q_dq", "kv_dq"))
    sizes = splash.BlockSizes(**{f"block_{name}": tile for name in passes}, use_fused_bwd_kernel=fused)
    every_head, shards = masks.MultiHeadMask([one_head] * heads), {"head_shards": 1, "q_seq_shards": parts}
    kernel = splash.make_splash_mha(
        every_head, block_sizes=sizes, residual_checkpoint_name=remat.ATTENTION, interpret=interpret, **shards
    )
    info, _ = process_mask(every_head, (tile, tile), downcast_smem_data=True, **shards)  # cached: made for the kernel
    tiles = np.count_nonzero(info.block_mask[0].reshape(parts, -1), axis=1)
    return kernel, int(tiles.max())


@dataclasses.dataclass(frozen=True)
class _PatternMask(masks.Mask):
    """A pattern in the form that the kernel takes, tile by tile, so that [T, T] is never created."""

    pattern: Pattern
    length: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.length, self.length

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        return self.pattern.dense(self.length, *index)

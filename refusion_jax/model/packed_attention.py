"""Attention over packed rows, by the kernel that suits the device and what is visible.

splash   TPU: the Pallas kernel of JAX, where visibility follows a static pattern; skips the tiles that nobody sees
cudnn    NVIDIA: cuDNN's fused attention, through `jax.nn.dot_product_attention`
xla      everything else, in blocks of queries: [T, T] scores are never held for a whole row

All of them compute what `attention` does with `Visibility.mask`, the dense definition.

Axes: B rows, T row length, N query heads, K key/value heads, H head size.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Float

from refusion_jax.batch.visibility import CAUSAL, Pattern, Visibility
from refusion_jax.model import remat
from refusion_jax.model.attention import attention
from refusion_jax.runtime import sharding

BACKENDS = ("xla", "splash", "cudnn")

# Side of the tiles that the kernel works on, by its largest dividing T. 512 keeps scores and operands of head size 128
# in the 16 MiB of vector memory that a compiled program may use on every generation from v4 to v6e.
_TILES = (512, 256, 128)

# Queries go to XLA in blocks that see only the keys that their pattern lets any of them see. Causal rows of 512 tokens
# so take 53 ms forward and backward on two cores instead of 90. Blocks of 64 take 46, but compile in twice the time.
_QUERIES, _MOST_BLOCKS = 128, 8


def backend_for(platform: str, length: int, head_dim: int, dtype: str) -> str:
    """The kernel for a platform ("tpu", "gpu", "cpu"), where it can do these sizes; "xla" otherwise.

    Args:
      platform: of the devices.
      length: of the part of a row that a chip has.
      head_dim: size of a head.
      dtype: of computation.
    """
    if platform == "tpu" and length % _TILES[-1] == 0:
        return "splash"
    if platform == "gpu" and head_dim % 8 == 0 and head_dim <= 128 and dtype == "bfloat16":
        return "cudnn"
    return "xla"


def packed_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    visibility: Visibility,
    backend: str,
) -> Float[Array, "B T N H"]:
    """Attention of every token to the tokens that it sees.

    Args:
      q: float32 or bfloat16 (cudnn: bfloat16 only).
      k, v: of q's dtype, as is what is returned.
      visibility: of the [B, T] tokens.
      backend: one of BACKENDS; splash serves patterns alone, and leaves everything else to xla.
    """
    if backend == "splash" and visibility.pattern:
        return splash_attention(q, k, v, visibility)
    if backend == "cudnn":
        return jax.nn.dot_product_attention(q, k, v, mask=visibility.mask()[:, None], implementation="cudnn")
    T = q.shape[1]
    block = T if sharding.shard_count_here("length") > 1 else max(_QUERIES, -(-T // _MOST_BLOCKS))
    ends = [*range(block, T, block), T]
    heads = [_block(q, k, v, visibility, begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    return jnp.concatenate(heads, axis=1)


def _block(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    visibility: Visibility,
    begin: int,
    end: int,
) -> Float[Array, "B {end-begin} N H"]:
    """Attention of some queries to the keys that any of them may see."""
    T = q.shape[1]
    keys = slice(*visibility.pattern.key_range(T, begin, end)) if visibility.pattern else slice(0, T)
    mask = visibility.mask(slice(begin, end), keys)
    return attention(q[:, begin:end], k[:, keys], v[:, keys], mask)


def splash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    visibility: Visibility,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """`packed_attention` by the splash kernel, on every chip's own rows, heads and part of the rows.

    Where rows are split over the mesh, each chip attends from its part of the queries to the keys of whole rows.

    Args:
      q, k, v, visibility: as for `packed_attention`, with a pattern; T a multiple of 128 x the mesh's sequence axis.
      interpret: emulate the kernel on another platform, for tests.
    """
    mesh = jax.sharding.get_abstract_mesh()
    parts = 1 if mesh.empty else sharding.shard_count(mesh, "length")
    heads = q.shape[2] // (1 if mesh.empty else sharding.shard_count(mesh, "heads"))
    kernel = _kernel(visibility.pattern, q.shape[1], heads, parts, interpret)
    whole, split = sharding.spec("batch", None), sharding.spec("batch", "length")
    whole_heads, split_heads = (
        sharding.spec("batch", "kv_heads", None, None),
        sharding.spec("batch", "heads", "length", None),
    )
    kernel_spec = None
    if not mesh.empty:
        kernel_spec = kernel.manual_sharding_spec(jax.NamedSharding(mesh, sharding.spec(None, "length")))

    def local(kernel, q, k, v, q_segments, kv_segments):
        segments = splash.splash_attention_kernel.SegmentIds(q_segments, kv_segments)
        return jax.vmap(kernel)(q, k, v, segments)

    run = sharding.on_each_chip(local, (kernel_spec, split_heads, whole_heads, whole_heads, split, whole), split_heads)
    # The kernel leaves the scale of the scores to its caller.
    q, k, v = (q * q.shape[-1] ** -0.5).swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2)
    return run(kernel, q, k, v, visibility.segment_ids, visibility.segment_ids).swapaxes(1, 2)


def _kernel(pattern: Pattern, length: int, heads: int, parts: int, interpret: bool):
    """The kernel for `heads` heads of rows of `length` tokens, whose queries are split into `parts`."""
    mask = splash.splash_attention_mask
    one_head = mask.CausalMask((length, length)) if pattern == CAUSAL else _PatternMask(pattern, length)
    tile = next(tile for tile in _TILES if length // parts % tile == 0)
    sizes = splash.splash_attention_kernel.BlockSizes(
        block_q=tile,
        block_kv=tile,
        block_q_dkv=tile,
        block_kv_dkv=tile,
        block_kv_dkv_compute=tile,
        block_q_dq=tile,
        block_kv_dq=tile,
    )
    return splash.splash_attention_kernel.make_splash_mha(
        mask.MultiHeadMask([one_head] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=parts,
        residual_checkpoint_name=remat.ATTENTION,
        interpret=interpret,
    )


class _PatternMask(splash.splash_attention_mask.Mask):
    """A pattern as the kernel asks for it: tile by tile, so that [T, T] is never made."""

    def __init__(self, pattern: Pattern, length: int):
        self._pattern, self._length = pattern, length

    @property
    def shape(self) -> tuple[int, int]:
        return self._length, self._length

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        return self._pattern.dense(self._length, *index)

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, _PatternMask)
        return same and (self._pattern, self._length) == (other._pattern, other._length)

    def __hash__(self) -> int:
        return hash((self._pattern, self._length))

"""How much memory a batch takes, said before anything is compiled for it."""

import os

import jax
from jax.sharding import Mesh

from refusion_jax.decoding.cache import bytes_per_token
from refusion_jax.decoding.settings import Static
from refusion_jax.model.transformer import Transformer
from refusion_jax.runtime.errors import UserError
from refusion_jax.runtime.sharding import ways

_GIB = 2**30
_FLOAT32 = 4


def bytes_needed(model: Transformer, mesh: Mesh, rows: int, admitted: int, static: Static) -> int:
    """Bytes on each device beside the weights: the cache, and what the widest forward holds at its height.

    Args:
      model: its shape and dtype count.
      mesh: rows are split over its batch axes, heads and vocabulary over its tensor axis.
      rows: of the batch.
      admitted: rows prefilled at once, in a cache of their own.
      static: sizes.
    """
    c, width = model.config, static.widths[-1]
    per_row = static.cache_length * bytes_per_token(c, model.dtype)
    logits = 4 * width * c.vocab_size * _FLOAT32  # as they come, twice masked, and with noise
    scores = 2 * width * c.num_attention_heads * (static.cache_length + width) * _FLOAT32  # before and after softmax
    batch, tensor = ways(mesh, "batch"), ways(mesh, "heads")
    return (-(-rows // batch) * (per_row + logits + scores) + admitted * per_row) // tensor


def check_memory(model: Transformer, mesh: Mesh, rows: int, admitted: int, static: Static) -> None:
    """Refuses a batch that cannot fit.

    Raises:
      UserError: with what it takes, what there is, and the batch that would fit.
    """
    free = free_bytes(mesh.devices.flat[0])
    if bytes_needed(model, mesh, rows, admitted, static) <= free:
        return
    fitting = [n for n in (2**i for i in range(20)) if bytes_needed(model, mesh, n, -(-n // 8), static) <= free]
    fix = (
        f"--decode.batch_size={fitting[-1]} would fit"
        if fitting
        else "lower --decode.cache_length or --decode.max_new_tokens"
    )
    raise UserError(
        f"--decode.batch_size={rows}: {rows} rows of {static.cache_length:,} tokens, of "
        f"{bytes_per_token(model.config, model.dtype):,} bytes of cache each, need "
        f"{bytes_needed(model, mesh, rows, admitted, static) / _GIB:.1f} GiB a device beside the weights; "
        f"{free / _GIB:.1f} GiB are free: {fix}"
    )


def free_bytes(device: jax.Device) -> int:
    """Memory of a device that nothing has taken yet; for the CPU all of the machine's, whoever uses it."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

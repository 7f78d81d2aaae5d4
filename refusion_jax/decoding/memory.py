"""Estimates the memory of a batch before anything is compiled, and refuses one that cannot fit."""

import os

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from refusion_jax.cli.errors import SettingError
from refusion_jax.decoding.auxiliary import WithAuxiliaries
from refusion_jax.decoding.cache import bytes_per_token, tokens_at_once
from refusion_jax.decoding.decoder import Decoder
from refusion_jax.distributed.sharding import shard_count
from refusion_jax.model.interface import LanguageModel

REFILL = 8  # a batch is refilled by eighths, as each refill costs a prefill and a host-device synchronization
_GIB = 2**30
_FLOAT32 = 4
_LOGIT_ARRAYS = 10  # raw, masked, with noise, probabilities ...; XLA keeps 9.5 of them for masked diffusion on a CPU


def admissions(rows: int, mesh: Mesh) -> list[int]:
    """The numbers of rows for which admission is compiled: 1, 2, 4 and 8 per shard, but at most an eighth of the batch.

    Requests are padded to the next of them: a prefill costs as much for padding as for prompts.
    """
    shards = shard_count(mesh, "batch")
    return [shards * size for size in (1, 2, 4, 8) if size <= max(1, rows // (REFILL * shards))]


def bytes_needed(model: LanguageModel, mesh: Mesh, rows: int, decoder: Decoder, kept: int = 0) -> int:
    """Bytes on each device in addition to the weights: the caches of the batch and of the rows that are prefilled at
    once, and the temporaries of the widest forward pass or of the prefill.

    Rows are split over the batch axes of the mesh, heads and vocabulary over its tensor axis. The prefix cache has
    `kept` tokens. Of the model only shape and dtypes are used.
    """
    c, entries = model.config, decoder.cache_length
    batch, tensor = shard_count(mesh, "batch"), shard_count(mesh, "heads")
    admitted = admissions(rows, mesh)[-1] // batch  # of a shard, as are:
    rows = -(-rows // batch)
    with jax.set_mesh(mesh):
        scored = decoder.scored(model, rows * batch)
        prefilled = tokens_at_once(decoder.chunk) if decoder.copies_prefix else decoder.chunk or entries
    logits = _LOGIT_ARRAYS * c.vocab_size * _FLOAT32
    logits += model.head_rows * c.hidden_size * model.dtype.itemsize  # gathered rows of the head
    rounded = c.vocab_size * c.hidden_size if model.head_rows else 0  # the head in int8

    def scores(fed: int) -> int:
        return 2 * fed * c.num_attention_heads * (entries + fed) * _FLOAT32  # before and after softmax

    temporary = max(rows * scores(decoder.width) + scored * logits, admitted * scores(prefilled))
    cached = (rows + admitted) * entries + kept
    return (cached * token_bytes(model) + temporary + rounded) // tensor


def room_besides(model: LanguageModel, mesh: Mesh, rows: int, decoder: Decoder) -> int:
    """Tokens whose keys and values fit into each device next to a batch; the same number on all hosts of the mesh."""
    free = free_bytes(mesh) - bytes_needed(model, mesh, rows, decoder)
    return max(free, 0) * shard_count(mesh, "heads") // token_bytes(model)


def check_memory(model: LanguageModel, mesh: Mesh, rows: int, decoder: Decoder, kept: int = 0) -> None:
    """Raises SettingError if a batch cannot fit, naming a batch size that would; see `bytes_needed`.

    All hosts of a mesh decide the same.
    """
    free, needed = free_bytes(mesh), bytes_needed(model, mesh, rows, decoder, kept)
    if needed <= free:
        return
    fitting = [n for n in (2**i for i in range(20)) if bytes_needed(model, mesh, n, decoder, kept) <= free]
    prefixes, too = (f" and {kept:,} of kept prefixes", "the prefix cache, ") if kept else ("", "")
    fix = f"batch_size={fitting[-1]} would fit" if fitting else f"lower {too}cache_length or max_new_tokens"
    raise SettingError(
        "decode",
        "batch_size",
        rows,
        f"{rows} rows of {decoder.cache_length:,} tokens{prefixes}, of {token_bytes(model):,} bytes of cache each, "
        f"need {needed / _GIB:.1f} GiB per device besides the weights; {free / _GIB:.1f} GiB are free: {fix}",
    )


def token_bytes(model: LanguageModel) -> int:
    """Bytes of the keys and values of a token, in the caches of the model and of auxiliary models."""
    models = model.models if isinstance(model, WithAuxiliaries) else [model]
    return sum(bytes_per_token(m.config, m.cache_dtype) for m in models)


def free_bytes(mesh: Mesh) -> int:
    """Free bytes of the device of all hosts that has the least; of a CPU the total memory of the machine."""
    stats = mesh.local_devices[0].memory_stats()
    if stats and "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats["bytes_in_use"]
    else:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if mesh.is_multi_process:
        free = int(multihost_utils.process_allgather(np.array(free, np.float64)).min())
    return free

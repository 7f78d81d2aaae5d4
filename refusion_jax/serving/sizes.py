"""What an engine is compiled for, where its settings leave it open."""

import dataclasses

from refusion_jax.decoding.cache import bytes_per_token
from refusion_jax.decoding.decoder import Decoder
from refusion_jax.decoding.memory import room_besides
from refusion_jax.decoding.queue import mesh_of
from refusion_jax.decoding.settings import Settings
from refusion_jax.distributed.sharding import shard_count
from refusion_jax.model.shape import ModelConfig
from refusion_jax.model.transformer import Transformer

_NEW_TOKENS = 256  # of an answer, unless the settings say otherwise


def sized(settings: Settings, model: ModelConfig, most: int = 2**31) -> Settings:
    """The settings with what an engine needs: room for a text, by default all that the model reads, and new tokens.

    A text has room for `most` tokens, unless the settings say so. SettingError: the model reads fewer than these.
    """
    reads = model.max_position_embeddings
    if settings.cache_length > reads:
        settings.refuse("cache_length", f"the model reads {reads} tokens")
    room, multiple = settings.cache_length or min(reads, most), settings.for_model(model).multiple
    fitting = max(min(_NEW_TOKENS, room // 2) // multiple, 1) * multiple
    return dataclasses.replace(settings, cache_length=room, max_new_tokens=settings.max_new_tokens or fitting)


def kept_blocks(model: Transformer, decoder: Decoder, rows: int, most: int | None) -> int:
    """Blocks of what prompts begin with that are kept for others; see `decoding.prefixes`.

    They take at most so many bytes on each device; None: as many as the batch, in a quarter of what is then free.
    """
    tokens = min(rows * decoder.cache_length, room_besides(model, mesh_of(model), rows, decoder) // 4)
    if most is not None:
        tokens = most * shard_count(mesh_of(model), "heads") // bytes_per_token(model.config, model.cache_dtype)
    return tokens // decoder.prefix_block if decoder.copies_prefix else 0

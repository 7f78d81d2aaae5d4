"""Strict settings for every test: eight virtual CPU devices, no implicit rank promotion, warnings are errors."""

import functools
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import ml_collections
from flax import nnx

from refusion_jax.config import default_config
from refusion_jax.model.transformer import ModelConfig, Transformer

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_threefry_partitionable", True)

PAD, BOS, EOS, MASK = 0, 1, 2, 4


def config_with(**keys) -> ml_collections.ConfigDict:
    """The default config with dotted keys changed."""
    config = default_config()
    for name, value in keys.items():
        config.update_from_flattened_dict({name: value})
    return config


def tiny_config(**changes) -> ModelConfig:
    """A model that compiles in a second; grouped heads, a vocabulary with padding rows."""
    shape = {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 32,
        "rope_theta": 100.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 256,
        "num_tokens": 30,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "mask_token_id": MASK,
    }
    return ModelConfig(**shape | changes)


@functools.partial(jax.jit, static_argnums=0)
def _forward(graphdef, params, *inputs):
    return nnx.merge(graphdef, params)(*inputs)


def forward(model: Transformer, *inputs: jax.Array) -> jax.Array:
    """model(*inputs), compiled once for all models and inputs of the same shapes."""
    return _forward(*nnx.split(model), *inputs)


def tiny_model(seed: int = 0, **changes) -> Transformer:
    """A random tiny model."""
    return Transformer(tiny_config(**changes), nnx.Rngs(seed))

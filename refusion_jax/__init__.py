"""refusion_jax: pretrain, adapt, evaluate and decode slot-diffusion language models (ReFusion) in JAX."""

from refusion_jax.decoding.api import Decoded, decode
from refusion_jax.decoding.requests import Request
from refusion_jax.decoding.settings import DecodeSettings
from refusion_jax.errors import UserError
from refusion_jax.pretrained import load_model, load_tokenizer

__all__ = ["DecodeSettings", "Decoded", "Request", "UserError", "decode", "load_model", "load_tokenizer"]

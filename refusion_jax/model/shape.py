"""Reads and checks the shape of a transformer from a file, before anything is built."""

from typing import Any

import ml_collections
from etils import epath

from refusion_jax.cli.errors import UserError
from refusion_jax.distributed.json_files import to_type
from refusion_jax.model.families import FAMILIES
from refusion_jax.model.transformer import ModelConfig

_LARGEST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "num_hidden_layers": 2**14,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "intermediate_size": 2**22,
    "max_position_embeddings": 2**28,
    "num_tokens": 2**24,
}


def to_model_config(path: epath.PathLike, content: dict[str, Any]) -> ModelConfig:
    """The shape of a model, from the values in a file.

    Raises:
      UserError: naming the file and the key that is missing, of another type, or impossible.
    """
    config = to_type(content, ModelConfig, f"{path} cannot be read")
    if fault := _fault(config):
        raise UserError(f"{path} describes no model: {fault}")
    return config


def experts_fault(c: ModelConfig | ml_collections.ConfigDict) -> str | None:
    """What is wrong with the experts of a model of a known family."""
    if not FAMILIES[c.family].experts:
        return f"num_experts={c.num_experts}: family={c.family} has none" if c.num_experts else None
    if not 1 <= c.num_experts <= 2**14:
        return f"num_experts={c.num_experts} must be 1 to {2**14} for family={c.family}"
    if not 1 <= c.num_experts_per_tok <= c.num_experts:
        return f"num_experts_per_tok={c.num_experts_per_tok} must be 1 to num_experts={c.num_experts}"
    if not 1 <= c.moe_intermediate_size <= 2**22:
        return f"moe_intermediate_size={c.moe_intermediate_size} must be 1 to {2**22} for family={c.family}"
    if not 0 <= c.router_aux_loss_coef <= 1e6:
        return f"router_aux_loss_coef={c.router_aux_loss_coef} must be 0 or above"
    return None


def _fault(c: ModelConfig) -> str | None:
    for name, largest in _LARGEST.items():
        if not 1 <= getattr(c, name) <= largest:
            return f"{name}={getattr(c, name)} must be 1 to {largest}"
    if c.family not in FAMILIES:
        return f"family={c.family[:60]} must be one of {', '.join(FAMILIES)}"
    if fault := experts_fault(c):
        return fault
    if c.num_attention_heads % c.num_key_value_heads:
        return f"num_attention_heads={c.num_attention_heads} must be a multiple of {c.num_key_value_heads} kv heads"
    if not 0 <= c.block_size <= 2**20:
        return f"block_size={c.block_size} must be 0 to {2**20}"
    if c.head_dim % 2:
        return f"head_dim={c.head_dim} must be even"
    if not (0 < c.rope_theta <= 1e12 and 0 < c.rms_norm_eps <= 1):
        return f"rope_theta={c.rope_theta:g} must be above 0, and rms_norm_eps={c.rms_norm_eps:g} from 0 to 1"
    if not (len(c.rope_scaling) in (0, 1, 4) and all(0 < x <= 1e12 for x in c.rope_scaling)):
        return f"rope_scaling={c.rope_scaling} must be one or four numbers above 0"
    if not (len(c.local_rope) in (0, 2) and all(0 < x <= 1e12 for x in c.local_rope)):
        return f"local_rope={c.local_rope} must be two numbers above 0"
    if not 0 <= c.query_pre_attn_scalar <= 2**20:
        return f"query_pre_attn_scalar={c.query_pre_attn_scalar} must be 0 or above"
    for kind in ("pad", "bos", "eos", "mask"):
        if not -1 <= getattr(c, f"{kind}_token_id") < c.vocab_size:
            return f"{kind}_token_id={getattr(c, f'{kind}_token_id')} is no row of the embedding"
    return None

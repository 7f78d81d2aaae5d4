"""Families of Hugging Face models as data: what each has that others lack, and what it calls its weights.

To read another family, declare it here; where it has a layer that none of these has, teach it to `Transformer`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type` of config.json."""

    architecture: str  # its class in transformers
    qk_norm: str = ""  # RMSNorm of queries and keys before RoPE: "head": each head, "all": all heads together
    qkv_bias: bool = False
    norm_after: bool = False  # RMSNorm of what attention and mlp give, not of what they read
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)  # weights that are named otherwise
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of config.json; other values are refused


FAMILIES = {
    "llama": Family("LlamaForCausalLM", fixed={"attention_bias": False, "mlp_bias": False}),  # 2, 3.x, SmolLM2
    "mistral": Family("MistralForCausalLM", fixed={"sliding_window": None}),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        qk_norm="all",
        norm_after=True,
        names={"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"},
        fixed={"attention_bias": False},
    ),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, fixed={"use_sliding_window": False}),  # and 2.5
    "qwen3": Family("Qwen3ForCausalLM", qk_norm="head", fixed={"attention_bias": False, "use_sliding_window": False}),
}

# Ours -> (theirs, how many leading axes of ours, without that of the layers, are the input; 0: the same order of axes).
LAYER_WEIGHTS = {
    "attention_norm": ("input_layernorm.weight", 0),
    "q_proj": ("self_attn.q_proj.weight", 1),
    "k_proj": ("self_attn.k_proj.weight", 1),
    "v_proj": ("self_attn.v_proj.weight", 1),
    "q_bias": ("self_attn.q_proj.bias", 0),
    "k_bias": ("self_attn.k_proj.bias", 0),
    "v_bias": ("self_attn.v_proj.bias", 0),
    "q_norm": ("self_attn.q_norm.weight", 0),
    "k_norm": ("self_attn.k_norm.weight", 0),
    "o_proj": ("self_attn.o_proj.weight", 2),
    "mlp_norm": ("post_attention_layernorm.weight", 0),
    "gate_proj": ("mlp.gate_proj.weight", 1),
    "up_proj": ("mlp.up_proj.weight", 1),
    "down_proj": ("mlp.down_proj.weight", 1),
}
OTHER_WEIGHTS = {
    "embed_tokens": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}


def layer_tensor(family: str, name: str, layer: int) -> tuple[str, int]:
    """The tensor that holds a weight of one layer.

    Args:
      family: one of FAMILIES.
      name: of LAYER_WEIGHTS.
      layer: from 0.

    Returns:
      (its name, how many leading axes of our weight of a layer are the input).
    """
    theirs, inputs = LAYER_WEIGHTS[name]
    if other := FAMILIES[family].names.get(name):
        theirs = f"{other}.weight"
    return f"model.layers.{layer}.{theirs}", inputs

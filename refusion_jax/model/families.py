"""Families of Hugging Face models as data: what each has that others lack, and what it calls its weights.

To read another family, declare it here; where it has a layer that none of these has, teach it to `Transformer`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

# Ours -> theirs, with the number of the layer for {}. A weight of `lora.INPUTS` is transposed.
NAMES = {
    "embed_tokens": "model.embed_tokens.weight",
    "attention_norm": "model.layers.{}.input_layernorm.weight",
    "q_proj": "model.layers.{}.self_attn.q_proj.weight",
    "k_proj": "model.layers.{}.self_attn.k_proj.weight",
    "v_proj": "model.layers.{}.self_attn.v_proj.weight",
    "q_bias": "model.layers.{}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{}.self_attn.v_proj.bias",
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "o_proj": "model.layers.{}.self_attn.o_proj.weight",
    "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    "gate_proj": "model.layers.{}.mlp.gate_proj.weight",
    "up_proj": "model.layers.{}.mlp.up_proj.weight",
    "down_proj": "model.layers.{}.mlp.down_proj.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type` of config.json."""

    architecture: str  # its class in transformers
    qk_norm: str = ""  # RMSNorm of queries and keys before RoPE: "head": each head, "all": all heads together
    qkv_bias: bool = False
    norm_after: bool = False  # RMSNorm of what attention and mlp give, not of what they read
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)  # where they differ from NAMES
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of config.json; other values are refused


FAMILIES = {
    "llama": Family("LlamaForCausalLM", fixed={"attention_bias": False, "mlp_bias": False}),  # 2, 3.x, SmolLM2
    "mistral": Family("MistralForCausalLM", fixed={"sliding_window": None}),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        qk_norm="all",
        norm_after=True,
        names={
            "attention_norm": "model.layers.{}.post_attention_layernorm.weight",
            "mlp_norm": "model.layers.{}.post_feedforward_layernorm.weight",
        },
        fixed={"attention_bias": False},
    ),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, fixed={"use_sliding_window": False}),  # and 2.5
    "qwen3": Family("Qwen3ForCausalLM", qk_norm="head", fixed={"attention_bias": False, "use_sliding_window": False}),
}


@dataclasses.dataclass(frozen=True)
class Release:
    """Models that the authors of a system released: those of a family under a `model_type` of their own.

    Of several with one model_type, the first counts whose `fixed` a config.json agrees with.
    """

    model_type: str
    family: str  # of FAMILIES
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of config.json: theirs -> ours
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)  # where they differ from the family's
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of config.json, in our keys
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of config.json; other values are refused
    ignored: tuple[str, ...] = ()  # keys of config.json that change nothing

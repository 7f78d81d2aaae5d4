"""Families of Hugging Face models as data: what each has that others lack, and what it calls its weights.

To read another family, declare it here; where it has a layer that none of these has, teach it to `Transformer`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

# Ours -> theirs, with the number of the layer for {}, and of the expert for a second one. A weight of `lora.INPUTS` is
# transposed.
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
    "post_attention_norm": "model.layers.{}.post_attention_layernorm.weight",
    "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    "post_mlp_norm": "model.layers.{}.post_feedforward_layernorm.weight",
    "router": "model.layers.{}.mlp.gate.weight",
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
    norms: tuple[str, ...] = ("attention_norm", "mlp_norm")  # RMSNorm of what they read; post_...: of what they give
    norm_offset: float = 0.0  # added to the scale of every RMSNorm
    activation: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"hidden_act": "silu"})  # in config.json
    scaled_embedding: bool = False  # by the root of the hidden size
    experts: bool = False  # in every layer, in place of an MLP
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of config.json
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of config.json: another name -> ours
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)  # where they differ from NAMES
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of config.json; other values are refused


FAMILIES = {
    "gemma3_text": Family(  # the text models of Gemma 3
        "Gemma3ForCausalLM",
        qk_norm="head",
        norms=("attention_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm"),
        norm_offset=1.0,
        activation={"hidden_activation": "gelu_pytorch_tanh"},
        scaled_embedding=True,
        names={"mlp_norm": "model.layers.{}.pre_feedforward_layernorm.weight"},
        fixed={
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        defaults={
            "tie_word_embeddings": True,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        },
    ),
    "llama": Family("LlamaForCausalLM", fixed={"attention_bias": False, "mlp_bias": False}),  # 2, 3.x, SmolLM2
    "mistral": Family("MistralForCausalLM", fixed={"sliding_window": None}),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        qk_norm="all",
        norms=("post_attention_norm", "post_mlp_norm"),
        fixed={"attention_bias": False},
    ),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, fixed={"use_sliding_window": False}),  # and 2.5
    "qwen3": Family("Qwen3ForCausalLM", qk_norm="head", fixed={"attention_bias": False, "use_sliding_window": False}),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        qk_norm="head",
        experts=True,
        fixed={
            "attention_bias": False,
            "use_sliding_window": False,
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
        },
        names={
            "gate_proj": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
            "up_proj": "model.layers.{}.mlp.experts.{}.up_proj.weight",
            "down_proj": "model.layers.{}.mlp.experts.{}.down_proj.weight",
        },
        keys={"num_local_experts": "num_experts"},  # as transformers 5 writes it
        defaults={
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
        },
    ),
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

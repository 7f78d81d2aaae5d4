"""Families of Hugging Face models as data: how their layers differ, and the names of their weights.

To read another family, declare it here; if it has layers that none of these has, add them to `Transformer`.
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
_EXPERTS = {name: f"model.layers.{{}}.mlp.experts.{{}}.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")}


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type` of config.json."""

    architecture: str  # its class in transformers
    qk_norm: str = ""  # RMSNorm of queries and keys before RoPE: "head": each head, "all": all heads together
    qkv_bias: bool = False
    norms: tuple[str, ...] = ("attention_norm", "mlp_norm")  # RMSNorm of block inputs; post_...: of block outputs
    norm_offset: float = 0.0  # added to the scale of every RMSNorm
    activation: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"hidden_act": "silu"})  # in config.json
    scaled_embedding: bool = False  # by the root of the hidden size
    experts: Mapping[str, str] = dataclasses.field(default_factory=dict)  # names in layers with experts, if any
    router: str = "softmax"  # turns logits into scores; with "sigmoid" experts also have biases in the choice
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of config.json
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of config.json: another name -> ours
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)  # where they differ from NAMES; several weights
    # with one name are rows of one tensor, in the order of NAMES
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
            "pad_token_id": 0,
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
    ),
    "llama": Family(  # 2, 3.x, SmolLM2
        "LlamaForCausalLM",
        fixed={"attention_bias": False, "mlp_bias": False, "sliding_window": None},
        defaults={"bos_token_id": 1, "eos_token_id": 2},
    ),
    "llada2_moe": Family(  # LLaDA2, mini and flash
        "LLaDA2MoeModelLM",
        qk_norm="head",
        names={
            "embed_tokens": "model.word_embeddings.weight",
            **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "model.layers.{}.attention.query_key_value.weight"),
            "q_norm": "model.layers.{}.attention.query_layernorm.weight",
            "k_norm": "model.layers.{}.attention.key_layernorm.weight",
            "o_proj": "model.layers.{}.attention.dense.weight",
        },
        experts={
            **_EXPERTS,
            "expert_bias": "model.layers.{}.mlp.gate.expert_bias",
            "shared_gate_proj": "model.layers.{}.mlp.shared_experts.gate_proj.weight",
            "shared_up_proj": "model.layers.{}.mlp.shared_experts.up_proj.weight",
            "shared_down_proj": "model.layers.{}.mlp.shared_experts.down_proj.weight",
        },
        router="sigmoid",
        fixed={
            "moe_router_enable_expert_bias": True,
            "norm_head": False,
            "norm_softmax": False,
            "norm_topk_prob": True,
            "router_dtype": "fp32",
            "score_function": "sigmoid",
            "use_bias": False,
            "use_qk_norm": True,
            "use_qkv_bias": False,
            "use_rmsnorm": True,
            "use_sliding_window": False,
            "using_split_qkv_in_self_attention": False,
        },
        defaults={
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 0,
            "norm_topk_prob": True,
            "router_aux_loss_coef": 0.0,
            "first_k_dense_replace": 0,
            "num_shared_experts": 0,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
        },
    ),
    "mistral": Family(
        "MistralForCausalLM",
        fixed={"sliding_window": None},
        defaults={"sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        qk_norm="all",
        norms=("post_attention_norm", "post_mlp_norm"),
        fixed={"attention_bias": False, "sliding_window": None},
        defaults={"rms_norm_eps": 1e-5, "pad_token_id": 1, "eos_token_id": 50279},
    ),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, fixed={"use_sliding_window": False}),  # and 2.5
    "qwen3": Family("Qwen3ForCausalLM", qk_norm="head", fixed={"attention_bias": False, "use_sliding_window": False}),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        qk_norm="head",
        experts=_EXPERTS,
        fixed={
            "attention_bias": False,
            "use_sliding_window": False,
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
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
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        fixed={"attention_bias": False, "mlp_bias": False, "use_sliding_window": False},
        defaults={
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
            "no_rope_layers": None,  # follows from the next one
            "no_rope_layer_interval": 4,
            "pad_token_id": 128004,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
    ),
}


@dataclasses.dataclass(frozen=True)
class Release:
    """Models that the authors of a system released: those of a family, under their own `model_type`.

    If several have one model_type, the first one counts whose `fixed` agrees with config.json.
    """

    model_type: str
    family: str  # of FAMILIES
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of config.json: theirs -> ours
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)  # where they differ from the family's
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of config.json, in our keys
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of config.json; other values are refused
    ignored: tuple[str, ...] = ()  # keys of config.json without effect

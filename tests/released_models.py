"""Releases of other authors in tiny sizes: how releases.json was recorded, and what the tests make anew of it.

It holds what the authors' code computes of these models, as tests/record_releases.py of commit 8c0a7d0 recorded it: it
takes the folder of their configuration and modelling code, which their Hugging Face directories carry, and of their
generate.py, and needs torch and the transformers they ask for (4.53; wedlm: 4.57). Weights are not recorded but drawn
by `weights_of`.

Of LLaDA2 it was models/llada2_moe of github.com/inclusionAI/dFactory (92b6890). Other code is in no repository of its
authors but on Hugging Face alone; these were copies of it: of SDAR's mixture in github.com/linyewei526/dLLM-ARIS-1
(5fc3f3c), with the generate.py of github.com/JetAstra/SDAR (c2041a8); of LLaDA2.1-mini in github.com/Xenearkr/DARE
(ac55266), whose `generate` is that in github.com/ZHZisZZ/dllm (ca17675) but for the mask.
"""

import zlib
from pathlib import Path

import numpy as np

FILE = Path(__file__).parent / "releases.json"
MASK, EOS, PAD = 40, 41, 42
ORDINARY = 40  # ids below are neither
QWEN = {
    "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 48, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "rope_scaling": None, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": EOS, "pad_token_id": PAD, "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True,
    "max_window_layers": 2, "sliding_window": None, "use_sliding_window": False, "torch_dtype": "float32",
}  # fmt: skip
SDAR = QWEN | {
    "architectures": ["SDARForCausalLM"], "model_type": "sdar", "attention_bias": False, "head_dim": 8,
    "attn_implementation": "flex_attention", "mask_token_id": MASK, "fuse_cross_entropy": True,
}  # fmt: skip
LLADA2 = {
    "config": {
        "architectures": ["LLaDA2MoeModelLM"], "attention_dropout": 0.0, "dtype": "float32",
        "embedding_dropout": 0.0, "first_k_dense_replace": 1, "head_dim": 8, "hidden_act": "silu",
        "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 40, "max_position_embeddings": 256,
        "max_window_layers": 28, "model_type": "llada2_moe", "moe_intermediate_size": 24,
        "moe_router_enable_expert_bias": True, "n_group": 3, "norm_head": False, "norm_softmax": False,
        "norm_topk_prob": True, "num_attention_heads": 4, "num_experts": 12, "num_experts_per_tok": 4,
        "num_hidden_layers": 3, "num_key_value_heads": 2, "num_shared_experts": 2, "output_dropout": 0.0,
        "output_router_logits": False, "pad_token_id": EOS, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-6,
        "rope_scaling": None, "rope_theta": 600000, "rotary_dim": 4, "routed_scaling_factor": 2.5,
        "router_dtype": "fp32", "score_function": "sigmoid", "sliding_window": 4096,
        "tie_word_embeddings": False, "topk_group": 2, "use_bias": False, "use_cache": False,
        "use_qk_norm": True, "use_qkv_bias": False, "use_rmsnorm": True, "use_sliding_window": False,
        "using_split_qkv_in_self_attention": False, "vocab_size": 48,
    },
    "open": {"mask_token_id": MASK, "eos_token_id": EOS},
}  # fmt: skip
# Of each: their config.json in tiny sizes, what of it is "open" there and follows from their code, and the settings
# that they decode with, by `method` where it is not the default.
RECIPES = {
    "llada": {
        "config": {
            "activation_type": "silu", "alibi": False, "alibi_bias_max": 8.0, "architectures": ["LLaDAModelLM"],
            "attention_dropout": 0.0, "attention_layer_norm": False, "attention_layer_norm_with_affine": True,
            "bias_for_layer_norm": False, "block_group_size": 1, "block_type": "llama", "d_model": 32,
            "embedding_dropout": 0.0, "embedding_size": 48, "eos_token_id": EOS, "flash_attention": False,
            "include_bias": False, "include_qkv_bias": False, "init_cutoff_factor": None, "init_device": "cpu",
            "init_fn": "mitchell", "init_std": 0.02, "input_emb_norm": False, "layer_norm_type": "rms",
            "layer_norm_with_affine": True, "mask_token_id": MASK, "max_sequence_length": 256, "mlp_hidden_size": 48,
            "mlp_ratio": 4, "model_type": "llada", "multi_query_attention": None, "n_heads": 4, "n_kv_heads": 4,
            "n_layers": 2, "pad_token_id": EOS, "precision": "amp_bf16", "residual_dropout": 0.0,
            "rms_norm_eps": 1e-5, "rope": True, "rope_full_precision": True, "rope_theta": 500000.0,
            "scale_logits": False, "use_cache": False, "vocab_size": 48, "weight_tying": False,
        },
        "settings": [{"max_new_tokens": 16}, {"max_new_tokens": 16, "steps": 8, "block_length": 8}],
    },
    "dream": {
        "config": QWEN | {
            "architectures": ["DreamModel"], "model_type": "Dream", "mask_token_id": MASK, "use_mrope": False,
        },
        "settings": [{"max_new_tokens": 16, "steps": 16}, {"max_new_tokens": 16, "steps": 6, "confidence": "maskgit"}],
    },
    "block_diffusion": {
        "config": QWEN | {
            "architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen", "bd_size": 8,
            "conplemenrary_mask": True, "layer_types": ["full_attention"] * 2,
        },
        "open": {"mask_token_id": MASK},
        "settings": [{"threshold": 0.9, "sub_block": 8}, {"threshold": 0.3, "sub_block": 4}],
    },
    "sdar": {
        "config": SDAR | {"block_size": 4, "debug": False, "ep_size": 1, "micro_forward": False,
                          "skip_checkpoint": False, "use_deepep": False},
        "settings": [{"threshold": 0.85}, {"threshold": 0.3}],
    },
    "sdar moe": {
        "config": QWEN | {
            "architectures": ["SDARMoeForCausalLM"], "model_type": "sdar_moe", "attention_bias": False, "head_dim": 8,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 24, "norm_topk_prob": True,
            "num_experts": 8, "num_experts_per_tok": 3, "output_router_logits": False, "router_aux_loss_coef": 0.001,
        },
        "open": {"mask_token_id": MASK},
        "settings": [{"threshold": 0.85}, {"threshold": 0.3}],
    },
    "llada2": LLADA2 | {
        "settings": [{"threshold": 0.95, "block_size": 8}, {"threshold": 0.3, "block_size": 4}],
    },
    "llada2.1": LLADA2 | {
        "method": "llada2_edit",
        "settings": [
            {"threshold": 0.5, "editing_threshold": 0.3, "max_post_steps": 16, "block_size": 8},
            {"threshold": 0.3, "editing_threshold": 0.0, "max_post_steps": 2, "block_size": 8},
        ],
    },
    "idlm": {
        "config": SDAR | {"block_size": 3},
        "settings": [],
    },
    "wedlm": {
        "config": QWEN | {
            "architectures": ["WeDLMForCausalLM"], "model_type": "wedlm", "attention_bias": False, "head_dim": 8,
            "qk_norm": True, "mask_token_id": MASK,
        },
        "settings": [],
    },
    "wedlm 2.5": {
        "config": QWEN | {
            "architectures": ["WeDLMForCausalLM"], "model_type": "wedlm", "attention_bias": True, "qk_norm": False,
            "mask_token_id": MASK,
        },
        "settings": [],
    },
}  # fmt: skip
CAUSAL = ("idlm", "wedlm", "wedlm 2.5")  # by what mask their logits are compared; the others: every token sees all


def weights_of(shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Random weights by their names: norms about 1, and a head that hardly chooses special tokens."""
    weights = {}
    for name, shape in shapes.items():
        draw = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape).astype(np.float32)
        is_norm = len(shape) == 1 and name.endswith("weight")
        weights[name] = 1 + 0.1 * draw if is_norm else 0.3 * draw
        if shape[0] == 48 and not name.endswith(("wte.weight", "embed_tokens.weight", "word_embeddings.weight")):
            weights[name][ORDINARY:] = 0
    return weights

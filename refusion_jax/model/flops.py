"""FLOPs of training, for the model-FLOPs utilization (MFU).

Axes: L layers, D hidden size, N query heads, K key/value heads, H head size.
"""

import re

from refusion_jax.model.lora import Lora
from refusion_jax.model.shape import ModelConfig


def train_flops_per_token(c: ModelConfig, keys_seen: float, lora: Lora | None = None) -> float:
    """FLOPs of forward and backward for one token: 3 x those of the forward pass, without recomputation (remat).

    With adapters, products with frozen weights count twice, as these get no gradient.

    The forward pass takes 2 for every weight in a matrix product (not the embedding look-up; of experts, only those of
    the token), and for attention 2 N H (scores) + 2 N H (values) for every key that a query sees; with causal attention
    these are (T + 1) / 2 keys on average (`Pattern.keys_seen`).
    """
    head = {"embed_tokens" if c.tie_word_embeddings else "lm_head": c.hidden_size * c.vocab_size}
    products = _products_in_layers(c, c.num_experts_per_tok) | head
    frozen = sum(size for name, size in products.items() if lora and not re.fullmatch(lora.full, name))
    return 3.0 * (layer_flops_per_token(c, keys_seen) + 2 * sum(head.values())) - 2 * frozen


def layer_flops_per_token(c: ModelConfig, keys_seen: float) -> float:
    """FLOPs of the forward pass for one token without the output head, counted as in `train_flops_per_token`."""
    attention = 4 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * keys_seen
    return 2 * weights_in_layers(c, c.num_experts_per_tok) + attention


def weights_in_layers(c: ModelConfig, experts: float) -> float:
    """Weights in the products of all layers, counting `experts` experts per layer and the shared ones, if any."""
    return sum(_products_in_layers(c, experts).values())


def _products_in_layers(c: ModelConfig, experts: float) -> dict[str, float]:
    """The same, by name of the weight."""
    D, N, K, H, L = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.num_hidden_layers
    dense = c.first_k_dense_replace if c.num_experts else L
    expert = (L - dense) * D * c.moe_intermediate_size
    found = {"q_proj": L * D * N * H, "k_proj": L * D * K * H, "v_proj": L * D * K * H, "o_proj": L * N * H * D}
    for name in ("gate_proj", "up_proj", "down_proj"):
        found[name] = dense * D * c.intermediate_size + experts * expert
        found[f"shared_{name}"] = c.num_shared_experts * expert
    return found | {"router": (L - dense) * D * c.num_experts}


def count_weights(c: ModelConfig) -> tuple[float, float]:
    """(weights in products, including the embedding; how many of them a token uses)."""
    outside = c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
    return tuple(weights_in_layers(c, n) + outside for n in (c.num_experts, c.num_experts_per_tok))

"""FLOPs of training, for the model-FLOPs utilization (MFU).

Axes: D hidden size, N query heads, K key/value heads, H head size.
"""

from refusion_jax.model.shape import ModelConfig


def train_flops_per_token(c: ModelConfig, keys_seen: float, is_frozen: bool = False) -> float:
    """FLOPs of forward and backward for one token: 3 x those of the forward pass, without recomputation (remat).

    With `is_frozen`, only adapters are trained: products with weights count twice, as the weights get no gradient.

    The forward pass takes 2 for every weight in a matrix product (not the embedding look-up; of experts, only those of
    the token), and for attention 2 N H (scores) + 2 N H (values) for every key that a query sees; with causal attention
    these are (T + 1) / 2 keys on average (`Pattern.keys_seen`).
    """
    head = 2 * c.hidden_size * c.vocab_size
    without_gradient = 2 * weights_in_layers(c, c.num_experts_per_tok) + head if is_frozen else 0
    return 3.0 * (layer_flops_per_token(c, keys_seen) + head) - without_gradient


def layer_flops_per_token(c: ModelConfig, keys_seen: float) -> float:
    """FLOPs of the forward pass for one token without the output head, counted as in `train_flops_per_token`."""
    attention = 4 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * keys_seen
    return 2 * weights_in_layers(c, c.num_experts_per_tok) + attention


def weights_in_layers(c: ModelConfig, experts: float) -> float:
    """Weights in the products of all layers, counting `experts` experts per layer and the shared ones, if any."""
    D, N, K, H = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim
    attention = D * (N + 2 * K) * H + N * H * D
    dense = c.first_k_dense_replace if c.num_experts else c.num_hidden_layers
    mixture = D * c.num_experts + (experts + c.num_shared_experts) * 3 * D * c.moe_intermediate_size
    mlps = dense * 3 * D * c.intermediate_size + (c.num_hidden_layers - dense) * mixture
    return c.num_hidden_layers * attention + mlps


def count_weights(c: ModelConfig) -> tuple[float, float]:
    """(weights in products, including the embedding; how many of them a token uses)."""
    outside = c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
    return tuple(weights_in_layers(c, n) + outside for n in (c.num_experts, c.num_experts_per_tok))

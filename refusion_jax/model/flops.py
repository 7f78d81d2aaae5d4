"""FLOPs of training, for the model-FLOPs utilization (MFU).

Axes: D hidden size, N query heads, K key/value heads, H head size, F mlp size, V vocabulary, L layers.
"""

from refusion_jax.model.transformer import ModelConfig


def train_flops_per_token(c: ModelConfig, keys_seen: float) -> float:
    """FLOPs of forward and backward for one token: 3 x those of the forward, without recomputation (remat).

    The forward has 2 for every weight in a matrix product (not the embedding look-up), and for attention 2 N H (scores)
    + 2 N H (values) for every key seen; with causal attention (T + 1) / 2 keys on average.

    Args:
      c: the model.
      keys_seen: by a query, on average; see `Pattern.keys_seen`.
    """
    D, N, K, H, F = (
        c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.intermediate_size
    )  # fmt: skip
    layer = 2 * (D * (N + 2 * K) * H + N * H * D + 3 * D * F) + 4 * N * H * keys_seen
    return 3.0 * (c.num_hidden_layers * layer + 2 * D * c.vocab_size)

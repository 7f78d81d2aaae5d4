"""FLOPs of training, and peak FLOP/s of chips, for the model-FLOPs utilization (MFU).

Axes: D hidden size, N query heads, K key/value heads, H head size, F mlp size, V vocabulary, L layers.
"""

from refusion_jax.model.transformer import ModelConfig
from refusion_jax.runtime.chips import CHIPS

# Documented peak of dense bf16 arithmetic, FLOP/s a chip; matched against jax.Device.device_kind.
PEAK_FLOPS = {chip.device_kind: chip.peak_flops for chip in CHIPS.values()} | {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Documented peak bf16 FLOP/s of a chip, or None if unknown (CPUs)."""
    matches = [kind for kind in PEAK_FLOPS if device_kind.startswith(kind)]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None


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

"""Attention, behind one function: every objective and every decoder attends through here.

Axes: B rows, T queries, S keys, U new keys, N query heads, K key/value heads, G = N / K query heads a key head serves,
H head size.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Bool[Array, "B T S"],
) -> Float[Array, "B T N H"]:
    """Scaled dot-product attention with grouped heads; the softmax is float32 whatever the inputs are.

    A query that may see no key at all (padding) gets finite numbers without meaning, not NaN.

    Args:
      q: float32 or bfloat16.
      k, v: of q's dtype, as is what is returned.
      mask: True where the query may see the key.
    """
    weights = jax.nn.softmax(_scores(q, k, mask), axis=-1)
    return _mix(weights, v)


def cached_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B U K H"],
    v: Float[Array, "B U K H"],
    mask: Bool[Array, "B T U"],
    cached_k: Float[Array, "B S K H"],
    cached_v: Float[Array, "B S K H"],
    is_cached: Bool[Array, "B S"],
) -> Float[Array, "B T N H"]:
    """`attention` over cached keys and new ones, as if they were concatenated.

    Only the scores are: concatenating the keys and values themselves would copy the cache in every layer.

    Args:
      q, k, v, mask: of new tokens, as for `attention`.
      cached_k, cached_v: of the tokens before them.
      is_cached: the cached entries that count; every query sees them.
    """
    old, new = _scores(q, cached_k, is_cached[:, None]), _scores(q, k, mask)
    weights = jax.nn.softmax(jnp.concatenate([old, new], axis=-1), axis=-1)
    S = cached_k.shape[1]
    return _mix(weights[..., :S], cached_v) + _mix(weights[..., S:], v)


def _scores(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], mask: Bool[Array, "B #T S"]
) -> Float32[Array, "B K G T S"]:
    """Scaled scores, of which those that the mask hides are the least there is."""
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    G = N // K
    # Heads before tokens and the group folded into the queries: plain batched products, and a third faster on CPU
    # than jax.nn.dot_product_attention, forward and backward.
    q = (q * H**-0.5).reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    k = k.transpose(0, 2, 1, 3)  # [B, K, S, H]
    scores = jnp.einsum("bkqh,bksh->bkqs", q, k, preferred_element_type=jnp.float32).reshape(B, K, G, T, S)
    return jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)


def _mix(weights: Float32[Array, "B K G T S"], v: Float[Array, "B S K H"]) -> Float[Array, "B T N H"]:
    """The values mixed by the weights, in their own dtype."""
    B, K, G, T, S = weights.shape
    v = v.transpose(0, 2, 1, 3)  # [B, K, S, H]
    heads = jnp.einsum("bkqs,bksh->bkqh", weights.astype(v.dtype).reshape(B, K, G * T, S), v)
    return heads.reshape(B, K, G, T, -1).transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, -1)

"""Attention, behind one function: every objective and every decoder attends through here.

Axes: B rows, T queries, S keys, U new keys, N query heads, K key/value heads, G = N / K query heads a key head serves,
H head size.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from refusion_jax.model.int8 import Int8Array, factors


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
    return _mix(weights, v, q.dtype)


def cached_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B U K H"] | Int8Array,
    v: Float[Array, "B U K H"] | Int8Array,
    mask: Bool[Array, "B T U"],
    cached_k: Float[Array, "B S K H"] | Int8Array,
    cached_v: Float[Array, "B S K H"] | Int8Array,
    is_cached: Bool[Array, "B S"],
) -> Float[Array, "B T N H"]:
    """`attention` over cached keys and new ones, as if they were concatenated.

    Only the scores are: concatenating the keys and values themselves would copy the cache in every layer.

    Args:
      q, k, v, mask: of new tokens, as for `attention`; keys and values may be in int8, with a scale for every token and
        head.
      cached_k, cached_v: of the tokens before them.
      is_cached: the cached entries that count; every query sees them.
    """
    old, new = _scores(q, cached_k, is_cached[:, None]), _scores(q, k, mask)
    weights = jax.nn.softmax(jnp.concatenate([old, new], axis=-1), axis=-1)
    S = cached_k.shape[1]
    return _mix(weights[..., :S], cached_v, q.dtype) + _mix(weights[..., S:], v, q.dtype)


def _scores(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"] | Int8Array, mask: Bool[Array, "B #T S"]
) -> Float32[Array, "B K G T S"]:
    """Scaled scores, of which those that the mask hides are the least there is."""
    k, scale = factors(k, q.dtype)
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    G = N // K
    # Heads before tokens and the group folded into the queries: plain batched products, and a third faster on CPU
    # than jax.nn.dot_product_attention, forward and backward.
    q = (q * H**-0.5).reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    k = k.transpose(0, 2, 1, 3)  # [B, K, S, H]
    scores = jnp.einsum("bkqh,bksh->bkqs", q, k, preferred_element_type=jnp.float32).reshape(B, K, G, T, S)
    scores = scores if scale is None else scores * _per_key(scale)
    return jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)


def _mix(
    weights: Float32[Array, "B K G T S"], v: Float[Array, "B S K H"] | Int8Array, dtype: jnp.dtype
) -> Float[Array, "B T N H"]:
    """The values mixed by the weights, in a dtype."""
    v, scale = factors(v, dtype)
    weights = weights if scale is None else weights * _per_key(scale)
    B, K, G, T, S = weights.shape
    v = v.transpose(0, 2, 1, 3)  # [B, K, S, H]
    heads = jnp.einsum("bkqs,bksh->bkqh", weights.astype(dtype).reshape(B, K, G * T, S), v)
    return heads.reshape(B, K, G, T, -1).transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, -1)


def _per_key(scale: Float32[Array, "B S K 1"]) -> Float32[Array, "B K 1 1 S"]:
    """Scales of keys or values as they meet the scores."""
    return scale.transpose(0, 2, 3, 1)[:, :, None]

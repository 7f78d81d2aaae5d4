"""Attention: every objective and every decoder attends through the functions of this module.

Axes: B rows, T queries, S keys, U new keys, N query heads, K key/value heads, G = N / K query heads a key head serves,
R = G T queries that it serves, H head size.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32

from refusion_jax.model.int8 import Int8Array, factors
from refusion_jax.model.remat import ATTENTION


@jax.custom_vjp
def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Bool[Array, "B T S"],
) -> Float[Array, "B T N H"]:
    """Scaled dot-product attention with grouped heads; the softmax is float32 whatever the inputs are.

    A query that may see no key at all (padding) gets finite, meaningless numbers, not NaN. No [T, S] array is kept for
    the backward pass, which computes the weights again from the scores and the two numbers per query that normalize
    them (FlashAttention-2, arXiv 2307.08691, section 3.1), and needs no reduction over keys.

    All arrays and the result are float32 or bfloat16; the mask is True where the query may see the key.
    """
    return _forward(q, k, v, mask)[0]


def _forward(q, k, v, mask):
    scores = _scores(q, _heads_first(k), mask)
    highest = jnp.max(scores, axis=-1)  # [B, K, G, T]
    exponentials = jnp.exp(scores - highest[..., None])
    total = jnp.sum(exponentials, axis=-1)
    heads = _mix(exponentials / total[..., None], _heads_first(v), q.dtype)
    heads, highest, total = (checkpoint_name(x, ATTENTION) for x in (heads, highest, total))
    return heads, (q, k, v, mask, heads, highest, total)


def _backward(kept, cotangent):
    q, k, v, mask, heads, highest, total = kept
    weights = jnp.exp(_scores(q, _heads_first(k), mask) - highest[..., None]) / total[..., None]  # [B, K, G, T, S]
    B, K, G, T, S = weights.shape
    # For softmax: the sum over keys of weight x its cotangent equals the sum over H of head x its cotangent.
    mean = jnp.einsum("btnh,btnh->btn", heads, cotangent, preferred_element_type=jnp.float32)
    mean = mean.reshape(B, T, K, G).transpose(0, 2, 3, 1)[..., None]
    rows, values = _rows(cotangent, K), _heads_first(v)
    dweights = jnp.einsum("bkqh,bksh->bkqs", rows, values, preferred_element_type=jnp.float32).reshape(weights.shape)
    dscores = jnp.where(mask[:, None, None], weights * (dweights - mean), 0).astype(q.dtype).reshape(B, K, G * T, S)
    dv = jnp.einsum("bkqs,bkqh->bskh", weights.astype(q.dtype).reshape(B, K, G * T, S), rows)
    dk = jnp.einsum("bkqs,bkqh->bskh", dscores, _rows(q * q.shape[-1] ** -0.5, K))
    dq = jnp.einsum("bkqs,bskh->bkqh", dscores, k) * q.shape[-1] ** -0.5
    return _tokens(dq, G), dk, dv, None


attention.defvjp(_forward, _backward)


def cached_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B U K H"] | Int8Array,
    v: Float[Array, "B U K H"] | Int8Array,
    mask: Bool[Array, "B T U"],
    cached_k: Float[Array, "B K S H"] | Int8Array,
    cached_v: Float[Array, "B K S H"] | Int8Array,
    is_cached: Bool[Array, "B S"],
) -> Float[Array, "B T N H"]:
    """`attention` over cached keys and new ones, as if they were concatenated.

    Only the scores are concatenated: with keys and values this would copy the cache in every layer.

    Keys and values may be in int8, with a scale for every token and head. Cached ones have heads before tokens, the
    order in which products read them. Every query sees the cached ones where `is_cached` is True.
    """
    k, v = _heads_first(k), _heads_first(v)
    old, new = _scores(q, cached_k, is_cached[:, None]), _scores(q, k, mask)
    weights = jax.nn.softmax(jnp.concatenate([old, new], axis=-1), axis=-1)
    S = cached_k.shape[2]
    return _mix(weights[..., :S], cached_v, q.dtype) + _mix(weights[..., S:], v, q.dtype)


def _scores(
    q: Float[Array, "B T N H"], k: Float[Array, "B K S H"] | Int8Array, mask: Bool[Array, "B #T S"]
) -> Float32[Array, "B K G T S"]:
    """Scaled scores; those that the mask hides get the lowest finite value."""
    k, scale = factors(k, q.dtype)
    B, T, N, H = q.shape
    K, S = k.shape[1:3]
    # Heads before tokens and the group folded into the queries: plain batched products, and a third faster on CPU
    # than jax.nn.dot_product_attention, forward and backward.
    q = _rows(q * H**-0.5, K)
    scores = jnp.einsum("bkqh,bksh->bkqs", q, k, preferred_element_type=jnp.float32).reshape(B, K, N // K, T, S)
    scores = scores if scale is None else scores * _per_key(scale)
    return jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)


def _mix(
    weights: Float32[Array, "B K G T S"], v: Float[Array, "B K S H"] | Int8Array, dtype: jnp.dtype
) -> Float[Array, "B T N H"]:
    """The sum of the values, weighted by attention, in a dtype."""
    v, scale = factors(v, dtype)
    weights = weights if scale is None else weights * _per_key(scale)
    B, K, G, T, S = weights.shape
    heads = jnp.einsum("bkqs,bksh->bkqh", weights.astype(dtype).reshape(B, K, G * T, S), v)
    return _tokens(heads, G)


def _rows(x: Float[Array, "B T N H"], K: int) -> Float[Array, "B K R H"]:
    """Concatenates the queries of all heads that a key head serves."""
    B, T, N, H = x.shape
    return x.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, H)


def _tokens(x: Float[Array, "B K R H"], G: int) -> Float[Array, "B T N H"]:
    """The inverse of `_rows`."""
    B, K, rows, H = x.shape
    return x.reshape(B, K, G, rows // G, H).transpose(0, 3, 1, 2, 4).reshape(B, rows // G, K * G, H)


def _heads_first(x: Float[Array, "B S K H"] | Int8Array) -> Float[Array, "B K S H"] | Int8Array:
    return jax.tree.map(lambda x: x.transpose(0, 2, 1, 3), x)


def _per_key(scale: Float32[Array, "B K S 1"]) -> Float32[Array, "B K 1 1 S"]:
    """Scales of keys or values, reshaped to multiply scores."""
    return scale.transpose(0, 1, 3, 2)[:, :, None]

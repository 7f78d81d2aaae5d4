"""Attention, behind one function: every objective and every decoder attends through here.

Axes: B rows, T queries, S keys, N query heads, K key/value heads, G = N / K query heads a key head serves, H head size.
"""

import jax
import jax.numpy as jnp


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Scaled dot-product attention with grouped heads; the softmax is float32 whatever the inputs are.

    A query that may see no key at all (padding) gets finite numbers without meaning, not NaN.

    Args:
      q: [B, T, N, H] float32 or bfloat16.
      k, v: [B, S, K, H], of q's dtype.
      mask: [B, T, S] bool, True where the query may see the key.

    Returns:
      [B, T, N, H], of q's dtype.
    """
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    G = N // K
    # Heads before tokens and the group folded into the queries: plain batched products, and a third faster on CPU
    # than jax.nn.dot_product_attention, forward and backward.
    q = (q * H**-0.5).reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)  # [B, K, S, H]
    scores = jnp.einsum("bkqh,bksh->bkqs", q, k, preferred_element_type=jnp.float32).reshape(B, K, G, T, S)
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype).reshape(B, K, G * T, S)
    heads = jnp.einsum("bkqs,bksh->bkqh", weights, v)
    return heads.reshape(B, K, G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def packed_causal_mask(segment_ids: jax.Array) -> jax.Array:
    """Who sees whom in packed rows: every token itself and what stands physically before it in its own document.

    For segment_ids [1, 1, 2, 2, 2] the mask is (row: query, column: key)

        1 . . . .
        1 1 . . .
        . . 1 . .
        . . 1 1 .
        . . 1 1 1

    Args:
      segment_ids: [B, T] int32.

    Returns:
      [B, T, T] bool.
    """
    same_document = segment_ids[:, :, None] == segment_ids[:, None, :]
    length = segment_ids.shape[-1]
    return same_document & jnp.tril(jnp.ones((1, length, length), bool))

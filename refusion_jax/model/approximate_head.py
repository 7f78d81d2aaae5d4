"""An approximate output head: a cheap int8 product selects a few rows, whose logits are then computed exactly.

After HiRE (Yerram et al., arXiv 2402.09360, of which we read the abstract). Head and tokens are rounded to int8, with a
quarter of the bytes of float32 and half of bfloat16. The `rows` best rows by that product are computed exactly; all
other tokens get probability 0. If the vocabulary is split over chips, each finds the best of its own rows, and the best
of all are kept, so that the result does not depend on the mesh. It pays if reading the head from memory dominates, that
is for tokens * rows well below the size of the vocabulary.

Axes: B rows of the batch, T tokens, D hidden size, V rows of the head; N = B T tokens of one chip.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from refusion_jax.distributed import sharding
from refusion_jax.model.int8 import Int8Array, factors, is_rounded

_FEWEST = 8  # tokens; on CPU the int8 product of one token is a loop, ten times slower than that of eight


def rounded_head(head: Float[Array, "V D"] | Int8Array) -> Int8Array:
    """The head in int8, with a scale for every row; computed once for many forward passes."""
    rounded = head if is_rounded(head) else Int8Array.of(head, [1])
    return jax.tree.map(lambda x: sharding.constrain(x, "vocab", None), rounded)


def shortlisted_logits(
    x: Float[Array, "B T D"], head: Float[Array, "V D"] | Int8Array, rounded: Int8Array, rows: int
) -> Float32[Array, "B T V"]:
    """Logits of the best `rows` rows of a head, for each token; -inf for all others.

    The head has x's dtype, float32 or bfloat16, or is in int8; `rounded` is the same head, from `rounded_head`.
    """

    def on_chip(x, head, rounded):
        (B, T, D), V = x.shape, head.shape[0]
        x = x.reshape(B * T, D)
        tokens = Int8Array.of(jnp.pad(x, ((0, max(_FEWEST - B * T, 0)), (0, 0))), [1]).values
        over_inputs = (((1,), (1,)), ((), ()))
        product = jax.lax.dot_general(tokens, rounded.values, over_inputs, preferred_element_type=jnp.int32)
        score = product[: B * T].astype(jnp.float32) * rounded.scale.T  # the scale of a token does not change the order
        best, index = jax.lax.approx_max_k(score, min(rows, V))  # [N, rows]; it always contains the best row
        everywhere = sharding.all_gather(best, "vocab", axis=1)
        least = jax.lax.top_k(everywhere, min(rows, everywhere.shape[1]))[0][:, -1:]
        picked, scale = factors(jax.tree.map(lambda w: w[index], head), x.dtype)  # [N, rows, D], [N, rows, 1]
        exact = jnp.einsum("nd,nkd->nk", x, picked).astype(jnp.float32)
        exact = exact if scale is None else exact * scale[:, :, 0]
        exact = jnp.where(best >= least, exact, -jnp.inf)
        put = jax.vmap(lambda at, logit: jnp.full((V,), -jnp.inf).at[at].set(logit, unique_indices=True))
        return put(index, exact).reshape(B, T, V)

    per_row = sharding.spec("vocab", None)
    specs = sharding.spec("batch", None, None), per_row, per_row
    return sharding.on_each_chip(on_chip, specs, sharding.spec("batch", None, "vocab"))(x, head, rounded)

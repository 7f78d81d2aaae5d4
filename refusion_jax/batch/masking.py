"""The noise that masked diffusion systems share: padding after answers, and masked response tokens.

Axes: B rows, T row length.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Key

from refusion_jax.batch.rows import Rows, document_start, keys_for, row_index
from refusion_jax.cli.settings import setting

EPS = 1e-3  # least probability of masking a token, as in LLaDA

# The config key of `pad_answers`, for systems whose decoders fill more masks than the answer has tokens.
PADDING = functools.partial(
    setting, 0.3, "share of documents replaced by padding of the one before, so that models learn where answers end",
    at_least=0, below=1,
)  # fmt: skip


def shuffle_documents(rows: Rows, keys: Key[Array, "B"]) -> Rows:
    """Puts the documents of each row into a random order; the empty end stays where it is.

    Rows are packed with the longest documents first, so where a document begins tells how long it is. A model whose
    blocks are counted from the start of the row could learn this, although a decoder's text always begins at a block.
    Documents keep their numbers.
    """
    index = row_index(rows.tokens)
    draws = jax.vmap(lambda key: jax.random.uniform(key, index.shape[1:]))(keys_for("shuffling", keys))
    of_document = jnp.take_along_axis(draws, document_start(rows.segment_ids), axis=1)
    order = jnp.argsort(jnp.where(rows.segment_ids > 0, of_document, 2.0), axis=1, stable=True)
    return jax.tree.map(lambda x: jnp.take_along_axis(x, order, axis=1), rows)


def pad_answers(rows: Rows, keys: Key[Array, "B"], share: float, eos_id: int) -> Rows:
    """Replaces some documents by padding of the one before them: repeats of its last token, the EOS.

    A decoder of masked text fills more masks than an answer has tokens, and a model must learn to fill those after the
    end with EOS (LLaDA pads answers with EOS, as part of the loss). Packed rows have no room for that, so some
    documents are replaced, never the first of a row; the empty end of a row becomes padding, too. A document after a
    truncated text, which has no EOS, is kept. With the second one replaced:

        tokens     p a E q b E r c E .
                   p a E E E E r c E E
    """
    if not share:
        return rows
    index, start = row_index(rows.tokens), document_start(rows.segment_ids)
    after_end = (start > 0) & (jnp.take_along_axis(rows.tokens, jnp.maximum(start - 1, 0), axis=1) == eos_id)
    draws = jax.vmap(lambda key: jax.random.uniform(key, index.shape[1:]))(keys_for("padding", keys))
    is_drawn = (rows.segment_ids == 0) | (jnp.take_along_axis(draws, start, axis=1) < share)
    source = jax.lax.cummax(jnp.where(after_end & is_drawn, 0, index), axis=1)
    return jax.tree.map(lambda x: jnp.take_along_axis(x, source, axis=1), rows)


def draw_masks(rows: Rows, keys: Key[Array, "B"]) -> tuple[Bool[Array, "B T"], Float32[Array, "B T"]]:
    """(which response tokens are masked, p = (1 - EPS) t + EPS with t ~ U(0, 1) of each token's document).

    An EOS and its repeats are masked one by one, like all tokens (as in LLaDA). If they were masked together, a visible
    one would tell that no mask before it is an EOS; in decoding, however, the last ones may be committed first.
    """
    p, u = draw_levels(keys, rows)
    p = jnp.take_along_axis(p, document_start(rows.segment_ids), axis=1)
    return rows.is_response & (u < p), p


def draw_levels(keys: Key[Array, "B"], rows: Rows) -> tuple[Float32[Array, "B T"], Float32[Array, "B T"]]:
    """(p = (1 - EPS) t + EPS, u) with t, u ~ U(0, 1) for every index of the rows; a token is masked where u < p.

    A document or block uses the p at its first token.
    """
    T = rows.tokens.shape[1]

    def draw(key):
        t_key, mask_key = jax.random.split(key)
        return (1 - EPS) * jax.random.uniform(t_key, (T,)) + EPS, jax.random.uniform(mask_key, (T,))

    return jax.vmap(draw)(keys)

"""R2FT (Seo et al., arXiv 2509.15188): preference fine-tuning against repeated phrases.

For masked diffusion models (start from one with `init_from`), which tend to repeat a phrase when decoded in few steps.
Per document t ~ U(0, 1) and p = (1 - eps) t + eps; each response token is masked with probability p. The chosen text at
the n masked places of a document is the data; the rejected text repeats a phrase there: the first 1 to 8 of these
tokens, with a length drawn per document. With C and R the summed cross-entropies of chosen and rejected text,

    loss of a document = -log sigmoid((R - C) / n) + anchor C / n

and the loss is the mean over the documents of the batch. Both texts are predicted at the masked tokens themselves (not
shifted), from the same input. It is fed twice, because each input token has one label. Example with a phrase of two:

    text       p q a b c d e       halves do not see each other: 1 .
    inputs     p q M M c M M   p q M M c M M                     . 1
    labels     . . a b . d e   . . a b . a b

From the authors' code (github.com/ybseo-ac/Conv, r2ft_tools.py): the loss, its denominator and its weights; we have not
read the paper. They mask one run of tokens between two places of the text, or all but such a run, and repeat a phrase
that is visible next to the masks, up to 14 tokens of it. Our choices: tokens are masked one by one, as the base model
is trained; the phrase consists of the first masked tokens; no padding after answers, as the base model already knows
where they end; the mean over documents, not their sum; documents without masked tokens count with 0; the chosen text
need not win by a margin.

Axes: B rows, T row length.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, Key

from refusion_jax.batch.batch import Batch, count_documents
from refusion_jax.batch.masking import draw_masks
from refusion_jax.batch.rows import Rows, document_start, join, keys_for, per_document_sum, text_positions
from refusion_jax.batch.visibility import Pattern, Visibility
from refusion_jax.cli.settings import setting
from refusion_jax.systems import llada
from refusion_jax.systems.interface import Objective, System

_LONGEST_PHRASE = 8  # tokens


@dataclasses.dataclass(frozen=True)
class Twice(Pattern):
    """Two halves with bidirectional attention each, which do not attend to each other."""

    def rank_and_group(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        index = np.arange(length, dtype=np.int32)
        return 0 * index, 1 + index // (length // 2)


def preference(cross_entropy: Float32[Array, "B T2"], batch: Batch) -> dict[str, Float32[Array, ""]]:
    """The terms `preference` and `mdm`, the cross-entropy of the chosen text."""
    T = cross_entropy.shape[1] // 2
    cost, share = batch.weights["preference"] * cross_entropy, batch.weights["mdm"][:, :T]
    margin = per_document_sum(cost[:, T:] - cost[:, :T], batch.visibility.segment_ids[:, :T])
    return {
        "preference": jnp.sum(share * jax.nn.softplus(-margin)),  # the shares of a document sum to 1 / documents
        "mdm": jnp.sum(share * cross_entropy[:, :T]),
    }


@dataclasses.dataclass(frozen=True)
class RejectRepetition(Objective):
    """The mean over documents of -log sigmoid(margin) + anchor * CE."""

    pattern: ClassVar[Pattern] = Twice()
    streams: ClassVar[int] = 2  # the same text, once for each label

    anchor: float = setting(0.1, "weight of the chosen text's own cross-entropy", at_least=0, at_most=1e3)

    @property
    def coefficients(self) -> dict[str, float]:
        return {"preference": 1.0, "mdm": self.anchor}

    def corrupt(self, rows: Rows, keys: Key[Array, "B"]) -> Batch:
        positions, start = text_positions(rows.segment_ids), document_start(rows.segment_ids)
        is_masked, p = draw_masks(rows, keys)
        count = per_document_sum(is_masked, rows.segment_ids)
        rejected = jnp.take_along_axis(rows.tokens, _repeated(is_masked, start, keys), axis=1)
        each = is_masked / jnp.maximum(count, 1).astype(jnp.float32)
        inputs = jnp.where(is_masked, self.mask_id, rows.tokens)
        return Batch(
            inputs=join(inputs, inputs),
            positions=join(positions, positions),
            visibility=Visibility.of(self.pattern, join(rows.segment_ids, rows.segment_ids)),
            labels=join(rows.tokens, rejected),
            weights={
                "preference": join(each, each),
                "mdm": join(each / count_documents(rows.segment_ids), 0 * each),
            },
            diagnostics={"mask_ratio": join(p, p)},
            combine=preference,
        )


def _repeated(is_masked: Bool[Array, "B T"], start: Int32[Array, "B T"], keys: Key[Array, "B"]) -> Int32[Array, "B T"]:
    """For each masked place, the place whose token the rejected text has there; documents begin at `start`."""
    draws = jax.vmap(lambda key: jax.random.uniform(key, start.shape[1:]))(keys_for("phrases", keys))
    length = 1 + jnp.floor(jnp.take_along_axis(draws, start, axis=1) * _LONGEST_PHRASE).astype(jnp.int32)
    before = jnp.cumsum(is_masked, axis=1) - is_masked  # number of masks before each place of the row
    first = jnp.take_along_axis(before, start, axis=1)  # of the document
    order = jnp.argsort(~is_masked, axis=1, stable=True)  # masked places first
    return jnp.take_along_axis(order, jnp.where(is_masked, first + (before - first) % length, 0), axis=1)


SYSTEM = System(
    name="r2ft",
    objective=RejectRepetition,
    former={"eps": 1e-3, "gamma": 0.0, "beta_chosen": 1.0, "beta_rejected": 1.0, "longest_phrase": 8},
    scoring=llada.SCORING,
)

"""The training objective of slot diffusion, a hybrid of next-token and masked-token cross-entropy, and its likelihood.

Axes: B rows, T row length; P tokens of a prompt, R of its continuation, N slots.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from refusion_jax.batch.batch import Batch, count_documents, mean_over
from refusion_jax.batch.rows import Rows
from refusion_jax.batch.visibility import CAUSAL, Pattern, Visibility
from refusion_jax.cli.errors import UserError
from refusion_jax.cli.settings import setting
from refusion_jax.systems.interface import Objective, ScoredText, ScoredTokens
from refusion_jax.systems.refusion import slots


@dataclasses.dataclass(frozen=True)
class SlotDiffusion(Objective):
    """ReFusion's objective (arXiv 2512.13586, section 3.2)."""

    pattern: ClassVar[Pattern] = CAUSAL

    sizes: tuple[int, ...] = setting(
        (4, 8, 16, 32), "slot sizes, drawn uniformly per document", at_least=1, at_most=4096
    )
    eps: float = setting(1e-3, "least probability of masking a slot", above=0, below=1)
    mdm_weight: float = setting(
        1.0, "weight of the masked term, relative to the next-token term (lambda)", at_least=0, at_most=1e6
    )

    @property
    def coefficients(self) -> dict[str, float]:
        """Weights of `ar`, the next token inside clean slots, and `mdm`, the tokens of masked slots."""
        return {"ar": 1.0, "mdm": self.mdm_weight}

    def corrupt(self, rows: Rows, keys: Key[Array, "B"]) -> Batch:
        return hybrid_batch(slots.corrupt(rows, slots.draw_noise(keys, rows, self.sizes, self.eps), self.mask_id))


def hybrid_batch(c: slots.Corrupted) -> Batch:
    """Weights of the hybrid loss over a batch of N documents.

    ar: the mean over all clean labels of the batch. mdm: 1/N * sum over masked tokens of CE / (p R), where p and R are
    the mask probability and the response length of the token's document. A term without labels is 0, never NaN.
    """
    documents = count_documents(c.segment_ids)
    return Batch(
        inputs=c.inputs,
        positions=c.positions,
        visibility=Visibility.of(CAUSAL, c.segment_ids),
        labels=c.labels,
        weights={
            "ar": mean_over(c.clean_label),
            "mdm": c.masked_label / (documents * c.mask_probability * jnp.maximum(c.response_length, 1)),
        },
        diagnostics={"mask_ratio": c.mask_probability, "slot_size": c.slot_size},
    )


def slot_scoring(text: ScoredText) -> ScoredTokens:
    """The feed of a text, whose exact likelihood it gives for an order of its slots, by the chain rule.

    The first token of a slot is predicted by a mask token at its place that attends to exactly what was committed
    before the slot, as if this slot were the only one to plan; the other tokens of the slot are predicted by the token
    before them, as in training. One forward scores all slots. Slots start at the first token of the continuation; the
    last one may be short. A prompt token `p` and the slots (ab)(cd) in the order (cd)(ab) are fed as

        tokens       p  c  d  a  b  M  M
        positions    0  3  4  1  2  1  3
        rank         0  2  4  6  8  5  1     a mask ranks between what was committed before its slot and the slot
        group        0  0  0  0  0  2  1     and no other token attends to it
        labels       .  d  .  b  .  a  c

    Raises:
      UserError: where the order does not name every slot once.
    """
    prompt, continuation, slot_size = text.prompt, text.continuation, text.slot_size
    P, R = len(prompt), len(continuation)
    first = np.arange(0, R, slot_size)
    if text.order == "random":
        order = np.random.default_rng(text.draw).permutation(len(first))
    else:
        order = np.arange(len(first)) if text.order == "left_to_right" else np.asarray(text.order, np.int64)
    if not np.array_equal(np.sort(order), np.arange(len(first))):
        raise UserError(
            f"{text.name}: order={list(order)[:20]} must name each of its {len(first)} slots of slot_size={slot_size} "
            f"once, counted from 0"
        )
    place = np.argsort(order)  # [N] place of each slot in the order
    index = np.arange(R)
    written = np.argsort(place[index // slot_size], kind="stable")  # [R] the continuation in the order of writing
    slot_of = written // slot_size
    has_next = np.append(slot_of[1:] == slot_of[:-1], np.zeros(min(R, 1), bool))
    at = np.argsort(written)[first]  # [N] number of tokens of the continuation before each slot in the order
    clean = np.arange(P + R)
    return ScoredTokens(
        *(
            np.concatenate(parts).astype(np.int32)
            for parts in (
                (prompt, continuation[written], np.full(len(first), text.mask_id)),
                (np.arange(P), P + written, P + first),
                (2 * clean, 2 * (P + at) - 1),
                (np.zeros_like(clean), 1 + place),
                (np.zeros(P), np.where(has_next, continuation[np.minimum(written + 1, R - 1)], 0), continuation[first]),
            )
        ),
        np.concatenate([np.zeros(P), has_next, np.ones(len(first))]).astype(np.float32),
        np.concatenate([np.zeros(P), written + 1, first]).astype(np.int32),
    )

"""The training objective of slot diffusion: a hybrid of next-token and masked-token cross-entropy.

Axes: B rows, T row length.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Key

from refusion_jax.batch.batch import Batch, count_documents, mean_over
from refusion_jax.batch.rows import Rows
from refusion_jax.batch.visibility import CAUSAL, Pattern, Visibility
from refusion_jax.cli.settings import Setting
from refusion_jax.systems.interface import Objective
from refusion_jax.systems.refusion import slots

CONFIG_KEYS = {
    "sizes": Setting((4, 8, 16, 32), "slot sizes, drawn uniformly per document", at_least=1, at_most=4096),
    "eps": Setting(1e-3, "least probability of masking a slot", above=0, below=1),
    "mdm_weight": Setting(
        1.0, "weight of the masked term, relative to the next-token term (lambda)", at_least=0, at_most=1e6
    ),
}


@dataclasses.dataclass(frozen=True)
class SlotDiffusion(Objective):
    """ReFusion's objective (arXiv 2512.13586, section 3.2)."""

    pattern: ClassVar[Pattern] = CAUSAL

    mask_id: int
    sizes: tuple[int, ...]
    eps: float
    mdm_weight: float

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

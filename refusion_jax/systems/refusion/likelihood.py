"""The likelihood of a text under slot diffusion, for an order of its slots.

Axes: P tokens of the prompt, R of the continuation, N slots.
"""

import numpy as np

from refusion_jax.cli.errors import UserError
from refusion_jax.systems.interface import ScoredText, ScoredTokens


def slot_scoring(text: ScoredText) -> ScoredTokens:
    """The input tokens that give the exact likelihood of a text, for an order of its slots, by the chain rule.

    The first token of a slot is predicted by a mask token at its place that attends to exactly what was committed
    before the slot, as if it were the only slot of a plan; the other tokens of the slot are predicted by the token
    before them, as in training. One forward pass scores all slots. Slots start at the first token of the continuation;
    the last one may be short. UserError if the order does not name each of them once. A prompt token `p` and the
    slots (ab)(cd) in the order (cd)(ab) are fed as

        tokens       p  c  d  a  b  M  M
        positions    0  3  4  1  2  1  3
        rank         0  2  4  6  8  5  1     a mask ranks between what was committed before its slot and the slot
        group        0  0  0  0  0  2  1     and no other token attends to it
        labels       .  d  .  b  .  a  c
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
            f"{text.name}: order={order[:20].tolist()} must name each of its {len(first)} slots of "
            f"slot_size={slot_size} once, counted from 0"
        )
    place = np.argsort(order)  # [N] place of each slot in the order
    index = np.arange(R)
    written = np.argsort(place[index // slot_size], kind="stable")  # [R] the continuation in the order of writing
    slot_of = written // slot_size
    has_next = np.append(slot_of[1:] == slot_of[:-1], False)
    at = np.argsort(written)[first]  # [N] number of tokens of the continuation before each slot in the order
    clean = np.arange(P + R)
    next_token = np.where(has_next, continuation[np.minimum(written + 1, R - 1)], 0)

    def joined(*parts: np.ndarray, dtype: type = np.int32) -> np.ndarray:
        return np.concatenate(parts).astype(dtype)

    return ScoredTokens(
        tokens=joined(prompt, continuation[written], np.full(len(first), text.mask_id)),
        positions=joined(np.arange(P), P + written, P + first),
        rank=joined(2 * clean, 2 * (P + at) - 1),
        group=joined(np.zeros_like(clean), 1 + place),
        labels=joined(np.zeros(P), next_token, continuation[first]),
        weights=joined(np.zeros(P), has_next, np.ones(len(first)), dtype=np.float32),
        places=joined(np.zeros(P), written + 1, first),
    )

"""ReFusion's decoding in plain Python: one request, lists, no cache, greedy. Read this file first.

The text is committed slot by slot, in any order. Every token attends to all that was committed before it, and to the
tokens before it in its own forward pass. The jitted decoders in this folder compute the same for many requests at a
time, with a cache; tests compare them with these functions token by token.
"""

import numpy as np
from jaxtyping import Bool

from refusion_jax.decoding.reference import ReferenceDecoder
from refusion_jax.decoding.requests import Request
from refusion_jax.model.interface import LanguageModel
from refusion_jax.systems import ar
from refusion_jax.systems.refusion.canvas import ranks, slots_a_block, slots_of
from refusion_jax.systems.refusion.settings import CONFIDENCE

Fed = dict[int, int]  # place in the text -> token, in the order in which they are fed


class CommittedText(ReferenceDecoder):
    """The committed tokens, and which of them each one attended to."""

    def __init__(self, model: LanguageModel, request: Request):
        super().__init__(model, request)
        self.slots = slots_of(request)
        self.text, self.seen = {}, np.zeros((0, 0), bool)
        self.commit(self.given)

    def commit(self, fed: Fed, alone: bool = False) -> None:
        """Commits tokens that were fed together; `alone` if slots did not see each other."""
        self.seen = self.visible(fed, alone)
        self.text |= fed

    def visible(self, fed: Fed, alone: bool) -> Bool[np.ndarray, "n n"]:
        """Which tokens (columns) each one (row) attends to: fed ones to all committed ones, and to fed ones causally.

        If `alone`, fed tokens attend only to those fed tokens that are of their own slot.
        """
        slot_of = {place: number for number, slot in enumerate(self.slots) for place in slot}
        slot = [slot_of.get(place, -1) for place in fed]
        sees = np.block([np.ones((len(fed), len(self.text)), bool), np.tri(len(fed), dtype=bool)])
        if alone:
            sees[:, len(self.text) :] &= np.equal.outer(slot, slot)
        return np.vstack([np.pad(self.seen, ((0, 0), (0, len(fed)))), sees])

    def probabilities(self, phase: str, fed: Fed, alone: bool = False) -> dict[int, np.ndarray]:
        """place -> [V] for every fed token; `alone` as for `visible`."""
        text = self.text | fed
        p = self.forward(phase, [*text.values()], [*text], self.visible(fed, alone))
        return dict(zip(fed, p[len(self.text) :], strict=True))

    def drafts(self, p: dict[int, np.ndarray]) -> dict[int, int]:
        """place -> the most probable token that may be chosen there."""
        return {place: self.best(row, place) for place, row in p.items()}


def plan_and_infill(model: LanguageModel, request: Request, plans_alone: bool = False) -> dict:
    """The decoder `refusion`: plan, then infill the chosen slots (arXiv 2512.13586, section 3.3).

    With `plans_alone` the mask tokens of a plan attend to those of their own slot only.
    """
    text, s, rounds = CommittedText(model, request), request.settings, 0
    infill = {"exact": infill_exactly, "threshold": infill_by_threshold}[s.infill]
    turn = dict(zip(text.slots, ranks(request), strict=True))
    per_block = slots_a_block(request)
    for first in range(0, len(text.slots), per_block):
        slots = text.slots[first : first + per_block]
        while slots:
            # Plan: mask tokens for all slots that remain. Slots are chosen by the confidence of their first token; in
            # another order, as many slots are chosen in that order.
            rounds += 1
            masks = dict.fromkeys((place for slot in slots for place in slot), text.ids.mask_id)
            p = text.probabilities("plan", masks, plans_alone)
            draft = text.drafts(p)
            sure = text.surest({slot[0]: p[slot[0]] for slot in slots}, s.slot_threshold)
            chosen = [slot for slot in slots if slot[0] in sure]
            if s.order != CONFIDENCE:
                chosen = sorted(sorted(slots, key=turn.get)[: len(sure)], key=min)
            infill(text, chosen, draft, {place: p[place][token] for place, token in draft.items()})

            slots = [slot for slot in slots if slot[0] not in text.text and slot[0] < text.end]
        if text.has_ended:
            break
    return text.result(rounds)


def infill_exactly(text: CommittedText, chosen: list[range], draft: dict[int, int], chance: dict[int, float]) -> None:
    """Exact infilling: commits all chosen slots, with the same text as one token at a time.

    The chosen slots in sequence are fed together. Each draft that differs from the wanted token at its place is
    replaced by it; the first replacement is final, since all tokens before it are.

    The slots are in text order. `draft` has the plan's token for each place, of which the first of each slot is final,
    and `chance` its probability in the plan.
    """
    blend, eos, now = text.request.settings.infill_blend, text.ids.eos_id, dict(draft)
    while chosen:
        places = [place for slot in chosen for place in slot]
        p = text.probabilities("verify", {place: now[place] for place in places})

        def wanted(place, p=p):
            """The predicted next token, or the plan's if the mix of both distributions makes it more probable."""
            following = text.best(p[place - 1], place)
            plan = (1 - blend) * p[place - 1][draft[place]] + blend * chance[place]
            is_better = following != draft[place] and text.above(plan, (1 - blend) * p[place - 1][following])
            return draft[place] if is_better else following

        right = {place: wanted(place) for slot in chosen for place in slot[1:]}
        final = next((i for i, place in enumerate(places) if now[place] != right.get(place, now[place])), len(places))
        ends = [i for i, place in enumerate(places[:final]) if now[place] == eos]
        whole = [slot for slot in chosen if places.index(slot[-1]) < final]
        count = ends[0] + 1 if ends else sum(map(len, whole))
        text.commit({place: now[place] for place in places[:count]})
        chosen = [] if ends else chosen[len(whole) :]
        now |= right


def infill_by_threshold(
    text: CommittedText, chosen: list[range], draft: dict[int, int], chance: dict[int, float]
) -> None:
    """The authors' infilling: commits the chosen slots whose drafts are accepted, or if there are none, infills all.

    Arguments are those of `infill_exactly`; `chance` is not used.
    """
    mask, eos, threshold = text.ids.mask_id, text.ids.eos_id, text.request.settings.token_threshold

    def accepted(p, slot, before):
        """Length of a slot's accepted prefix, at least `before + 1`."""
        trusted = (i <= before or text.above(p[place - 1][draft[place]], threshold) for i, place in enumerate(slot))
        return next((i for i, ok in enumerate(trusted) if not ok), len(slot))

    # Verify the drafts of all chosen slots together; commit the whole slots in the accepted prefix.
    places = [place for slot in chosen for place in slot]
    p = text.probabilities("verify", {place: draft[place] for place in places})
    runs = {slot: accepted(p, slot, 0) for slot in chosen}
    whole = next((i for i, slot in enumerate(chosen) if runs[slot] < len(slot)), len(chosen))
    prefix = sum(map(len, chosen[:whole]))
    partial = prefix + (runs[chosen[whole]] if whole < len(chosen) else 0)
    ends = [i for i in range(partial) if draft[places[i]] == eos]
    count = ends[0] + 1 if ends else prefix
    text.commit({place: draft[place] for place in places[:count]})

    # If there are none, infill, with slots that do not see each other: draft the rest and check it, until accepted.
    while not count:
        fed = {at: draft[at] if i < runs[slot] else mask for slot in chosen for i, at in enumerate(slot)}
        proposed = text.probabilities("propose", fed, alone=True)
        draft |= text.drafts({at: row for at, row in proposed.items() if fed[at] == mask})
        p = text.probabilities("check", {at: draft[at] for at in fed}, alone=True)
        runs = {slot: accepted(p, slot, runs[slot]) for slot in chosen}
        with_end = [slot for slot in chosen if eos in [draft[at] for at in slot[: runs[slot]]]]
        if with_end:
            chosen = [slot for slot in chosen if slot[0] <= with_end[0][0]]
            runs[with_end[0]] = len(with_end[0])
        if all(runs[slot] == len(slot) for slot in chosen):
            places = [at for slot in chosen for at in slot]
            count = next((i + 1 for i, at in enumerate(places) if draft[at] == eos), len(places))
            text.commit({at: draft[at] for at in places[:count]}, alone=True)


def one_by_one(model: LanguageModel, request: Request) -> dict:
    """The decoder `sequential`: slots in text order, first tokens from a mask, the others from the token before."""
    return ar.reference(model, request, from_masks=frozenset(slot[0] for slot in slots_of(request)))

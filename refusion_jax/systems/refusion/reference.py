"""ReFusion's decoding in plain Python: one request, lists, no cache, greedy. Read this file first.

The text is committed slot by slot, in any order. Every token attends to all that was committed before it, and to the
tokens before it in its own forward. The jitted decoders in this folder compute the same for many requests at a time,
with a cache; tests compare them with these functions token by token.
"""

import math

import numpy as np

from refusion_jax.decoding.reference import ReferenceDecoder
from refusion_jax.decoding.requests import Request
from refusion_jax.model.transformer import Transformer
from refusion_jax.systems.refusion.canvas import ranks, slots_a_block, slots_of
from refusion_jax.systems.refusion.settings import CONFIDENCE

Fed = list[tuple[int, int]]  # (token, place in the text)


class CommittedText:
    """The committed tokens, and which of them each one attended to."""

    def __init__(self, model: Transformer, request: Request):
        self.plain, self.tokens, self.places, self.seen = ReferenceDecoder(model, request), [], [], []
        self.slots = slots_of(request)
        self.commit([(token, place) for place, token in self.plain.given.items()])
        self.given = len(self.tokens)

    @property
    def commits(self) -> Fed:
        """(token, place) of all that was decoded, in the order of commitment."""
        return list(zip(self.tokens, self.places, strict=True))[self.given :]

    def commit(self, fed: Fed, alone: list | None = None) -> None:
        """Commits tokens that were fed together; `alone` has the slot of each if slots did not see each other."""
        before = len(self.tokens)
        for i, (token, place) in enumerate(fed):
            self.tokens.append(token)
            self.places.append(place)
            self.seen.append([*range(before), *(before + j for j in sees(i, alone))])

    def probabilities(self, phase: str, fed: Fed, alone: list | None = None) -> dict[int, np.ndarray]:
        """place -> [V] for every fed token, which attends to all committed tokens and to fed ones as `sees` tells."""
        n = len(self.tokens)
        visible = np.zeros((n + len(fed), n + len(fed)), bool)
        for i in range(n):
            visible[i, self.seen[i]] = True
        for i in range(len(fed)):
            visible[n + i, [*range(n), *(n + j for j in sees(i, alone))]] = True
        tokens, places = zip(*fed, strict=True)
        p = self.plain.forward(phase, [*self.tokens, *tokens], [*self.places, *places], visible)
        return {place: p[n + i] for i, place in enumerate(places)}

    def best(self, p: dict[int, np.ndarray]) -> dict[int, int]:
        """place -> the most probable token that may be chosen there."""
        return {place: self.plain.best(row, place) for place, row in p.items()}


def sees(i: int, alone: list | None) -> list[int]:
    """Which of the tokens fed together the i-th attends to: all up to itself, or only those of its own slot."""
    return [j for j in range(i + 1) if alone is None or alone[j] == alone[i]]


def plan_and_infill(model: Transformer, request: Request, plans_alone: bool = False) -> dict:
    """The decoder `refusion`: plan, then infill the chosen slots (arXiv 2512.13586, section 3.3).

    With `plans_alone` the mask tokens of a plan attend to those of their own slot only.
    """
    text, s, rounds = CommittedText(model, request), request.settings, 0
    mask, eos, above = text.plain.ids.mask_id, text.plain.ids.eos_id, text.plain.above
    infill = {"exact": infill_exactly, "threshold": infill_by_threshold}[s.infill]
    turn = dict(zip(text.slots, ranks(request), strict=True))
    per_block = slots_a_block(request)
    for first in range(0, len(text.slots), per_block):
        slots = text.slots[first : first + per_block]
        while slots:
            # Plan: mask tokens for all slots that remain. Slots are chosen by the confidence of their first token, or
            # as many of them in another order.
            rounds += 1
            alone = [slot for slot in slots for _ in slot] if plans_alone else None
            p = text.probabilities("plan", [(mask, place) for slot in slots for place in slot], alone)
            draft = text.best(p)
            sure = [p[slot[0]][draft[slot[0]]] for slot in slots]
            chosen = [slot for slot, c in zip(slots, sure, strict=True) if above(c, s.slot_threshold)]
            if s.order != CONFIDENCE:
                chosen = sorted(sorted(slots, key=turn.get)[: len(chosen) or 1], key=min)
            elif not chosen:
                chosen = [slots[i] for i in text.plain.first(dict(enumerate(sure)), 1)]
            infill(text, chosen, draft, {place: p[place][token] for place, token in draft.items()})

            end = min((at for token, at in text.commits if token == eos), default=math.inf)
            slots = [slot for slot in slots if slot[0] not in text.places and slot[0] < end]
        if eos in dict(text.commits):
            break
    return text.plain.result(text.commits, rounds)


def infill_exactly(text: CommittedText, chosen: list[range], draft: dict[int, int], chance: dict[int, float]) -> None:
    """Exact infilling: commits all chosen slots, with the same text as one token at a time.

    The chosen slots in sequence are fed together. Each draft that differs from the token to have at its place is
    replaced by it; the first replacement is final, since all tokens before it are.

    Args:
      text: the committed text.
      chosen: slots in text order.
      draft: place -> the plan's token; the first token of a slot is final.
      chance: place -> the probability of that token in the plan.
    """
    blend, eos, now = text.plain.request.settings.infill_blend, text.plain.ids.eos_id, dict(draft)
    while chosen:
        places = [place for slot in chosen for place in slot]
        p = text.probabilities("verify", [(now[place], place) for place in places])

        def wanted(place, p=p):
            """The predicted next token, or the plan's if the mix of both distributions makes it more probable."""
            following = text.plain.best(p[place - 1], place)
            plan = (1 - blend) * p[place - 1][draft[place]] + blend * chance[place]
            is_better = following != draft[place] and text.plain.above(plan, (1 - blend) * p[place - 1][following])
            return draft[place] if is_better else following

        right = {place: wanted(place) for slot in chosen for place in slot[1:]}
        final = next((i for i, place in enumerate(places) if now[place] != right.get(place, now[place])), len(places))
        ends = [i for i, place in enumerate(places[:final]) if now[place] == eos]
        whole = [slot for slot in chosen if places.index(slot[-1]) < final]
        count = ends[0] + 1 if ends else sum(map(len, whole))
        text.commit([(now[place], place) for place in places[:count]])
        chosen = [] if ends else chosen[len(whole) :]
        now |= right


def infill_by_threshold(
    text: CommittedText, chosen: list[range], draft: dict[int, int], chance: dict[int, float]
) -> None:
    """The authors' infilling: commits the chosen slots whose drafts are accepted, or if there are none, infills all.

    Arguments are those of `infill_exactly`; `chance` is not used.
    """
    s, above = text.plain.request.settings, text.plain.above
    mask, eos = text.plain.ids.mask_id, text.plain.ids.eos_id

    def accepted(p, slot, before):
        """Length of a slot's accepted prefix, at least `before + 1`."""
        trusted = (i <= before or above(p[place - 1][draft[place]], s.token_threshold) for i, place in enumerate(slot))
        return next((i for i, ok in enumerate(trusted) if not ok), len(slot))

    # Verify the drafts of all chosen slots together; commit the whole slots in the accepted prefix.
    places = [place for slot in chosen for place in slot]
    p = text.probabilities("verify", [(draft[place], place) for place in places])
    runs = {slot: accepted(p, slot, 0) for slot in chosen}
    whole = next((i for i, slot in enumerate(chosen) if runs[slot] < len(slot)), len(chosen))
    prefix = sum(map(len, chosen[:whole]))
    partial = prefix + (runs[chosen[whole]] if whole < len(chosen) else 0)
    ends = [i for i in range(partial) if draft[places[i]] == eos]
    count = ends[0] + 1 if ends else prefix
    text.commit([(draft[place], place) for place in places[:count]])

    # If there are none, infill, with each slot alone: draft the rest again and check it, until all are accepted.
    while not count:
        alone = [slot for slot in chosen for _ in slot]
        fed = [(draft[at] if i < runs[slot] else mask, at) for slot in chosen for i, at in enumerate(slot)]
        proposed = text.probabilities("propose", fed, alone)
        draft.update(text.best({at: row for at, row in proposed.items() if (mask, at) in fed}))
        p = text.probabilities("check", [(draft[at], at) for slot in chosen for at in slot], alone)
        runs = {slot: accepted(p, slot, runs[slot]) for slot in chosen}
        with_end = [slot for slot in chosen if eos in [draft[at] for at in slot[: runs[slot]]]]
        if with_end:
            chosen = [slot for slot in chosen if slot[0] <= with_end[0][0]]
            runs[with_end[0]] = len(with_end[0])
        if all(runs[slot] == len(slot) for slot in chosen):
            fed = [(draft[at], at) for slot in chosen for at in slot]
            count = next((i + 1 for i, (token, _) in enumerate(fed) if token == eos), len(fed))
            alone = [slot for slot in chosen for _ in slot]
            text.commit(fed[:count], alone)


def one_by_one(model: Transformer, request: Request) -> dict:
    """The decoder `sequential`: slots in text order, first tokens from a mask, the others from the token before."""
    text = CommittedText(model, request)
    for slot in text.slots:
        for place in slot:
            if place == slot[0]:
                p = text.probabilities("first", [(text.plain.ids.mask_id, place)])
            else:  # the last committed token is fed again in place of its committed copy
                last = text.tokens.pop(), text.places.pop()
                text.seen.pop()
                p = {place: text.probabilities("next", [last])[last[1]]}
                text.commit([last])
            token = text.best(p)[place]
            text.commit([(token, place)])
            if token == text.plain.ids.eos_id:
                return text.plain.result(text.commits, len(text.plain.phases))
    return text.plain.result(text.commits, len(text.plain.phases))

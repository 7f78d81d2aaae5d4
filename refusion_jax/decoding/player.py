"""A self-contained page that plays decodings in a browser, forward pass by forward pass, several systems at once."""

import collections
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources

from refusion_jax.data.interface import Tokenizer
from refusion_jax.decoding.prompts import spelled
from refusion_jax.decoding.requests import Answer, Request
from refusion_jax.decoding.trajectory import Forward, Trajectory, forwards_of

MOST = 16  # prompts of a page
BEGINNING = b"<!doctype html><!-- decodings, by refusion_jax.generate -->"  # of every page
REFUSED, VERIFIED, REPAIRED, WAITING = range(4)  # outcomes of a draft; one that waits is fed again unchanged


@dataclasses.dataclass(frozen=True)
class Scene:
    """A decoding in the format of the page. Cells are places in text order; words are indices into `words`."""

    system: str
    prompt: str
    groups: list[list[tuple[str, int, int]]]  # text, number in the order of commitment or -1, whether after the end
    counts: list[int]  # committed tokens after 0, 1, 2 .. forward passes
    words: list[str]
    drafts: list[list[tuple[int, int, int]]]  # of forward passes 1, 2 .. : cell, word, outcome
    plans: list[list[tuple[int, int, int]]]  # cell, word, probability in %


class Decodings:
    """Collects the decodings of a system."""

    def __init__(self, system: str, tokenizer: Tokenizer | None):
        self._system, self._tokenizer = system, tokenizer
        self._parts: dict[int, list[Trajectory]] = collections.defaultdict(list)
        self.scenes: dict[int, Scene] = {}

    def record(self, index: int, trajectory: Trajectory) -> None:
        """Takes what `stream` reports every few forward passes."""
        self._parts[index].append(trajectory)

    def add(self, index: int, request: Request, answer: Answer, kept: int | None = None) -> None:
        """Takes a finished answer; `kept` of its tokens are before a stop string."""
        order = {place: number for number, place in enumerate(answer.commit_order)}
        final = dict(zip(answer.commit_order, answer.commit_tokens, strict=True))
        given = {place: token for token, place in zip(*request.given, strict=True)}
        text = final | given
        places = sorted(text)
        kept = len(answer.tokens) if kept is None else kept
        first_after = next(iter(places[len(request.prompt) + kept :]), max(places, default=0) + 1)
        slots = [slot for slot in groups_of(request) if any(at in text for at in slot)]
        cell = {at: number for number, at in enumerate(itertools.chain(*slots))}
        order |= dict.fromkeys(given, -1)

        found = forwards_of(self._parts.pop(index, []))
        steps = [found[number] for number in range(1, answer.forwards + 1)]
        counts = [*(step.committed for step in steps), len(answer.commit_order)]
        words: dict[str, int] = {}
        drafts, plans = [], []

        def word(text: Mapping[int, int], at: int) -> int:
            return words.setdefault(self._spell(text, at), len(words))

        for step, after, count in zip(steps, [*steps, Forward()][1:], counts[1:], strict=True):
            known = given | {at: final[at] for at in answer.commit_order[:count]}
            fed = known | step.drafts
            planned = known | {at: token for at, (token, _) in step.plan.items()}
            some = [(at, token) for at, token in step.drafts.items() if at in cell]
            drafts.append([(cell[at], word(fed, at), outcome(at, token, known, after)) for at, token in some])
            some = [(at, p) for at, (_, p) in step.plan.items() if at in cell]
            plans.append([(cell[at], word(planned, at), round(100 * p)) for at, p in some])
        self.scenes[index] = Scene(
            system=self._system,
            prompt=self._tokenizer.decode(request.prompt) if self._tokenizer else " ".join(map(str, request.prompt)),
            groups=[
                [(self._spell(text, at), order.get(at, len(order)), int(at >= first_after)) for at in slot]
                for slot in slots
            ],
            counts=counts,
            words=list(words),
            drafts=drafts,
            plans=plans,
        )

    def _spell(self, text: Mapping[int, int], at: int) -> str:
        """What the token at a place adds to the text, or its name."""
        if at not in text:
            return ""
        named = self._tokenizer and (spelled(text, at, self._tokenizer) or self._tokenizer.name_of(text[at]))
        return named or str(text[at])


def outcome(at: int, draft: int, known: Mapping[int, int], after: Forward) -> int:
    """The outcome of a draft, from the text that is known after this forward pass and from the next forward pass."""
    if at in known:
        return VERIFIED if known[at] == draft else REPAIRED
    return WAITING if after.drafts.get(at) == draft else REFUSED


def page(prompts: Sequence[tuple[object, Sequence[Scene]]]) -> str:
    """The page for prompts, each given as (id, the scenes to show side by side)."""
    rows = [{"id": id, "scenes": [dataclasses.asdict(scene) for scene in scenes]} for id, scenes in prompts]
    data = json.dumps(rows, separators=(",", ":")).replace("<", "\\u003c")
    template = resources.files("refusion_jax.decoding").joinpath("player.html").read_text("utf-8")
    return template.replace("DECODINGS", data)


def groups_of(request: Request) -> Iterator[range]:
    """The places after the prompt, grouped by given text and slot; without slots, each place of a gap is a group."""
    for places, tokens in request.parts[1:]:
        size = max(1, len(places)) if tokens is not None else request.settings.slot_size
        yield from (places[start : start + size] for start in range(0, len(places), size))

"""The decoders once more, as plainly as the method can be said: one prompt, Python lists, no cache.

Every forward runs over all tokens again, with a mask that says who saw whom when it was committed. The real decoders
are held to this one, token by token.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from conftest import EOS, MASK, PAD
from flax import nnx

from refusion_jax.decoding.requests import Request
from refusion_jax.model.transformer import KeyValues, Transformer

LENGTH = 96  # every forward is padded to this: one compilation


@functools.partial(jax.jit, static_argnums=0)
def _probabilities(graphdef, params, tokens, positions, visible):
    model = nnx.merge(graphdef, params)
    c = model.config
    none = jnp.zeros((c.num_hidden_layers, 1, 0, c.num_key_value_heads, c.head_dim))
    cache = KeyValues(none, none), jnp.zeros(1, int)
    logits = model.extend(tokens[None], positions[None], *cache, visible[None])[0][0]
    return jax.nn.softmax(jnp.where(jnp.arange(c.vocab_size)[None] < c.num_tokens, logits, -jnp.inf))


class Text:
    """What is committed, what is given first: tokens, their places, and which of the earlier ones each has seen."""

    def __init__(self, model: Transformer, request: Request):
        self.model, self.tokens, self.places, self.seen, self.slots, at = nnx.split(model), [], [], [], [], 0
        self.margin, K = 1.0, request.settings.slot_size  # how far the closest decision was from another one
        for piece in request.pieces:
            if isinstance(piece, int):
                self.slots += [range(i, min(i + K, at + piece)) for i in range(at, at + piece, K)]
                at += piece
            else:
                self.commit([(token, at + i) for i, token in enumerate(piece)])
                at += len(piece)
        self.given, self.prompt_length, self.phases = len(self.tokens), len(request.prompt), []
        self.last_given = max(self.places)

    def commit(self, fed: list[tuple[int, int]], alone: list | None = None) -> None:
        before = len(self.tokens)
        for i, (token, place) in enumerate(fed):
            self.tokens.append(token)
            self.places.append(place)
            self.seen.append([*range(before), *(before + j for j in sees(i, alone))])

    def probabilities(self, phase: str, fed: list[tuple[int, int]], alone: list | None = None) -> dict:
        """place -> [V], softmax over real ids at every fed token; each sees all that is committed, and `sees`."""
        self.phases.append(phase)
        n, tokens, places = len(self.tokens), np.zeros(LENGTH, np.int32), np.zeros(LENGTH, np.int32)
        visible = np.zeros((LENGTH, LENGTH), bool)
        tokens[:n], places[:n] = self.tokens, self.places
        for i in range(n):
            visible[i, self.seen[i]] = True
        for i, (token, place) in enumerate(fed):
            tokens[n + i], places[n + i] = token, place
            visible[n + i, [*range(n), *(n + j for j in sees(i, alone))]] = True
        p = np.asarray(_probabilities(*self.model, tokens, places, visible))
        return {place: p[n + i] for i, (_, place) in enumerate(fed)}

    def best(self, p: dict) -> dict[int, int]:
        """place -> the most probable token that may be chosen there."""
        chosen = {}
        for place, row in p.items():
            row = row.copy()
            row[[MASK, PAD] if place > self.last_given else [MASK, PAD, EOS]] = -1
            chosen[place] = int(row.argmax())
            self.margin = min(self.margin, np.diff(np.sort(row)[-2:])[0])
        return chosen

    def above(self, p: float, threshold: float) -> bool:
        self.margin = min(self.margin, abs(p - threshold))
        return p > threshold

    def result(self, rounds: int) -> dict:
        text = dict(zip(self.places, self.tokens, strict=True))
        ends = [place for place in self.places[self.given :] if text[place] == EOS]
        answer = [p for p in sorted(text) if p >= self.prompt_length and p <= min(ends, default=math.inf)]
        out = {"tokens": [text[p] for p in answer], "commit_order": self.places[self.given :], "rounds": rounds}
        return out | {"forwards": len(self.phases), "phases": self.phases, "margin": self.margin}


def sees(i: int, alone: list | None) -> list[int]:
    """Which of the tokens fed together the i-th sees: those before it and itself, or of those its slot's."""
    return [j for j in range(i + 1) if alone is None or alone[j] == alone[i]]


def refusion(model: Transformer, request: Request) -> dict:
    """Plan and infill, by the paper's section 3.3."""
    text, s, rounds = Text(model, request), request.settings, 0
    per_block = -(-len(text.slots) // s.serial_blocks)
    for first in range(0, len(text.slots), per_block):
        slots = text.slots[first : first + per_block]
        while slots:
            rounds += 1
            p = text.probabilities("plan", [(MASK, place) for slot in slots for place in slot])
            draft = text.best(p)
            sure = [p[slot[0]][draft[slot[0]]] for slot in slots]
            chosen = [slot for slot, c in zip(slots, sure, strict=True) if text.above(c, s.slot_threshold)]
            if not chosen:
                chosen = [slots[int(np.argmax(sure))]]
                text.margin = min(text.margin, *np.diff(sorted(sure)[-2:]), 1.0)

            def run(p, slot, accepted, draft=draft):
                """How many leading tokens of a slot are accepted, if the first `accepted + 1` are anyway."""
                trusted = (i <= accepted or text.above(p[place - 1][draft[place]], s.token_threshold)
                           for i, place in enumerate(slot))  # fmt: skip
                return next((i for i, ok in enumerate(trusted) if not ok), len(slot))

            places = [place for slot in chosen for place in slot]
            p = text.probabilities("verify", [(draft[place], place) for place in places])
            runs = {slot: run(p, slot, 0) for slot in chosen}
            whole = next((i for i, slot in enumerate(chosen) if runs[slot] < len(slot)), len(chosen))
            prefix = sum(map(len, chosen[:whole]))
            partial = prefix + (runs[chosen[whole]] if whole < len(chosen) else 0)
            ends = [i for i in range(partial) if draft[places[i]] == EOS]
            count = ends[0] + 1 if ends else prefix
            text.commit([(draft[place], place) for place in places[:count]])

            while not count:
                alone = [slot for slot in chosen for _ in slot]
                fed = [(draft[at] if i < runs[slot] else MASK, at) for slot in chosen for i, at in enumerate(slot)]
                proposed = text.best({k: v for k, v in text.probabilities("propose", fed, alone).items()
                                      if (MASK, k) in fed})  # fmt: skip
                draft.update(proposed)
                p = text.probabilities("check", [(draft[at], at) for slot in chosen for at in slot], alone)
                runs = {slot: run(p, slot, runs[slot]) for slot in chosen}
                with_end = [slot for slot in chosen if EOS in [draft[at] for at in slot[: runs[slot]]]]
                if with_end:
                    chosen = [slot for slot in chosen if slot[0] <= with_end[0][0]]
                    runs[with_end[0]] = len(with_end[0])
                if all(runs[slot] == len(slot) for slot in chosen):
                    fed = [(draft[at], at) for slot in chosen for at in slot]
                    count = next((i + 1 for i, (token, _) in enumerate(fed) if token == EOS), len(fed))
                    text.commit(fed[:count], [slot for slot in chosen for _ in slot])

            ends = [at for token, at in list(zip(text.tokens, text.places, strict=True))[text.given :] if token == EOS]
            slots = [slot for slot in slots if slot[0] not in text.places and slot[0] < min(ends, default=math.inf)]
        if EOS in text.tokens[text.given :]:
            break
    return text.result(rounds)

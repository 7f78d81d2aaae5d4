"""The decoders once more, as plainly as the method can be said: one prompt, Python lists, no cache.

Every forward runs over all tokens again, with a mask that says who saw whom when it was committed. The real decoders
are held to this one, token by token.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from conftest import BOS, EOS, MASK, PAD  # noqa: F401
from flax import nnx

from refusion_jax import DecodeSettings
from refusion_jax.model.transformer import KeyValues, Transformer

LENGTH = 64  # every forward is padded to this: one compilation


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef, params, tokens, positions, visible):
    model = nnx.merge(graphdef, params)
    c = model.config
    none = jnp.zeros((c.num_hidden_layers, 1, 0, c.num_key_value_heads, c.head_dim))
    return model.extend(tokens[None], positions[None], KeyValues(none, none), jnp.zeros(1, int), visible[None])[0][0]


class Text:
    """What was committed: tokens, their positions, and which of the earlier ones each has seen."""

    def __init__(self, model: Transformer, prompt: list[int]):
        self.model, self.prompt_length = nnx.split(model), len(prompt)
        self.num_tokens = model.config.num_tokens
        self.tokens, self.positions, self.seen = [], [], []
        self.forwards = 0
        self.commit([(token, i) for i, token in enumerate(prompt)])

    def commit(self, fed: list[tuple[int, int]], alone: int | None = None) -> None:
        before = len(self.tokens)
        for i, (token, position) in enumerate(fed):
            self.tokens.append(token)
            self.positions.append(position)
            self.seen.append([*range(before), *(before + j for j in sees(i, alone))])

    def probabilities(self, fed: list[tuple[int, int]], alone: int | None = None) -> np.ndarray:
        """[len(fed), V]: softmax over real ids at every fed token; each sees all that is committed, and `sees`."""
        self.forwards += 1
        n = len(self.tokens)
        tokens, positions = np.zeros(LENGTH, np.int32), np.zeros(LENGTH, np.int32)
        visible = np.zeros((LENGTH, LENGTH), bool)
        for i in range(n):
            tokens[i], positions[i] = self.tokens[i], self.positions[i]
            visible[i, self.seen[i]] = True
        for i, (token, position) in enumerate(fed):
            tokens[n + i], positions[n + i] = token, position
            visible[n + i, [*range(n), *(n + j for j in sees(i, alone))]] = True
        logits = np.array(_logits(*self.model, tokens, positions, visible))[n : n + len(fed)]
        logits[:, self.num_tokens :] = -np.inf
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True)

    def answer(self) -> list[int]:
        committed = sorted(zip(self.positions, self.tokens, strict=True))[self.prompt_length :]
        tokens = [token for _, token in committed]
        return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


def sees(i: int, alone: int | None) -> range:
    """Which of the tokens fed together the i-th sees: those before it and itself, or of those its slot's."""
    return range(i // alone * alone if alone else 0, i + 1)


def best(probabilities: np.ndarray) -> list[int]:
    """The most probable token at each place that may be chosen."""
    allowed = probabilities.copy()
    allowed[:, [MASK, PAD]] = -1
    return allowed.argmax(axis=1).tolist()


def leading(flags: list[bool]) -> int:
    return next((i for i, flag in enumerate(flags) if not flag), len(flags))


def refusion(model: Transformer, prompt: list[int], s: DecodeSettings) -> dict:
    """Plan and infill, as spec'd by the paper's section 3.3."""
    text, K = Text(model, prompt), s.slot_size
    per_block = s.max_new_tokens // s.serial_blocks // K
    rounds = infills = 0

    def places(slot):
        return [len(prompt) + slot * K + i for i in range(K)]

    for block in range(s.serial_blocks):
        slots = list(range(block * per_block, (block + 1) * per_block))
        while slots:
            rounds += 1
            masks = [(MASK, place) for slot in slots for place in places(slot)]
            p = text.probabilities(masks)
            x0 = best(p)
            drafts = {slot: x0[i * K : (i + 1) * K] for i, slot in enumerate(slots)}
            confidence = {slot: p[i * K, x0[i * K]] for i, slot in enumerate(slots)}
            chosen = [slot for slot in slots if confidence[slot] > s.slot_threshold]
            chosen = chosen or [max(slots, key=confidence.get)]

            fed = [(t, place) for c in chosen for t, place in zip(drafts[c], places(c), strict=True)]
            p = text.probabilities(fed)
            trusted = [i % K == 0 or p[i - 1, token] > s.token_threshold for i, (token, _) in enumerate(fed)]
            prefix = leading(trusted)
            ends = [i for i in range(prefix) if fed[i][0] == EOS]
            count = ends[0] + 1 if ends else prefix // K * K
            text.commit(fed[:count])

            if not count:
                infills += 1
                runs = {c: leading(trusted[i * K : (i + 1) * K]) for i, c in enumerate(chosen)}
                while any(runs[c] < K for c in chosen):
                    known = {c: drafts[c][: runs[c]] + [MASK] * (K - runs[c]) for c in chosen}
                    fed = [(t, place) for c in chosen for t, place in zip(known[c], places(c), strict=True)]
                    x0 = best(text.probabilities(fed, alone=K))
                    for n, c in enumerate(chosen):
                        drafts[c][runs[c] :] = x0[n * K + runs[c] : (n + 1) * K]
                    fed = [(t, place) for c in chosen for t, place in zip(drafts[c], places(c), strict=True)]
                    p = text.probabilities(fed, alone=K)
                    for n, c in enumerate(chosen):
                        runs[c] = leading(
                            [i <= runs[c] or p[n * K + i - 1, drafts[c][i]] > s.token_threshold for i in range(K)]
                        )
                    with_end = [c for c in chosen if EOS in drafts[c][: runs[c]]]
                    if with_end:
                        chosen = [c for c in chosen if c <= with_end[0]]
                        runs[with_end[0]] = K
                fed = [(t, place) for c in chosen for t, place in zip(drafts[c], places(c), strict=True)]
                count = next((i + 1 for i, (token, _) in enumerate(fed) if token == EOS), len(fed))
                text.commit(fed[:count], alone=K)

            committed = set(text.positions)
            slots = [slot for slot in slots if places(slot)[0] not in committed]
            ends = [at for token, at in zip(text.tokens, text.positions, strict=True) if token == EOS]
            slots = [slot for slot in slots if places(slot)[0] < min(ends, default=math.inf)]
        if EOS in text.tokens:
            break
    return {
        "tokens": text.answer(),
        "commit_order": text.positions[len(prompt) :],
        "forwards": text.forwards,
        "rounds": rounds,
        "infills": infills,
    }


def left_to_right(model: Transformer, prompt: list[int], s: DecodeSettings) -> dict:
    """`sequential` and `ar`: one token a forward."""
    text = Text(model, prompt)
    for offset in range(s.max_new_tokens):
        place = len(prompt) + offset
        if s.method == "sequential" and offset % s.slot_size == 0:
            p = text.probabilities([(MASK, place)])
        else:  # the last committed token is fed once more, and seen once: by itself
            last = text.tokens.pop(), text.positions.pop()
            text.seen.pop()
            p = text.probabilities([last])
            text.commit([last])
        token = best(p)[0]
        text.commit([(token, place)])
        if token == EOS:
            break
    return {"tokens": text.answer(), "commit_order": text.positions[len(prompt) :], "forwards": text.forwards}

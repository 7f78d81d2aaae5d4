"""Base class of the reference implementations of decoders.

A reference follows its paper in plain Python, for one request at a time and without a cache: every forward pass runs
over all tokens again, with an attention mask that repeats what each token attended to when it was committed. Tests
compare the jitted decoders with these references token by token.

Axes: n tokens of a forward pass, V vocabulary.
"""

import functools
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float32

from refusion_jax.decoding.cache import Cache
from refusion_jax.decoding.requests import Request
from refusion_jax.decoding.settings import TokenIds
from refusion_jax.model.interface import LanguageModel

_LENGTH = 32  # forward passes are padded to this length, doubled as often as needed, so that few are compiled


class ReferenceDecoder:
    """One request and the model that decodes it.

    `keeps_cache`: whether the decoder has a cache, to which the setting `cache` applies. `phases` lists the names of
    the forward passes so far. `margin` is the smallest margin of all decisions so far: if it is as small as float32
    noise, a batched decoder may decide differently. `text` holds tokens by their places in the text: given ones, then
    those that the decoder adds, in the order of commitment.
    """

    def __init__(self, model: LanguageModel, request: Request, keeps_cache: bool = True):
        self.request, self.ids = request, TokenIds.of(request.settings, model.config)
        model = model.rounded(request.settings.weights, request.settings.cache if keeps_cache else "same")
        self.model, self.phases, self.margin = nnx.split(model), [], 1.0
        self.vocab_size = model.config.vocab_size
        tokens, places = request.given
        self.given = dict(zip(places, tokens, strict=True))  # place in the text -> token
        self.text = dict(self.given)
        self.places = [at for start, length in request.gaps for at in range(start, start + length)]

    def forward(
        self,
        phase: str,
        tokens: list[int],
        places: list[int] | None = None,
        visible: Bool[np.ndarray, "n n"] | None = None,
    ) -> Float32[np.ndarray, "n V"]:
        """Runs one forward pass, whose phase is recorded in `phases`, and returns the probabilities at every token.

        The places in the text are by default 0, 1, ...; each token (row) attends to the visible ones (columns), by
        default itself and those before it.
        """
        self.phases.append(phase)
        n = len(tokens)
        size = max(_LENGTH, 1 << (n - 1).bit_length())
        fed, at, seen = np.zeros(size, np.int32), np.zeros(size, np.int32), np.zeros((size, size), bool)
        fed[:n], at[:n] = tokens, range(n) if places is None else places
        seen[:n, :n] = np.tri(n, dtype=bool) if visible is None else visible
        return np.asarray(_probabilities(*self.model, fed, at, seen))[:n]

    def tokens(self, places: Iterable[int]) -> list[int]:
        """The tokens at these places, masks where there are none yet."""
        return [self.text.get(place, self.ids.mask_id) for place in places]

    def denoise(self, phase: str, places: list[int] | None = None) -> Float32[np.ndarray, "length V"]:
        """Probabilities at places of the text (default: all), each of which attends to all of these places."""
        fed = [*range(self.request.length)] if places is None else places
        p = np.full((self.request.length, self.vocab_size), np.nan, np.float32)
        p[fed] = self.forward(phase, self.tokens(fed), fed, np.ones((len(fed), len(fed)), bool))
        return p

    def best(self, p: Float32[np.ndarray, "V"], place: int) -> int:
        """The most probable token among those that may be chosen at a place."""
        p = self.choosable(p, place)
        self.margin = min(self.margin, np.diff(np.sort(p)[-2:])[0])
        return int(p.argmax())

    def choosable(self, p: Float32[np.ndarray, "V"], place: int) -> Float32[np.ndarray, "V"]:
        """The probabilities at a place, -1 for tokens that may not be chosen there."""
        p = p.copy()
        p[[token for token in (self.ids.mask_id, self.ids.pad_id) if token >= 0]] = -1  # a model may lack either
        if place < self.request.ends_from:
            p[self.ids.eos_id] = -1
        return p

    def above(self, p: float, threshold: float) -> bool:
        self.margin = min(self.margin, abs(p - threshold))
        return p > threshold

    def first(self, scores: dict[int, float], count: int) -> list[int]:
        """The `count` places with the highest scores, in text order; of equal scores the earlier place."""
        order = sorted(scores, key=lambda place: (-scores[place], place))
        if 0 < count < len(order):
            last, next_one = (scores[order[i]] for i in (count - 1, count))
            if last or next_one:  # a tie of two exact zeros is not due to noise
                self.margin = min(self.margin, last - next_one)
        return sorted(order[:count])

    def surest(self, rows: Mapping[int, Float32[np.ndarray, "V"]], threshold: float, least: int = 1) -> dict[int, int]:
        """place -> its most probable token, where that exceeds a threshold; if nowhere, at the `least` best places."""
        best = {place: self.best(row, place) for place, row in rows.items()}
        scores = {place: rows[place][token] for place, token in best.items()}
        sure = [place for place, score in scores.items() if self.above(score, threshold)]
        return {place: best[place] for place in sure or self.first(scores, least)}

    def fill(self, new: Mapping[int, int]) -> None:
        """Commits tokens at some places, in this order, but none after an EOS."""
        for place, token in new.items():
            if place < self.end:
                self.text[place] = token

    def next_tokens(self, p: Float32[np.ndarray, "n V"]) -> list[int]:
        """The most probable tokens after the text, each predicted at the token before it; p comes from `forward`."""
        return [self.best(row, place) for place, row in enumerate(p[len(self.text) - 1 :], len(self.text))]

    def commit_verified(self, drafts: list[int], best: list[int]) -> int:
        """Commits the accepted prefix of the drafts, then the model's own next token, but nothing after an EOS.

        `best` has the most probable token at the place of each draft, and at the one after them. Returns the number of
        accepted drafts.
        """
        accepted = next((i for i, draft in enumerate(drafts) if draft != best[i]), len(drafts))
        self.fill(dict(enumerate(best[: accepted + 1], len(self.text))))
        return accepted

    @property
    def end(self) -> int:
        """Where the text ends: after the first committed EOS, or else at its maximal length."""
        return min((at + 1 for at in self.places if self.text.get(at) == self.ids.eos_id), default=self.request.length)

    @property
    def has_ended(self) -> bool:
        return self.ids.eos_id in self.tokens(self.places)

    def is_complete(self) -> bool:
        """Whether every place, or every place before the first EOS, is filled."""
        return all(place in self.text for place in self.places if place < self.end)

    def result(self, rounds: int | None = None) -> dict:
        """The expected output of the decoder; by default every forward is a round."""
        end, begin = self.end, len(self.request.prompt)
        return {
            "tokens": [token for place, token in sorted(self.text.items()) if begin <= place < end],
            "commit_order": [place for place in self.text if place not in self.given],
            "rounds": len(self.phases) if rounds is None else rounds,
            "forwards": len(self.phases),
            "phases": self.phases,
            "margin": self.margin,
        }


@functools.partial(jax.jit, static_argnums=0)
def _probabilities(graphdef, params, tokens, places, visible):
    model = nnx.merge(graphdef, params)
    none = Cache.empty(model, 1, 0)
    logits = model.extend(tokens[None], places[None], none.entries, none.length, visible[None])[0][0]
    is_real = jnp.arange(model.config.vocab_size)[None] < model.config.num_tokens
    return jax.nn.softmax(jnp.where(is_real, logits, -jnp.inf))

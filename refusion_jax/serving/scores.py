"""The `logprobs` of answers: the exact likelihood of their tokens, with slots in text order, once they are written."""

import codecs
from collections.abc import Sequence
from typing import Any

import anyio

from refusion_jax.data.interface import Tokenizer
from refusion_jax.decoding.prompts import Decode, tokens_of
from refusion_jax.decoding.settings import Settings
from refusion_jax.evaluation.likelihood import TokenScore, token_scores
from refusion_jax.model.interface import LanguageModel
from refusion_jax.serving.engine import Choice
from refusion_jax.serving.protocol import MOST_SCORED, Chat, Completion
from refusion_jax.serving.writer import Delta


class Scorer:
    """Scores answers of a model, one response at a time, as this needs memory in addition to the batch's."""

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, settings: Settings):
        self._model, self._tokenizer = model, tokenizer
        self._how = {"method": settings.method, "slot_size": settings.slot_size}
        self._turn = anyio.CapacityLimiter(1)

    def is_asked(self, body: Completion | Chat) -> bool:
        """Whether a client wants scores; UserError if it does, and the model's likelihood is not known."""
        if body.logprobs is None or body.logprobs is False:
            return False
        token_scores(self._model, [], [], **self._how)
        return True

    async def score(
        self, body: Completion | Chat, choices: Sequence[Choice], answers: Sequence[Sequence[int]]
    ) -> list[dict[str, Any]]:
        """The `logprobs` of each answer and, if the prompt is echoed, of the prompt as the client sent it."""
        return await anyio.to_thread.run_sync(self._score, body, choices, answers, limiter=self._turn)

    def _score(
        self, body: Completion | Chat, choices: Sequence[Choice], answers: Sequence[Sequence[int]]
    ) -> list[dict[str, Any]]:
        echo = isinstance(body, Completion) and body.echo
        prompts = [one.prompt for one in choices]
        echoed = [prompt if echo else [] for prompt in prompts]
        contexts = [prompt[:1] for prompt in echoed] + prompts
        asked = body.top_logprobs if isinstance(body, Chat) else body.logprobs
        how = self._how | {"top": MOST_SCORED if asked > 1 else 1}  # two programs, whatever clients ask for
        scored = token_scores(self._model, contexts, [prompt[1:] for prompt in echoed] + [*answers], **how)
        parts = zip(choices, echoed, answers, scored[: len(choices)], scored[len(choices) :], strict=True)
        told = self._of_chat if isinstance(body, Chat) else self._of_completion
        return [
            # The first token of a text has no score, unless a token was added before it.
            told(body, [*prompt, *answer][one.added * echo :], [*[None] * (echo and not one.added), *first, *rest])
            for one, prompt, answer, first, rest in parts
        ]

    def _of_completion(self, body: Completion, tokens: list[int], scored: list[TokenScore | None]) -> dict[str, Any]:
        spelled, offsets, at, start, run = self._spelled(tokens, body.echo), [], 0, 0, []
        whole = codecs.getincrementaldecoder("utf-8")("replace")
        for token, one in zip(tokens, spelled, strict=True):
            if whole.getstate()[0] and one and one[0] & 0xC0 != 0x80:  # the character before stays incomplete:
                at = start + len(self._tokenizer.continuation(run))  # one U+FFFD for it, or one for each byte
                whole.reset()
            if not whole.getstate()[0]:
                start, run = at, []
            offsets.append(at)
            at, run = at + len(whole.decode(one)), [*run, token]
        top = [one and self._top(one, token, body.logprobs) for one, token in zip(scored, tokens, strict=True)]
        return {
            "tokens": [_text(one) for one in spelled],
            "token_logprobs": [one and one.log_p for one in scored],
            "top_logprobs": top if body.logprobs else None,
            "text_offset": offsets,
        }

    def _of_chat(self, body: Chat, tokens: list[int], scored: list[TokenScore]) -> dict[str, Any]:
        def told(spelled: bytes, log_p: float) -> dict[str, Any]:
            return {"token": _text(spelled), "logprob": log_p, "bytes": [*spelled]}

        content = [
            told(own, one.log_p)
            | {"top_logprobs": [told(self._tokenizer.spelling(id), p) for id, p in one.best[: body.top_logprobs]]}
            for own, one in zip(self._spelled(tokens, not body.constraints), scored, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _top(self, score: TokenScore, token: int, most: int) -> dict[str, float]:
        """The most probable tokens and the actual one; those with the same spelling are kept apart."""
        told: dict[str, float] = {}
        for id, log_p in [(token, score.log_p), *(one for one in score.best[:most] if one[0] != token)]:
            text = _text(self._tokenizer.spelling(id))
            told[f"token_id:{id}" if text in told else text] = log_p
        return told

    def _spelled(self, tokens: list[int], begin: bool) -> list[bytes]:
        """What each token adds to their text; some tokenizers strip a text's leading space."""
        spelled = [self._tokenizer.spelling(token) for token in tokens]
        first = next((place for place, one in enumerate(spelled) if one), 0)
        if begin and spelled and not self._tokenizer.decode([tokens[first]]).startswith(" "):
            spelled[first] = spelled[first].removeprefix(b" ")
        return spelled


def _text(spelled: bytes) -> str:
    return spelled.decode(errors="replace")


class ScoredStream:
    """The `logprobs` of one answer, piece by piece; None for each piece if nobody asks for them."""

    def __init__(self, scorer: Scorer, decode: Decode, body: Completion | Chat, choice: Choice):
        self._scorer, self._decode, self._body, self._choice = scorer, decode, body, choice
        self._is_asked, self._text, self._told = scorer.is_asked(body), "", 0  # number of places sent so far

    async def of(self, delta: Delta | None) -> dict[str, Any] | None:
        """Those of the tokens whose text is in a delta; called first with None, for an echoed prompt."""
        if not self._is_asked:
            return None
        tokens = []
        if delta:
            self._text += delta.text
            tokens = delta.tokens if delta.finish_reason else tokens_of(self._text, delta.tokens, self._decode)
        (whole,) = await self._scorer.score(self._body, [self._choice], [tokens])
        new = {name: value[self._told :] if isinstance(value, list) else value for name, value in whole.items()}
        self._told = max(len(value) for value in whole.values() if isinstance(value, list))
        return new

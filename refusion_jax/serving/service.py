"""Turns request bodies into jobs of the engine, and its answers into what clients get; independent of HTTP."""

import collections
import dataclasses
import functools
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from refusion_jax.cli.errors import UserError
from refusion_jax.cli.settings import declared
from refusion_jax.data.interface import Tokenizer
from refusion_jax.decoding.prompts import Decode
from refusion_jax.decoding.requests import Answer, Request
from refusion_jax.decoding.settings import Settings, TokenIds
from refusion_jax.decoding.stops import Stops
from refusion_jax.model.interface import LanguageModel
from refusion_jax.serving.engine import Choice, Engine
from refusion_jax.serving.grammar import Grammars
from refusion_jax.serving.metrics import Metrics
from refusion_jax.serving.protocol import Chat, Completion
from refusion_jax.serving.scores import Scorer
from refusion_jax.serving.tools import CallReader, check_template
from refusion_jax.serving.writer import Delta, Writer

_OWN_FIELDS = {"max_new_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "seed": "seed"}


class Service:
    """A model, its tokenizer and its engine."""

    def __init__(self, name: str, model: LanguageModel, tokenizer: Tokenizer, engine: Engine, seed: int | None = None):
        """Serves a model, which also scores texts; requests without a seed get `seed` or, if None, one of their own."""
        self.name, self.engine, self.tokenizer, self._seed = name, engine, tokenizer, seed
        self.metrics = Metrics(name, engine)
        self.scorer, self._settings = Scorer(model, tokenizer, engine.settings), engine.settings
        # As in `evaluate`: a model's config may name a token that its tokenizer never writes.
        begins = next((id for id in (tokenizer.bos_id, model.config.bos_token_id) if id >= 0), -1)
        self._ends = {"eos_token": tokenizer.eos_id, "bos_token": begins}
        self._rendering, self._check_tools = threading.Lock(), functools.cache(lambda: check_template(tokenizer))
        self._grammars = Grammars(tokenizer, TokenIds.of(engine.settings, model.config).eos_id)
        settings, own = declared(type(engine.settings)), engine.settings.changeable - set(_OWN_FIELDS)
        # JSON Schemas of the settings in a request's `decode`.
        self.changeable = {name: settings[name].schema(getattr(engine.settings, name)) for name in sorted(own)}

    def completion(self, body: Completion) -> list[Choice]:
        """The answers to a completion, n for each prompt; UserError if a field cannot be served."""
        suffix = (self.encode(body.suffix, inside=True),) if body.suffix else ()
        choices, noises = [], collections.defaultdict(lambda: range(body.n))
        for number, prompt in enumerate(body.prompt):
            name = "prompt" if len(body.prompt) == 1 else f"prompt[{number}]"
            text = prompt if isinstance(prompt, str) else None
            given = prompt if text is None else self.encode(text)
            after = sum(map(len, suffix)) + (1 if body.max_tokens is None else body.max_tokens)
            ids = self._begun(given, after) if body.add_special_tokens else given
            own = noises[tuple(ids)]  # a repeated prompt gets new ones
            noises[tuple(ids)] = range(own.stop, own.stop + body.n)
            choices += self._answers(body, ids, len(ids) - len(given), text, name, suffix, own)
        return choices

    def compile_structured(self) -> None:
        """Compiles for structured answers in advance; raises as `Engine.constrained`."""
        self.engine.constrained(self._grammars.compile("--structured", "choice", ["yes", "no"]))

    def _begun(self, ids: list[int], after: int = 0) -> list[int]:
        """The tokens after the BOS that began every text in training, if there is one, unless they begin with it.

        A text that, with `after` tokens after it, fills the context gets none: in training, too, long texts continue in
        rows that do not begin with it.
        """
        begin = self.tokenizer.bos_id
        has_room = len(ids) + after < self._settings.cache_length
        return [begin, *ids] if begin >= 0 and ids[:1] != [begin] and has_room else ids

    def chat(self, body: Chat) -> list[Choice]:
        """The n answers to a conversation; UserError if a field cannot be served."""
        turns = [one.turn for one in body.messages]
        tools = [tool.model_dump(exclude_unset=True) for tool in body.offered]
        if tools or any("tool_calls" in turn for turn in turns):
            self._check_tools()
        if self.tokenizer.has_chat_template:
            with self._rendering:
                text = self.tokenizer.render_chat(turns, body.chat_template_kwargs.enable_thinking, tools=tools)
            (ids,) = self.tokenizer.encode_chat([text])
        elif body.chat_template_kwargs.enable_thinking:
            raise UserError("chat_template_kwargs: this model has no chat template")
        else:
            (ids,) = self.tokenizer.encode_prompts([tuple((turn["role"], turn["content"]) for turn in turns)])
        return self._answers(body, ids, 0, None, body.turns, (), range(body.n))

    def _answers(
        self,
        body: Completion | Chat,
        ids: list[int],
        added: int,
        text: str | None,
        name: str,
        suffix: tuple[list[int], ...],
        noises: Iterable[int],
    ) -> list[Choice]:
        if body.seed is None:  # the server's, or a fresh one; the reply reports it
            body.seed = secrets.randbelow(2**32) if self._seed is None else self._seed
        settings, limit = self._own_settings(body, len(ids))
        self.scorer.is_asked(body)  # raises if it cannot score
        stops, least = Stops(tuple(filter(None, body.stop or ()))), limit if body.ignore_eos else body.min_tokens
        if least > limit:
            raise UserError(f"min_tokens={least}: an answer has at most {limit} tokens here")
        self.engine.check_prompt(ids, name, limit + sum(map(len, suffix)))
        request, engine = None, self.engine
        if limit:
            grammar = next((self._grammars.compile(*given) for given in body.constraints), None)
            if grammar and least:
                raise UserError("min_tokens, ignore_eos: an answer ends where its grammar says so")
            engine = self.engine if grammar is None else self.engine.constrained(grammar)
            template = (limit, *suffix) if suffix else ()
            request = engine.check(Request(ids, template, settings, name=name, grammar=grammar, least=least))
        requests = [request and dataclasses.replace(request, noise=noise) for noise in noises]
        return [Choice(ids, added, text, one, limit, stops, engine) for one in requests]

    @property
    def defaults(self) -> dict[str, Any]:
        """Defaults of the fields for settings that all decoders have, except the seed."""
        own = {field: getattr(self._settings, name) for name, field in _OWN_FIELDS.items() if name != "seed"}
        return own | {"max_tokens": self._settings.new_tokens}

    def _own_settings(self, body: Completion | Chat, given: int) -> tuple[Settings, int]:
        """(decode settings of a request with `given` given tokens, the most tokens of its answer)."""
        for name in body.decode:
            if name in _OWN_FIELDS:
                raise UserError(f"decode.{name}: is the field {_OWN_FIELDS[name]!r} of the request")
            if name not in self.changeable:
                known = ", ".join(self.changeable)
                raise UserError(f"decode: {name!r} is not a setting that a request may have; these are {known}")
        fields = {own: getattr(body, field) for own, field in _OWN_FIELDS.items() if own != "max_new_tokens"}
        top_k = {} if body.top_k is None else {"top_k": max(body.top_k, 0)}
        own = top_k | body.decode | {name: value for name, value in fields.items() if value is not None}
        plain = dataclasses.replace(self._settings, **own | {"max_new_tokens": 0})
        most = self._settings.new_tokens
        limit = max(min(most, self._settings.cache_length - given), 1) if body.max_tokens is None else body.max_tokens
        if limit > most:
            raise UserError(
                f"{limit} tokens are asked for: an answer has at most {most} (serve --decode.max_new_tokens)"
            )
        whole = max(-(-limit // plain.multiple), 1) * plain.multiple
        return dataclasses.replace(plain, max_new_tokens=whole), limit

    def reader(self, choice: Choice, body: Completion | Chat) -> Callable[[Answer, bool], Delta]:
        """A function that cuts an answer into deltas: text that has become certain, and calls of tools."""
        begins = len(choice.prompt) if body.watch else None
        writer = Writer(self.tokenizer, choice.stops, choice.limit, begins, self.decoding(body))
        if isinstance(body, Completion) or not body.offered:
            return writer.read
        calls = CallReader([tool.function.name for tool in body.offered], body.parallel_tool_calls)
        return lambda answer, is_finished: calls.read(writer.read(answer, is_finished))

    def decoding(self, body: Completion | Chat) -> Decode:
        """The function that decodes an answer: one that continues a prompt, or just what its grammar allows."""
        goes_on = isinstance(body, Completion) or body.constraints
        return self.tokenizer.continuation if goes_on else self.tokenizer.decode

    def encode(self, text: str, inside: bool = False) -> list[int]:
        """Token ids of a text; with a chat template, names of special tokens in it are encoded as these tokens.

        `inside` other text, no space is added before it, as some tokenizers do.
        """
        tokenizer = self.tokenizer
        encode = tokenizer.encode_chat if tokenizer.has_chat_template else tokenizer.encode
        return (tokenizer.encode_inside([text], encode) if inside else encode([text]))[0]

    @property
    def special_tokens(self) -> dict[str, str | None]:
        """The names of the tokens that end and begin a text; None if there is none."""
        return {name: self.tokenizer.name_of(id) if id >= 0 else None for name, id in self._ends.items()}

    def tokenize(self, text: str, begins: bool) -> list[int]:
        """As `encode`, but a text that is just the name of a BOS or EOS token is that token."""
        named = {self.special_tokens[name]: id for name, id in self._ends.items()}
        ids = [named[text]] if text in named else self.encode(text)
        return self._begun(ids) if begins and text not in named else ids

    def detokenize(self, ids: list[int]) -> str:
        """The text of token ids; UserError for ids that do not exist."""
        if ids and not 0 <= min(ids) <= max(ids) < self.tokenizer.size:
            raise UserError(f"tokens: hold an id outside 0 to {self.tokenizer.size - 1}")
        return self.tokenizer.decode(ids)

    def echoes(self, choices: Sequence[Choice]) -> list[str]:
        return [self.tokenizer.decode(one.prompt[one.added :]) if one.text is None else one.text for one in choices]

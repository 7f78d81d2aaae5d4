"""Grammars of answers, by llguidance: JSON Schemas, regular expressions and choices, over a model's tokens."""

import json
import threading
from collections.abc import Sequence
from typing import Any

import tokenizers

from refusion_jax.cli.errors import UserError, needs
from refusion_jax.data.fast_tokenizer import FastTokenizer
from refusion_jax.data.interface import Tokenizer
from refusion_jax.decoding.constrained import Matcher, reason
from refusion_jax.serving.tools import BEGIN, END

_LARGEST = 1 << 18  # characters of a grammar
# JSON as written by Python's json.dumps. Free white space could make an answer endless, and would leave nothing forced.
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
_AS_ELSEWHERE = {"x-guidance": _JSON}  # in the schema of a part
# Lower than the library's limits: 0.1 s for the first place, milliseconds for others, some ten MB per grammar.
_LIMITS = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}


class Grammars:
    """Makes grammars over the tokens of a model; its tokenizer is read with the first of them."""

    def __init__(self, tokenizer: Tokenizer, eos_id: int):
        self._tokenizer, self._eos_id = tokenizer, eos_id
        self._tokens: Any = None  # an LLTokenizer
        self._reading = threading.Lock()

    def compile(self, field: str, kind: str, given: Any) -> Matcher:
        """A grammar that has consumed nothing; takes at most a few seconds.

        Args:
          field: of the request, for error messages.
          kind: "json" | "regex" | "choice" | "calls".
          given: a JSON Schema, as an object or text; a regular expression; a list of texts; what `_calls` takes.

        Raises:
          UserError: if it is invalid, too large, or uses what is not supported here; or without llguidance.
        """
        with needs("serve"):
            import llguidance
        try:
            given = _calls(*given) if kind == "calls" else given
            text = given if isinstance(given, str) else json.dumps(given)
            if len(text) > _LARGEST:
                raise ValueError(f"has {len(text)} characters, of at most {_LARGEST}")
            if kind == "json":
                source = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=_JSON)
            else:
                source = llguidance.grammar_from("lark" if kind == "calls" else kind, text)
            with self._reading:
                if self._tokens is None:
                    read = _Vocabulary(self._tokenizer, self._eos_id)
                    self._tokens = llguidance.LLTokenizer(read, eos_token=self._eos_id)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{field}: {reason(error)}") from error
        limits = llguidance.LLParserLimits(**_LIMITS)
        matcher = llguidance.LLMatcher(self._tokens, source, log_level=0, limits=limits)
        matcher.compute_bitmask()  # raises if no text can match
        if error := matcher.get_error():
            raise UserError(f"{field}: cannot be followed: {reason(error)}")
        return matcher


def _calls(tools: Sequence[tuple[str, Any]], are_several: bool, answer: Any) -> str:
    """A grammar, in llguidance's form of Lark, for one or several calls of tools: (name, schema of the arguments).

    If `answer` is not None, it is the schema of an answer that may be given instead of calls.
    """
    answer = json.loads(answer) if isinstance(answer, str) else answer
    if answer is not None and not isinstance(answer, dict):
        raise ValueError("is not an object")
    calls = 'call ("\\n" call)*' if are_several else "call"
    rules = [f"start: {calls}" if answer is None else f"start: {calls} | answer"]
    rules += [] if answer is None else [f"answer: %json {json.dumps(answer | _AS_ELSEWHERE)}"]
    either = " | ".join(f"call_{number}" for number in range(len(tools)))
    rules.append(f"call: {json.dumps(BEGIN + chr(10))} ({either}) {json.dumps(chr(10) + END)}")
    for number, (name, schema) in enumerate(tools):
        head = json.dumps(f'{{"name": "{name}", "arguments": ')
        rules.append(f'call_{number}: {head} %json {json.dumps({"type": "object"} | schema | _AS_ELSEWHERE)} "}}"')
    return "\n".join(rules)


class _Vocabulary:
    """A tokenizer for llguidance's TokenizerWrapper.

    llguidance's own reader of tokenizer.json takes every added token of the form <NAME> for a special one, such as
    Qwen's <tool_call> and Gemma's <b>, so that text that must contain them cannot be written.
    """

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, eos_id: int):
        self._tokenizer, self._encode = tokenizer, tokenizer.encode
        self.eos_token_id, self.bos_token_id = eos_id, None
        if isinstance(tokenizer, FastTokenizer):  # a copy: the engine's thread uses it, while others encode prompts
            copy = tokenizers.Tokenizer.from_str(tokenizer.files["tokenizer.json"].decode())
            copy.encode_special_tokens = True
            self._encode = lambda texts: [copy.encode(text, add_special_tokens=False).ids for text in texts]
        texts = [tokenizer.spelling(id) for id in range(tokenizer.size)]
        self.tokens: Sequence[bytes] = [text or b"<%d>" % id for id, text in enumerate(texts)]
        self.special_token_ids = [id for id, text in enumerate(texts) if not text]

    def __call__(self, text: str) -> list[int]:
        """The tokens of a forced text, called by the library."""
        return self._tokenizer.encode_inside([text], self._encode)[0]

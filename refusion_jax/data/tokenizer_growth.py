"""How much a tokenizer.json may make of a text: its rules are a stranger's, and may multiply it.

A normalizer is a sequence of rules: one that replaces "a" by "aaaaaaaaaa", ten times over, makes ten gigabytes of a
letter. What n bytes become is at most factor * n + more by each rule's own numbers; only where the bound over all rules
is too large are the rules tried on the text itself, one after the other, and each only when what it will make is known.
"""

import base64
import binascii
import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Any

import tokenizers

from refusion_jax.cli.errors import UserError

_LONGEST = 2 << 20  # bytes that texts of a batch may become together; the library takes 16 more for each
_FACTOR = 4  # and this times their own: "▁" has three bytes where " " has one
_RULES = 64  # of a normalizer or pre-tokenizer; they have fewer than 20
_PIECE = 1 << 16  # bytes that the decoder may make of one token
_WORD = 1000  # characters of what stands before or behind pieces of a word, and of words that are cut into pieces
_GROWING = ("content", "prepend", "precompiled_charsmap")  # what tells those rules apart that may multiply a text
_DOUBLINGS = 3  # pre-tokenizers that write bytes as letters, of two bytes each; more than one makes no sense


@dataclasses.dataclass(frozen=True)
class Growth:
    """At most factor * n + more bytes come of n."""

    factor: float = 1.0
    more: float = 0.0

    def then(self, next_one: "Growth") -> "Growth":
        """That of one rule after another."""
        return Growth(self.factor * next_one.factor, self.more * next_one.factor + next_one.more)

    def of(self, size: int, texts: int = 1) -> float:
        """Bytes that come of some texts of `size` bytes together."""
        return self.factor * size + self.more * texts


class TextGrowth:
    """The limits of one tokenizer."""

    def __init__(self, origin: str, config: dict[str, Any]):
        """Checks what a tokenizer.json says of itself.

        Args:
          origin: the file, for messages.
          config: what it holds; what is none of a tokenizer's is left to the library to refuse.

        Raises:
          UserError: where it could make too much of any text.
        """
        self._origin = origin
        self._rules = [_Rule(rule) for rule in self._flat(config, "normalizer", "normalizers")]
        self._growth = _chain(rule.growth for rule in self._rules)
        doubling = [rule for rule in self._flat(config, "pre_tokenizer", "pretokenizers") if _kind(rule) == "ByteLevel"]
        if len(doubling) > _DOUBLINGS:
            raise UserError(f"{origin}: its pre_tokenizer holds more than {_DOUBLINGS} of type ByteLevel")
        self._check_tokens(config)
        self.check([token["content"] for token in _added(config)])  # which the library normalizes, too

    def _flat(self, config: dict, name: str, inner: str) -> Iterator[dict]:
        """The rules of a part, in their order."""
        left, found = [config.get(name)], 0
        while left:
            rule = left.pop()
            if rule is None:
                continue
            found += 1
            kinds = rule.keys() & {inner, *_GROWING} if isinstance(rule, dict) else ()
            if not isinstance(rule, dict) or len(kinds) > 1:
                raise UserError(f"{self._origin} is not a Hugging Face tokenizer: {name} holds what is no {name}")
            if found > _RULES:
                raise UserError(f"{self._origin}: its {name} has more than {_RULES} rules")
            if inner not in rule:
                yield rule
            elif isinstance(rule[inner], list):
                left += reversed(rule[inner])

    def _check_tokens(self, config: dict) -> None:
        """Refuses tokens of which decoding would make too long texts, and words that take too long to cut."""
        model = config.get("model")
        model = model if isinstance(model, dict) else {}
        vocabulary = model.get("vocab")
        known = vocabulary if isinstance(vocabulary, dict | list) else ()
        texts = [token[0] if isinstance(token, list) and token else token for token in known]
        texts += [token["content"] for token in _added(config)]
        longest = max((text for text in texts if isinstance(text, str)), key=len, default="")
        decoding = _chain(growth_of(rule) for rule in self._flat(config, "decoder", "decoders"))
        if decoding.of(_bytes(longest)) > _PIECE:
            raise UserError(f"{self._origin}: its decoder makes more than {_PIECE >> 10} KiB of one token")
        for name, value in model.items():
            size = len(value) if isinstance(value, str) else value if name == "max_input_chars_per_word" else 0
            if isinstance(size, int) and size > _WORD:
                raise UserError(f"{self._origin}: {name} of its model is more than {_WORD}")

    def check(self, texts: list[str]) -> None:
        """Refuses to make too much of some texts.

        Raises:
          UserError: naming the file and how long they are.
        """
        if self._growth.of(4 * sum(map(len, texts)), len(texts)) <= _LONGEST:  # without counting their bytes
            return
        size = sum(map(_bytes, texts))
        most = _LONGEST + _FACTOR * size
        if self._growth.of(size, len(texts)) <= most:
            return
        left = most
        for text in texts:
            highest = 0
            for rule in self._rules:
                text = rule.applied(text, left)
                if text is None:
                    raise UserError(f"{self._origin}: its normalizer makes more than {most:,} bytes of {size:,}")
                highest = max(highest, _bytes(text))
            left -= highest


def growth_of(rule: dict[str, Any]) -> Growth:
    """That of one rule: of a replacement, of a table of them, of bytes written as letters, of what is put before.

    The forms of Unicode make at most 11 times as much, once, which is left out of account.
    """
    growth = Growth()
    if isinstance(content := rule.get("content"), str):
        pattern = rule.get("pattern")
        replaced = pattern.get("String") if isinstance(pattern, dict) else None
        if isinstance(replaced, str) and replaced:
            growth = growth.then(Growth(max(1.0, _bytes(content) / _bytes(replaced))))
        else:  # an expression may match between any two letters
            growth = growth.then(Growth(1.0 + _bytes(content)))
    if isinstance(prefix := rule.get("prepend"), str):
        growth = growth.then(Growth(1.0, _bytes(prefix)))
    if isinstance(table := rule.get("precompiled_charsmap"), str):
        growth = growth.then(Growth(float(max(1, _longest_entry(table)))))
    if _kind(rule) in ("ByteLevel", "BertNormalizer"):  # letters of two bytes; spaces around letters of three
        growth = growth.then(Growth(2.0))
    return growth


def _chain(steps: Iterable[Growth]) -> Growth:
    whole = Growth()
    for step in steps:
        whole = whole.then(step)
    return whole


def _longest_entry(table: str) -> int:
    """Bytes of the longest text in sentencepiece's table: a size in 4 bytes, a trie of that size, texts ended by 0."""
    try:
        raw = base64.b64decode(table)
    except (binascii.Error, ValueError):  # the library refuses it
        return 0
    return max(map(len, raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")))


class _Rule:
    """One rule of a normalizer, alone."""

    def __init__(self, rule: dict[str, Any]):
        self.growth = growth_of(rule)
        self._rule = rule
        self._made: dict[str | None, tokenizers.normalizers.Normalizer] = {}  # by its content

    def applied(self, text: str, most: float) -> str | None:
        """What it makes of a text; None for more than `most` bytes, which are counted, not made."""
        if isinstance(content := self._rule.get("content"), str):
            without, marked = (_bytes(self._apply(text, mark)) for mark in ("", "x"))
            return self._apply(text, content) if without + (marked - without) * _bytes(content) <= most else None
        made, size = [], 0
        part = max(1, int((_LONGEST - self.growth.more) / (4 * self.growth.factor)))
        for at in range(0, len(text), part):
            if self.growth.of(4) > _LONGEST:
                return None
            made.append(self._apply(text[at : at + part]))
            size += _bytes(made[-1])
            if size > most:
                return None
        return "".join(made)

    def _apply(self, text: str, content: str | None = None) -> str:
        if content not in self._made:  # a table of sentencepiece takes a millisecond to read
            rule = self._rule if content is None else self._rule | {"content": content}
            model = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
            alone = {"version": "1.0", "added_tokens": [], "normalizer": rule, "model": model}
            self._made[content] = tokenizers.Tokenizer.from_str(json.dumps(alone)).normalizer
        return self._made[content].normalize_str(text)


def _added(config: dict[str, Any]) -> list[dict[str, Any]]:
    tokens = config.get("added_tokens")
    known = [token for token in tokens if isinstance(token, dict)] if isinstance(tokens, list) else []
    return [token for token in known if isinstance(token.get("content"), str)]


def _kind(rule: dict[str, Any]) -> object:
    return rule.get("type")


def _bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))

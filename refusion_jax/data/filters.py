"""Filters of `prepare`: named transforms of one example, which leave it out or change its text.

Each depends only on the example and its settings, so it does the same in any worker. They run in the order of `RULES`;
those for documents judge only texts without a prompt, as in the papers they come from. The rules of Gopher and C4 and
the masking of personal data are datatrove's, the language is detected by py3langid.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from etils import epath

from refusion_jax.cli.errors import UserError, needs
from refusion_jax.data.examples import Bad, Example, decode
from refusion_jax.data.ngrams import ngram_hashes
from refusion_jax.distributed.json_files import read_json_lines
from refusion_jax.distributed.storage import read_file

_URL = 2000  # characters that are checked
_DOMAIN = re.compile(r"[\w-]+(\.[\w-]+)*")
_EXCERPT = 200  # characters shown of an example that is left out
_TEST_WORDS = 13  # consecutive words that no text may share with a test (GPT-3, arXiv 2005.14165, appendix C)
_LONGEST = 1_000_000  # characters of a text at most: more than Gopher's 100,000 words of at most 10
_LANGUAGE = 2000  # characters from which it is detected
_LEAST = 0.65  # probability of a language, as in datatrove
ALL = "all"  # languages

Outcome = Example | str  # the filtered example, or why it is left out


@dataclasses.dataclass(frozen=True)
class FilterSettings:
    """Which filters to apply, and their inputs."""

    names: tuple[str, ...] = ()  # of RULES
    languages: tuple[str, ...] = ()  # to keep; ALL: only count them
    decontaminate: tuple[tuple[str, str], ...] = ()  # files of tests, and their checksums
    blocked_urls: tuple[tuple[str, str], ...] = ()  # files of domains and beginnings of URLs, and their checksums


class Filters:
    """Applies the filters, one after the other."""

    def __init__(self, settings: FilterSettings):
        """Loads their inputs; UserError if a file cannot be read, or a package is not installed."""
        self.blocked = {line for path, _ in settings.blocked_urls for line in _lines(path)}
        self._steps: dict[str, Callable[[Example], Outcome]] = {}
        if settings.languages:
            self._steps["language"] = _language(settings.languages)
        if settings.decontaminate:
            tests = [_ngrams(path) for path, _ in settings.decontaminate]
            self._steps["decontaminate"] = functools.partial(_decontaminate, np.unique(np.concatenate(tests)))
        self._steps |= {name: make() for name, make in RULES.items() if name in settings.names}

    def __bool__(self) -> bool:
        return bool(self._steps)

    def is_blocked(self, example: Example) -> bool:
        """Whether the URL of an example is, or begins with, one of `blocked_urls`, or is of a domain below one."""
        url = example.url[:_URL]
        try:
            host = (urlsplit(url).hostname or "").split(".")
        except ValueError:  # not a URL
            host = []
        domains = (".".join(host[at:]) for at in range(len(host)))
        cuts = (url[:at] for at in range(len(url), 0, -1))
        return not self.blocked.isdisjoint(domains) or not self.blocked.isdisjoint(cuts)

    def __call__(self, example: Example) -> Example | Bad:
        """The filtered example, or a Bad `by_filter`, whose kind is the rule and whose reason the text's beginning."""
        if not (example.starts and example.ends):
            reason = "filters see whole documents, and this one is longer than --shard_mib"
            return Bad(example.where, reason, "longer than a shard")
        for name, step in self._steps.items():
            outcome = step(example)
            if isinstance(outcome, str):
                return filtered_out(example, f"{name}: {outcome}" if outcome else name)
            example = outcome
        return example


def filtered_out(example: Example, kind: str) -> Bad:
    """An example that is left out on purpose."""
    return Bad(example.where, " ".join(example.response[:_EXCERPT].split()), kind, by_filter=True)


def _lines(path: str) -> Iterator[str]:
    """The domains and beginnings of URLs in a file; lines that begin with # are comments."""
    text = decode(read_file(path), path)
    if isinstance(text, Bad):
        raise UserError(f"{path} cannot be read: {text.reason}")
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if _DOMAIN.fullmatch(line):
            yield line.lower()
        elif "://" in line:
            yield line
        elif line and not line.startswith("#"):
            why = "must be a domain, which stands for all below it, or how a URL begins, from http:// on"
            raise UserError(f"{path}:{number}: {ascii(line[:60])} {why}")


def _ngrams(path: str) -> np.ndarray:
    found = np.concatenate([np.zeros(0, np.uint64), *(ngram_hashes(text, _TEST_WORDS) for text in _texts(path))])
    if not len(found):
        raise UserError(f"--decontaminate: {path} has no {_TEST_WORDS} words in a row to compare")
    return found


def _texts(path: str) -> Iterator[str]:
    """All texts in the objects of a JSONL file, however deep."""

    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from texts(item)

    for _, item in read_json_lines(epath.Path(path)):
        yield from texts(item)


def _decontaminate(tests: np.ndarray, example: Example) -> Outcome:
    """`tests` are sorted; `np.isin` would sort them again for each text."""
    hashes = np.concatenate([ngram_hashes(text, _TEST_WORDS) for text in example.texts])
    return "" if (tests.take(np.searchsorted(tests, hashes), mode="clip") == hashes).any() else example


def _language(wanted: tuple[str, ...]) -> Callable[[Example], Outcome]:
    with needs("filters"):
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    identify, known = identifier.classify, identifier.nb_classes
    if unknown := sorted({*wanted} - {ALL, *known}):
        raise UserError(f"--languages: {unknown[0]!r} unknown; known: {ALL}, {', '.join(known)}")

    def step(example: Example) -> Outcome:
        language, probability = identify("\n".join(example.texts)[:_LANGUAGE])
        found = language if probability >= _LEAST else "unknown"
        return dataclasses.replace(example, language=found) if ALL in wanted or found in wanted else found

    return step


def _rule(make: str) -> Callable[[Example], Outcome]:
    """A filter of datatrove, for texts without a prompt."""
    with needs("filters"):
        import datatrove.pipeline.filters as rules
        import spacy  # noqa: F401  the filter loads it later
        from datatrove.data import Document
    rule = getattr(rules, make)()

    def step(example: Example) -> Outcome:
        if example.prompt is not None:
            return example
        if len(example.response) > _LONGEST:
            return "long_doc"
        document = Document(example.response, "")
        outcome = rule.filter(document)
        if isinstance(outcome, tuple):
            return outcome[1].replace("gopher_", "")
        return dataclasses.replace(example, response=document.text)

    return step


def _pii() -> Callable[[Example], Outcome]:
    with needs("filters"):
        from datatrove.pipeline.formatters import PIIFormatter
    # One replacement each: if several took turns, a text would depend on those before it.
    return lambda example: example.map(PIIFormatter(email_replacement="email@example.com", ip_replacement=_IP).format)


_IP = "22.214.171.124"  # the first of datatrove's
RULES = {
    "gopher_repetition": functools.partial(_rule, "GopherRepetitionFilter"),  # arXiv 2112.11446, table A1
    "gopher_quality": functools.partial(_rule, "GopherQualityFilter"),  # the same, for English
    "c4": functools.partial(_rule, "C4QualityFilter"),  # JMLR 21:140, for English
    "pii": _pii,  # replaces e-mail and public IP addresses in any text
}

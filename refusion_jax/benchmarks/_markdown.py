"""The Markdown of benchmarks: tables, and prose of limited width."""

import textwrap
from collections.abc import Iterable, Sequence

_WIDTH = 120  # columns of prose


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, with a line for each row."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *rows))


def prose(text: str, indent: str = "") -> str:
    """A paragraph; with an indent, an item of a list. Words are never split, not even at a hyphen."""
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)

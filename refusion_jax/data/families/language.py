"""Structured text: look-ups among keys, repair of brackets and JSON, and gaps between fixed words."""

import json
import random
import re

from refusion_jax.data.tasks import COLORS, FRUITS, NAMES

_PAIRS = {"(": ")", "[": "]", "{": "}"}


def make_lookup(rng: random.Random, level: int) -> str:
    """Keys with numbers, four more for each difficulty, of which two are asked for.

    Keys have a space before and after them in both places, so that they are the same tokens.
    """
    keys = rng.sample([a + b for a in "bcdfgh" for b in "aeiou"], 4 * level)
    pairs = " ".join(f"{key} {rng.randint(10, 99)}" for key in keys)
    return f"look {pairs} : {' '.join(rng.sample(keys, 2))} ="


def solve_lookup(query: str) -> str:
    """The numbers of the keys that are asked for."""
    pairs, asked = (part.split() for part in query[len("look ") : -1].split(" : "))
    numbers = dict(zip(pairs[::2], pairs[1::2], strict=True))
    return " ".join(numbers[key] for key in asked)


def make_brackets(rng: random.Random, level: int) -> str:
    """Balanced brackets of three kinds, with up to two closing brackets of the wrong kind."""
    length, stack, text = 2 * (2 + 2 * level), [], ""
    while len(text) < length:
        if stack and (len(stack) == length - len(text) or rng.random() < 0.4):
            text += _PAIRS[stack.pop()]
        else:
            stack.append(rng.choice("([{"))
            text += stack[-1]
    closing = [at for at, bracket in enumerate(text) if bracket in _PAIRS.values()]
    for at in rng.sample(closing, min(2, len(closing))):
        text = text[:at] + rng.choice(")]}") + text[at + 1 :]
    return f"repair {' '.join(text)} ="


def solve_brackets(query: str) -> str:
    """Corrects every closing bracket to the kind of its opening one."""
    stack, out = [], []
    for bracket in query.split()[1:-1]:
        if bracket in _PAIRS:
            stack.append(bracket)
        out.append(bracket if bracket in _PAIRS else _PAIRS[stack.pop()])
    return " ".join(out)


def make_json(rng: random.Random, level: int) -> str:
    """An object of words and numbers that has lost some of its quotes, colons and commas, and perhaps its end."""
    choices = {"name": NAMES, "likes": FRUITS, "color": COLORS, "friend": NAMES, "buys": FRUITS, "door": COLORS}
    keys = rng.sample(list(choices), min(1 + level, len(choices)))
    record = {key: rng.choice(choices[key]) if rng.random() < 0.7 else rng.randint(10, 99) for key in keys}
    text = json.dumps(record)
    marks = [at for at, mark in enumerate(text) if mark in '":,}']
    lost = set(rng.sample(marks, len(marks) // 2))
    return f"repair {''.join(mark for at, mark in enumerate(text) if at not in lost)} ="


def solve_json(query: str) -> str:
    """Restores the object from its alternating keys and numbers."""
    words = re.findall(r"[a-z]+|\d+", query[len("repair ") :])
    values = [int(word) if word.isdigit() else word for word in words]
    return json.dumps(dict(zip(words[::2], values[1::2], strict=True)))


def make_gaps(rng: random.Random, level: int) -> str:
    """Words that repeat with a period, with gaps; each word of the period is shown at least once."""
    period = rng.randint(2, 2 + level)
    words = rng.sample(COLORS + FRUITS, period)
    text = [words[i % period] for i in range(2 * period + rng.randint(0, period))]
    while True:
        shown = [word if rng.random() < 0.6 else "_" for word in text]
        if "_" in shown and {i % period for i, word in enumerate(shown) if word != "_"} == set(range(period)):
            return f"fill {' '.join(shown)} ="


def solve_gaps(query: str) -> str:
    """The whole text, by the shortest period that agrees with every word and leaves no gap."""
    shown = query.split()[1:-1]
    for period in range(1, len(shown) + 1):
        words = [set(shown[first::period]) - {"_"} for first in range(period)]
        if all(len(word) == 1 for word in words):
            return " ".join(next(iter(words[i % period])) for i in range(len(shown)))
    raise ValueError(f"{query!r}: no period leaves no gap")


FAMILIES = {
    "lookup": (make_lookup, solve_lookup),
    "brackets": (make_brackets, solve_brackets),
    "json": (make_json, solve_json),
    "gaps": (make_gaps, solve_gaps),
}

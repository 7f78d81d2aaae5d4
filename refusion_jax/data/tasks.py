"""The problems of the quickstart, with worked answers, on which a small model can be pretrained in minutes."""

import json
import random

from refusion_jax.data.problems import Mixture, ProblemFamily

NAMES = "ann bob cat dan eve fay gus hal ivy jay kim leo mia ned oda pam ray sue tom uma".split()
FRUITS = "apple plum kiwi fig pear lime melon grape mango peach cherry lemon".split()
COLORS = "red blue green pink gray gold teal navy white cyan".split()


def _make_add(rng: random.Random) -> str:
    return f"Add {rng.randint(10, 99)} and {rng.randint(10, 99)}."


def _solve_add(query: str) -> str:
    """Column by column from the right: digit + digit + carry = column sum; then the whole."""
    a, b = (int(word) for word in query[len("Add ") : -1].split(" and "))
    steps, carry = [], 0
    for place in (1, 10):
        x, y = a // place % 10, b // place % 10
        steps.append(f"{x}+{y}+{carry}={x + y + carry:02d}")
        carry = (x + y + carry) // 10
    return f"{'; '.join(steps)}; {a + b}"


def _make_sort(rng: random.Random) -> str:
    return f"Sort {' '.join(str(rng.randint(0, 9)) for _ in range(rng.randint(3, 6)))}."


def _solve_sort(query: str) -> str:
    return " ".join(sorted(query[len("Sort ") : -1].split()))


def _make_reverse(rng: random.Random) -> str:
    return f"Reverse {' '.join(rng.choices(COLORS, k=rng.randint(3, 6)))}."


def _solve_reverse(query: str) -> str:
    return " ".join(reversed(query[len("Reverse ") : -1].split()))


def _make_replace(rng: random.Random) -> str:
    words = rng.choices(FRUITS, k=rng.randint(3, 6))
    old = rng.choice(words)
    new = rng.choice([fruit for fruit in FRUITS if fruit != old])
    return f"Replace {old} by {new}: {' '.join(words)}."


def _solve_replace(query: str) -> str:
    change, words = query[:-1].split(": ")
    _, old, _, new = change.split()
    return " ".join(new if word == old else word for word in words.split())


def _make_table(rng: random.Random) -> str:
    rows = [f"{rng.choice(NAMES)} {rng.choice(FRUITS)} {rng.choice(COLORS)}" for _ in range(3)]
    return f"Table {', '.join(rows)}. {rng.choice(('Row', 'Column'))} {rng.randint(1, 3)}."


def _solve_table(query: str) -> str:
    table, asked = query[len("Table ") : -1].split(". ")
    rows = [row.split() for row in table.split(", ")]
    kind, number = asked.split()
    return " ".join(rows[int(number) - 1] if kind == "Row" else [row[int(number) - 1] for row in rows])


def _make_quote(rng: random.Random) -> str:
    return f"Quote {' '.join(rng.choices(NAMES + FRUITS, k=rng.randint(3, 5)))}."


def _solve_quote(query: str) -> str:
    return ", ".join(f'"{word}"' for word in query[len("Quote ") : -1].split())


def _make_json(rng: random.Random) -> str:
    record = {
        "name": rng.choice(NAMES),
        "age": rng.randint(10, 99),
        "likes": rng.choice(FRUITS),
        "color": rng.choice(COLORS),
        "room": rng.randint(100, 999),
    }
    keys = rng.sample(list(record), 3)
    first, second = rng.sample(keys, 2)
    return f"From {json.dumps({key: record[key] for key in keys})} take {first}, {second}."


def _solve_json(query: str) -> str:
    record, keys = query[len("From ") : -1].split(" take ")
    values = json.loads(record)
    return json.dumps({key: values[key] for key in keys.split(", ")})


MIXTURE = Mixture(
    {
        "add": ProblemFamily(_make_add, _solve_add, 3),
        "sort": ProblemFamily(_make_sort, _solve_sort),
        "reverse": ProblemFamily(_make_reverse, _solve_reverse),
        "replace": ProblemFamily(_make_replace, _solve_replace),
        "quote": ProblemFamily(_make_quote, _solve_quote),
        "table": ProblemFamily(_make_table, _solve_table),
        "json": ProblemFamily(_make_json, _solve_json),
    }
)

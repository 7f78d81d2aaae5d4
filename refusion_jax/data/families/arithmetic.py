"""Numbers: sums and products, each without and with its steps, operations on lists, and short programs."""

import functools
import random
import re

_FACTORS = ((2, 1), (3, 1), (2, 2), (3, 2), (3, 3))  # digits of the two factors, by difficulty
_STEPS = " by steps"


def _number(rng: random.Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1), 10**digits)


def make_sum(rng: random.Random, level: int, how: str = "") -> str:
    """Two numbers of difficulty + 1 digits; by steps they are to be added column by column."""
    return f"{_number(rng, level + 1)}+{_number(rng, level + 1)}{how}="


def solve_sum(query: str) -> str:
    """The sum; by steps each column from the right with its carry, as 7+5+0=12, and then the sum."""
    a, b = (int(digits) for digits in re.findall(r"\d+", query))
    if _STEPS not in query:
        return str(a + b)
    steps, carry, place = [], 0, 1
    while place <= max(a, b):
        x, y = a // place % 10, b // place % 10
        steps.append(f"{x}+{y}+{carry}={x + y + carry}")
        carry, place = (x + y + carry) // 10, place * 10
    return " ".join([*steps, str(a + b)])


def make_product(rng: random.Random, level: int, how: str = "") -> str:
    """Two numbers, of two digits and of one at difficulty 1; by steps they are to be multiplied digit by digit."""
    first, second = _FACTORS[level - 1]
    return f"{_number(rng, first)}*{_number(rng, second)}{how}="


def solve_product(query: str) -> str:
    """The product; by steps, first those of one number and each digit of the other, from the right."""
    a, b = (int(digits) for digits in re.findall(r"\d+", query))
    if _STEPS not in query:
        return str(a * b)
    digits = str(b)[::-1] if b > 9 else str(a)[::-1]
    other = a if b > 9 else b
    steps = [f"{other}*{digit}={other * int(digit)}" for digit in digits]
    return " ".join([*steps, str(a * b)])


def asked(query: str) -> str:
    """The numbers of a sum or product in ascending order: the same with or without steps, and in either order."""
    numbers = sorted(re.findall(r"\d+", query), key=int)
    return ("+" if "+" in query else "*").join(numbers)


_OPERATIONS = {
    "sort": sorted,
    "reverse": lambda items: items[::-1],
    "rotate": lambda items: items[1:] + items[:1],
    "swap": lambda items: items[-1:] + items[1:-1] + items[:1],
    "twice": lambda items: [item for item in items for _ in (0, 1)],
    "evens": lambda items: [item for item in items if item % 2 == 0],
}


def make_list(rng: random.Random, level: int) -> str:
    """A list of digits, and `level` operations, at most one of which doubles the list."""
    items = [rng.randrange(10) for _ in range(rng.randint(4, 4 + level))]
    operations = rng.sample(list(_OPERATIONS), min(level, len(_OPERATIONS)))
    return f"{' '.join(map(str, items))}: {', '.join(operations)}="


def solve_list(query: str) -> str:
    """The list after all operations, or `none` if it is empty."""
    digits, operations = query[:-1].split(": ")
    items = [int(digit) for digit in digits.split()]
    for operation in operations.split(", "):
        items = _OPERATIONS[operation](items)
    return " ".join(map(str, items)) or "none"


def make_program(rng: random.Random, level: int) -> str:
    """Assignments to three variables, each of a variable and a digit, and a print of two of them."""
    lines = [f"{name}={rng.randrange(10)}" for name in "xyz"]
    for _ in range(level):
        target, source, sign = rng.choice("xyz"), rng.choice("xyz"), rng.choice("+-*")
        lines.append(f"{target}={source}{sign}{rng.choice(['x', 'y', 'z', str(rng.randrange(2, 10))])}")
    return f"{'; '.join(lines)}; print({','.join(rng.sample('xyz', 2))})="


def solve_program(query: str) -> str:
    """What Python prints, worked out line by line."""
    *lines, last = query[:-1].split("; ")
    values: dict[str, int] = {}

    def value(word: str) -> int:
        return values[word] if word in values else int(word)

    for line in lines:
        target, expression = line.split("=")
        if len(expression) == 1:
            values[target] = int(expression)
            continue
        left, sign, right = value(expression[0]), expression[1], value(expression[2])
        values[target] = {"+": left + right, "-": left - right, "*": left * right}[sign]
    return " ".join(str(values[name]) for name in last[len("print(") : -1].split(","))


FAMILIES = {
    "sum": (make_sum, solve_sum, asked),
    "sum_by_steps": (functools.partial(make_sum, how=_STEPS), solve_sum, asked),
    "product": (make_product, solve_product, asked),
    "product_by_steps": (functools.partial(make_product, how=_STEPS), solve_product, asked),
    "list": (make_list, solve_list),
    "program": (make_program, solve_program),
}

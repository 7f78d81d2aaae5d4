"""Problems in which the order of writing matters: mazes, solved from their ends, and Latin squares."""

import itertools
import random
import string

_SIDE = 4


def make_maze(rng: random.Random, level: int) -> str:
    """Several paths of equal length from one start, in shuffled pieces; the path to one of the ends is asked for."""
    count, length = (2, 1 + level) if level < 4 else (3, level)
    places = rng.sample(string.ascii_lowercase, 1 + count * length)
    start, rest = places[0], places[1:]
    routes = [[start, *rest[i * length : (i + 1) * length]] for i in range(count)]
    pieces = [f"{a} {b}" for route in routes for a, b in itertools.pairwise(route)]
    rng.shuffle(pieces)
    return f"maze {' , '.join(pieces)} : {start} to {routes[0][-1]} ="


def solve_maze(query: str) -> str:
    """The places on the path, found by following it back from its end."""
    pieces, ends = query[len("maze ") : -len(" =")].split(" : ")
    before = {b: a for a, b in (piece.split() for piece in pieces.split(" , "))}
    start, place = ends.split(" to ")
    path = [place]
    while path[-1] != start:
        path.append(before[path[-1]])
    return " ".join(reversed(path))


def _squares() -> list[str]:
    """All Latin squares of side 4, row by row: 576."""
    rows = list(itertools.permutations("1234"))
    found = []
    for square in itertools.product(rows, repeat=_SIDE - 1):
        if all(len(set(column)) == _SIDE - 1 for column in zip(*square, strict=True)):
            last = ["".join(set("1234") - set(column)) for column in zip(*square, strict=True)]
            found.append("".join(itertools.chain(*square, last)))
    return found


_SQUARES = _squares()


# For each place and digit the squares that have it there, as bits of one number: intersections take microseconds.
_HAVE = {
    (at, digit): sum(1 << number for number, square in enumerate(_SQUARES) if square[at] == digit)
    for at in range(_SIDE**2)
    for digit in "1234"
}


def _fitting(cells: str) -> int:
    """The squares that agree with all given cells, as bits."""
    fitting = (1 << len(_SQUARES)) - 1
    for at, cell in enumerate(cells):
        fitting &= _HAVE.get((at, cell), fitting)
    return fitting


def make_latin(rng: random.Random, level: int) -> str:
    """A square with gaps that has exactly one solution."""
    square = rng.choice(_SQUARES)
    while True:
        lost = rng.sample(range(_SIDE**2), min(2 + 2 * level, 10))
        cells = "".join("_" if at in lost else cell for at, cell in enumerate(square))
        if _fitting(cells).bit_count() == 1:
            return f"latin {' '.join(cells[row : row + _SIDE] for row in range(0, _SIDE**2, _SIDE))} ="


def solve_latin(query: str) -> str:
    """The only square that agrees with the given cells."""
    square = _SQUARES[_fitting("".join(query.split()[1:-1])).bit_length() - 1]
    return " ".join(square[row : row + _SIDE] for row in range(0, _SIDE**2, _SIDE))


FAMILIES = {"maze": (make_maze, solve_maze), "latin": (make_latin, solve_latin)}

"""Generated problems with verifiable answers, in families, mixed and split into train and test.

Every family generates queries from a seed and solves them by a function of the query alone, so that the only right
answer of any query can be recomputed and checked exactly. Train and test are disjoint by construction: a hash of what a
query asks, however it is worded, decides which split it belongs to.
"""

import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping


@dataclasses.dataclass(frozen=True)
class Problem:
    """A query and its one right answer: any other text is wrong."""

    family: str
    query: str
    response: str


@dataclasses.dataclass(frozen=True)
class ProblemFamily:
    """A kind of problem."""

    make: Callable[[random.Random], str]  # draws a query
    solve: Callable[[str], str]  # returns its one right answer
    share: int = 1  # of the training mixture; the harder ones are practised more often
    asks: Callable[[str], str] = lambda query: query  # equal for queries that ask the same, even of other families


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Families by name."""

    families: Mapping[str, ProblemFamily]

    def problems(self, split: str, count: int, seed: int) -> Iterator[Problem]:
        """Problems of "train", families by their shares, or "test", in equal parts; the same for the same seed."""
        rng = random.Random(f"{split} {seed}")
        names = list(self.families)
        shares = [family.share if split == "train" else 1 for family in self.families.values()]
        while count:
            name = rng.choices(names, shares)[0]
            family = self.families[name]
            query = family.make(rng)
            if split_of(family.asks(query)) == split:
                count -= 1
                yield Problem(name, query, family.solve(query))


def split_of(question: str) -> str:
    """The split of a question, by its hash; one in ten belongs to the test."""
    return "test" if hashlib.blake2b(question.encode(), digest_size=1).digest()[0] < 26 else "train"

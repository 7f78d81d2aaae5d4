"""Problems that tell systems apart: twelve families with adjustable difficulty.

`mixture(difficulty)` has sums and products without and with their steps, operations on lists, look-ups among many keys,
repair of brackets and of JSON, paths through a maze and Latin squares (whose known parts are anywhere),
short programs with their output, and gaps between fixed text. At difficulty 1 a model of a million parameters learns
most of them; every further level makes numbers, lists, mazes and programs longer.
"""

import functools

from refusion_jax.data.families import arithmetic, language, puzzles
from refusion_jax.data.problems import Mixture, ProblemFamily

MOST = 5  # highest difficulty


def mixture(difficulty: int) -> Mixture:
    """All families at one difficulty, 1 to MOST."""
    own = arithmetic.FAMILIES | language.FAMILIES | puzzles.FAMILIES
    return Mixture(
        {
            name: ProblemFamily(functools.partial(make, level=difficulty), solve, 1, *asks)
            for name, (make, solve, *asks) in own.items()
        }
    )

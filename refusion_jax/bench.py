"""The measurements of BENCHMARKS.md, each a command of its own.

  python -m refusion_jax.bench decode --help
  python -m refusion_jax.bench decode --batch_sizes=1,8,32

Prints one JSON object per line, then a table; what is compared is measured side by side in one run.
"""

import pkgutil

from refusion_jax import benchmarks
from refusion_jax.cli import command

NAMES = sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__))

if __name__ == "__main__":
    command.guard(lambda: command.run_part("bench", __doc__, {name: f"{benchmarks.__name__}.{name}" for name in NAMES}))

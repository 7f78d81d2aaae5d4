"""The measurements of BENCHMARKS.md, each a command of its own.

  python -m refusion_jax.bench decode --help
  python -m refusion_jax.bench decode --batch_sizes=1,8,32

Prints one JSON object a line, then a table; what is compared is measured side by side in one run.
"""

import importlib
import pkgutil
import sys

from absl import flags

from refusion_jax.benchmarks import __path__ as place
from refusion_jax.cli import command, flag_values
from refusion_jax.cli.errors import UserError

NAMES = sorted(module.name for module in pkgutil.iter_modules(place) if not module.name.startswith("_"))


def main(argv: list[str]) -> None:
    """Runs the measurement that the first argument names; the others are its flags.

    Raises:
      UserError: where none is named, or there is none of that name.
    """
    if not argv:
        raise UserError(f"bench: name a benchmark, one of {', '.join(NAMES)}; --help explains")
    name, *rest = argv
    if name in command.HELP_FLAGS:
        print(f"{__doc__.strip()}\n\nbench NAME --help explains the flags of each: {', '.join(NAMES)}.")
        return
    if name not in NAMES:
        raise UserError(f"bench {name!r}: unknown; known: {', '.join(NAMES)}")
    benchmark = importlib.import_module(f"refusion_jax.benchmarks.{name}")
    own = flags.FlagValues()
    benchmark.define_flags(own)
    if command.HELP_FLAGS & set(rest):
        print(command.help_page(benchmark.__doc__, [own[flag] for flag in own]))
        return
    if unexpected := own([f"bench {name}", *rest])[1:]:
        raise UserError(f"unexpected argument {unexpected[0]!r}: every setting is a --flag")
    flag_values.check_values(own)
    benchmark.main(own)


def run() -> None:
    """Runs the measurement that the command line names."""
    main(command.expand_flagfiles(sys.argv[1:]))


if __name__ == "__main__":
    command.guard(run)

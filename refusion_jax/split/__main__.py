"""Decodes with one model over two machines: `device` holds its first layers, `server` the rest.

  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj /CN=split \
      -keyout split.pem -out split.pem                         # the key, for both machines
  python -m refusion_jax.split server --checkpoint=runs/quickstart --key=split.pem --host=0.0.0.0 --port=9000
  python -m refusion_jax.split device --checkpoint=runs/quickstart --key=split.pem --server=HOST:9000 --layers=1 \
      --prompt='Sort 7 3 9 1.'

See refusion_jax/split/README.md.
"""

import importlib
import sys

from absl import flags

from refusion_jax.cli import command, flag_values
from refusion_jax.cli.errors import UserError

SIDES = ("device", "server")


def main(argv: list[str]) -> None:
    """Runs the side that the first argument names; the others are its flags.

    Raises:
      UserError: where there is none.
    """
    side, *rest = argv or ("",)
    if side in command.HELP_FLAGS:
        print(f"{__doc__.strip()}\n\nsplit device --help and split server --help explain the flags of each.")
        return
    if side not in SIDES:
        raise UserError(f"split {side!r}: must be split device or split server; --help explains")
    module, own = importlib.import_module(f"refusion_jax.split.{side}"), flags.FlagValues()
    module.define_flags(own)
    if command.HELP_FLAGS & set(rest):
        print(command.help_page(module.__doc__, [own[flag] for flag in own]))
        return
    if unexpected := own([f"split {side}", *rest])[1:]:
        raise UserError(f"unexpected argument {unexpected[0]!r}: every setting is a --flag")
    flag_values.check_values(own)
    module.main(own)


if __name__ == "__main__":
    command.guard(lambda: main(command.expand_flagfiles(sys.argv[1:])))

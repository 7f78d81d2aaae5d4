"""`refusion NAME ...` runs a command, as `python -m refusion_jax.NAME ...` does."""

import importlib.util
import pkgutil
import runpy
import sys
from pathlib import Path

import refusion_jax
from refusion_jax.cli import command
from refusion_jax.cli.errors import UserError

_COMMANDS = sorted(
    module.name
    for module in pkgutil.iter_modules(refusion_jax.__path__)
    if not module.ispkg or Path(refusion_jax.__file__).with_name(module.name).joinpath("__main__.py").exists()
)


def main() -> None:
    """Runs the command that the first argument names; the other arguments are its flags."""
    if sys.argv[1:2] and sys.argv[1] in _COMMANDS:  # it has a guard of its own
        runpy.run_module(f"refusion_jax.{sys.argv.pop(1)}", run_name="__main__", alter_sys=True)
    else:
        command.guard(_show)


def _show() -> None:
    """Lists the commands, or prints the version; UserError for what is neither asked for nor a command."""
    if sys.argv[1:2] in ([], ["--help"], ["-h"]):
        print(f"refusion {refusion_jax.__version__}; refusion NAME --help explains each of:\n")
        for name in _COMMANDS:
            with open(importlib.util.find_spec(f"refusion_jax.{name}").origin, encoding="utf-8") as file:
                story = file.readline().strip().strip('"')
            print(f"  {name:16} {story}")
        return
    if sys.argv[1] != "--version":
        raise UserError(f"refusion {sys.argv[1]!r}: unknown; known: {', '.join(_COMMANDS)}")
    print(refusion_jax.__version__)

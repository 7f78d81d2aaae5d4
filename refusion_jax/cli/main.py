"""`refusion NAME ...` runs a command, as `python -m refusion_jax.NAME ...` does."""

import gc
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
    command.guard(_run)


def _run() -> None:
    if sys.argv[1:2] in ([], ["--help"], ["-h"]):
        print(f"refusion {refusion_jax.__version__}; refusion NAME --help explains each of:\n")
        for name in _COMMANDS:
            with open(importlib.util.find_spec(f"refusion_jax.{name}").origin, encoding="utf-8") as file:
                story = file.readline().strip().strip('"')
            print(f"  {name:16} {story}")
        return
    name = sys.argv.pop(1)
    if name == "--version":
        print(refusion_jax.__version__)
        return
    if name not in _COMMANDS:
        raise UserError(f"refusion {name!r}: unknown; known: {', '.join(_COMMANDS)}")
    gc.disable()  # during its import, as with `python -m`
    runpy.run_module(f"refusion_jax.{name}", run_name="__main__", alter_sys=True)

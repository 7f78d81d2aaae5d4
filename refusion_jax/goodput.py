"""Prints where the time of a run went, over all its restarts; works while it runs.

python -m refusion_jax.goodput --workdir=runs/mine
"""

import json

from absl import flags

from refusion_jax.cli import command
from refusion_jax.cli.errors import UserError
from refusion_jax.training import events

_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object: seconds by part, total, goodput (0 to 1), sessions")


def main() -> None:
    if _WORKDIR.value is None:
        raise UserError("--workdir=DIR is needed; --help explains")
    if not (found := events.read_events(_WORKDIR.value)):
        raise UserError(f"--workdir={_WORKDIR.value} holds no {events.FILE} of a training run")
    spent = events.account(found)
    print(json.dumps(spent) if _JSON.value else events.describe(spent))


if __name__ == "__main__":
    command.run(main)

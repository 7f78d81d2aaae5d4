"""Writes a page that shows runs side by side, also while they train: losses, answers to tasks, speed, goodput, configs.

  python -m refusion_jax.report --workdir=runs/mine --output=report
  python -m refusion_jax.report --workdir=runs/mine,runs/other --output=report

DIR (the --output) will hold index.html, which is self-contained, each chart as a PNG, and answers.html, which plays how
the runs decoded answers to tasks. Needs pip install -e '.[plots]'.
"""

import re

from absl import flags
from etils import epath

from refusion_jax.cli import command
from refusion_jax.cli.errors import UserError, needs
from refusion_jax.cli.flag_values import check_file, check_output
from refusion_jax.cli.progress import track
from refusion_jax.decoding import player
from refusion_jax.distributed.storage import write_file
from refusion_jax.training.run_report import BEGINNING, MOST, draw, page, played, read_run, sections

_WORKDIR = flags.DEFINE_list("workdir", None, f"Directories of runs, comma-separated, at most {MOST}")
_OUTPUT = flags.DEFINE_string("output", None, "Directory for the page and its charts: created or overwritten")


def main() -> None:
    if not _WORKDIR.value or not _OUTPUT.value:
        raise UserError("--workdir=DIR,DIR and --output=DIR are needed; --help explains")
    if len(_WORKDIR.value) > MOST:
        raise UserError(f"--workdir: a page shows {MOST} runs at most, not {len(_WORKDIR.value)}")
    output = epath.Path(_OUTPUT.value)
    check_output("output", output, directory=True)
    target = output / "index.html"
    check_file("output", target, BEGINNING)
    check_file("output", output / "answers.html", player.BEGINNING)
    with needs("plots"):
        import matplotlib  # noqa: F401  to fail before anything is read
    runs = [read_run(number, workdir) for number, workdir in enumerate(_WORKDIR.value, 1)]
    shown = sections(runs)
    charts = [chart for *_, own in shown for chart in own]
    for number, chart in enumerate(track(charts, "drawing"), 1):
        draw(chart)
        write_file(output / f"{number:03}-{re.sub(r'[^a-zA-Z0-9.-]+', '_', chart.title)[:80]}.png", chart.png)
    if scenes := played(runs):
        write_file(output / "answers.html", player.page(scenes).encode(errors="replace"))
    write_file(target, page(runs, shown).encode(errors="replace"))
    print(f"{target} shows {len(runs)} run{'s' * (len(runs) > 1)} in {len(charts)} charts")


if __name__ == "__main__":
    command.run(main)

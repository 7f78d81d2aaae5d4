"""Progress bars with rate and remaining time, on stderr, only in a terminal."""

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import rich.progress as bars
from rich.console import Console
from rich.text import Text

_WHAT = bars.TextColumn("{task.description}")


class _Rate(bars.ProgressColumn):
    """Items per second, or seconds per item."""

    def render(self, task: bars.Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if not speed else f"{speed:,.1f}/s" if speed >= 1 else f"{1 / speed:,.1f} s each")


def progress(*columns: bars.ProgressColumn, ticks: bool = True, stderr: bool = True) -> bars.Progress:
    """A bar to be started and advanced, by default with rate and remaining time; nothing if stderr is not a terminal.

    Output to stdout meanwhile is printed above the bar, and is unchanged if stdout is a file or a pipe. With `ticks` it
    is redrawn ten times per second, which would disturb measurements; otherwise only when it advances. Without `stderr`
    it is on stdout.
    """
    columns = columns or (_WHAT, bars.BarColumn(), bars.MofNCompleteColumn(), _Rate(), bars.TimeRemainingColumn())
    is_shown = (sys.stderr if stderr else sys.stdout).isatty()
    how = {"disable": not is_shown, "redirect_stdout": sys.stdout.isatty(), "auto_refresh": ticks}
    # By default only what advanced in the last 30 s counts: slower bars would never have a rate.
    return bars.Progress(*columns, console=Console(stderr=stderr), speed_estimate_period=math.inf, **how)


def track(items: Iterable[Any], what: str, total: int | None = None, ticks: bool = True) -> Iterator[Any]:
    """Iterates over items with a bar. See `progress` for `ticks`."""
    with progress(ticks=ticks) as bar:
        yield from bar.track(items, total, description=what)


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Shows the elapsed time of a block of unknown duration."""
    with progress(_WHAT, bars.BarColumn(), bars.TimeElapsedColumn()) as bar:
        bar.add_task(what, total=None)
        yield

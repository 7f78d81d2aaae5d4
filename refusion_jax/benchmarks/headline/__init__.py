"""Trains and compares all systems on the same rows, tokens, transformer and optimizer: accuracy against speed.

  python -m refusion_jax.bench headline --budget=tiny --output=runs/headline
  python -m refusion_jax.bench headline --budget=small --output=runs/small --systems=refusion,ar,llada
  python -m refusion_jax.bench headline --budget=small --output=runs/small --seeds=1 --notune

Trains each system (configs/headline.py:BUDGET; `small` uses three seeds, after short runs that choose a learning rate
with worse ones on both sides), and drafters or verifiers for the decoders that need one (`Settings.auxiliary_models`);
decodes held-out problems of twelve families at every operating point of every decoder (`Settings.operating_points`),
one prompt and sixteen prompts at a time; scores the chosen settings on other problems; and writes to DIR:

  results.json   the figures, with machine, versions, commit and the command of every run; and estimates of the same
                 decoding with 8B parameters on TPUs
  report.md      table, conclusions, and which of the papers' claims hold
  answers/       the answers to the problems that score the chosen settings, as JSONL
  decodings.html plays the first of these answers, all systems side by side
  plots/*.svg    accuracy against tokens per forward and tokens per second, loss and bits per byte against tokens, the
                 estimates against the batch size; they need pip install -e '.[plots]'

Started again with the same flags, it resumes; with more seeds or systems, it adds theirs. --systems=NAME:1 trains a
single seed of NAME, --systems=NAME:1:RATE at a known learning rate, such as from an earlier comparison. `tiny` is a
smoke test of half an hour on two CPU cores, too small for conclusions; `small` takes hours there; `gpu` trains 54 M
parameters on a GPU. --adapt_from=NAME also trains every other system for the second half of the steps, from NAME's
weights after the first, as released models are adapted. --speed_proxy=640x12, the default of `small`, also checks the
papers' claims about speed at the cost of 59 M parameters, which do not fit in a CPU's cache.
"""

import contextlib
import dataclasses
import json
import math
from pathlib import Path

import ml_collections
from absl import flags
from ml_collections import config_flags

from refusion_jax.benchmarks.headline import plots, report
from refusion_jax.benchmarks.headline.comparison import Comparison
from refusion_jax.benchmarks.headline.experiment import BUDGETS, Experiment
from refusion_jax.benchmarks.headline.results import open_store
from refusion_jax.benchmarks.headline.speed_proxy import read_shape
from refusion_jax.cli import command, flag_values
from refusion_jax.cli.errors import UserError
from refusion_jax.config import check
from refusion_jax.config.keys import keys
from refusion_jax.distributed.storage import write_file
from refusion_jax.systems.registry import decoders_for, find_system, trainable

_PROBLEMS = "families"  # the source of problems that this benchmark needs
_FORMAT = 5  # of the stored records, incremented if they or the problems change
_MOST_SEEDS = 100


def define_flags(own: flags.FlagValues) -> None:
    """The flags of this benchmark."""
    flags.DEFINE_enum("budget", "tiny", [*BUDGETS], "Size of the experiment", flag_values=own)
    flags.DEFINE_string("output", None, "Directory of the comparison: created or continued", flag_values=own)
    seeds = {"lower_bound": 1, "upper_bound": _MOST_SEEDS, "flag_values": own}
    flags.DEFINE_integer("seeds", None, "Runs of each system, instead of the budget's number", **seeds)
    flags.DEFINE_bool("tune", True, "Try the budget's learning rates; --notune takes the config's", flag_values=own)
    which = "Which systems, comma-separated; all by default. NAME:N trains N seeds of NAME instead of --seeds, "
    which += "NAME:N:RATE at this learning rate, without trying any"
    flags.DEFINE_list("systems", [], which, flag_values=own)
    adapted = "Also adapt the other systems from this one, halfway through its training, for the other half"
    flags.DEFINE_string("adapt_from", "", adapted, flag_values=own)
    flags.DEFINE_string("config", None, "Config of every run, instead of configs/headline.py:BUDGET", flag_values=own)
    proxy = "Also check claims about speed at the cost of WIDTHxLAYERS weights; by default the budget's, if any"
    flags.DEFINE_string("speed_proxy", None, proxy, flag_values=own)


def main(own: flags.FlagValues) -> None:
    """Runs missing parts of the comparison, and writes results, report and plots."""
    asked, directory = _experiment(own), Path(own.output)
    call = {"budget": asked.budget.of_each_run() | {"name": asked.name}, "config": asked.file}
    call |= {"keys": asked.config.to_dict(), "format": _FORMAT}
    with contextlib.closing(open_store(directory, json.loads(json.dumps(call)))) as store:
        results = Comparison(directory, asked, store).run()
    drawn = plots.draw(results, directory / "plots")
    text = report.report(results, [f"{path.relative_to(directory)}" for path in drawn])
    write_file(directory / "report.md", text)
    print(text)
    if not drawn:
        print("no plots: they need matplotlib (pip install -e '.[plots]', then the same command again)")


def _experiment(own: flags.FlagValues) -> Experiment:
    if not own.output:
        raise UserError("--output=: name a directory for the comparison")
    given = {"seeds": own.seeds, "speed_proxy": own.speed_proxy, "rates": None if own.tune else ()}
    given = {name: value for name, value in given.items() if value is not None}
    budget = dataclasses.replace(BUDGETS[own.budget], **given)
    if budget.speed_proxy:
        read_shape(budget.speed_proxy)
    file = own.config or f"configs/headline.py:{own.budget}"
    config = _read_config(file)
    systems, rates = _read_systems(own.systems, budget.seeds)  # now that the config file may have registered some
    if config.data.path != _PROBLEMS:
        raise UserError(f"--config={file}: data.path={config.data.path} has no answers to check; {_PROBLEMS} has")
    flag_values.check_output("output", Path(own.output), directory=True)
    as_written = command.as_written("bench headline", own)
    asked = Experiment(own.budget, budget, config, file, systems, own.adapt_from, as_written, rates)
    asked.check()
    return asked


def _read_systems(entries: list[str], seeds: int) -> tuple[dict[str, int], dict[str, float]]:
    """(number of seeds of each system, by default `seeds`; learning rates of the systems that have one).

    Without entries: all systems that decode and do not only fine-tune.
    """
    able = [name for name in trainable() if decoders_for(name) or not find_system(name).decoders]
    every, found, rates = [name for name in able if find_system(name).decoders], {}, {}
    for entry in entries or every:
        name, *numbers = entry.split(":")
        if name not in able:
            raise UserError(f"--systems={entry}: unknown; known: {', '.join(able)}")
        if numbers and numbers[0] not in map(str, range(1, _MOST_SEEDS + 1)):
            raise UserError(f"--systems={entry}: after the colon, give a number of seeds from 1 to {_MOST_SEEDS}")
        found[name] = int(numbers[0]) if numbers else seeds
        for rate in numbers[1:]:
            with contextlib.suppress(ValueError):
                rates[name] = float(rate)
            if not 0 < rates.get(name, 0) < math.inf or len(numbers) > 2:
                raise UserError(f"--systems={entry}: after the seeds, give one learning rate above 0")
    return found, rates


def _read_config(file: str) -> ml_collections.ConfigDict:
    """The config in FILE or FILE:VARIANT."""
    holder = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, flag_values=holder)
    command.parse_flags(holder, ["bench headline", command.find_config(f"--config={file}")], keys)
    check(holder.config)
    return holder.config

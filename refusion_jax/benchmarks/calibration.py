"""Compares the estimates of `plan` with step times of training runs that others have published.

  python -m refusion_jax.bench calibration
  python -m refusion_jax.bench calibration --compile --output=published_runs.json

For each run it prints the published step time (corrected for arithmetic that only one of the two programs does), our
estimate for the same shape and chips before calibration, their ratio, and the error of predicting the run from the
others of its generation. Then come factor and spread of each generation, which do not carry over to another;
refusion_jax/distributed/chips.py holds them for `plan`. The counts of our programs are stored with the runs and their
sources (planning/published_runs.json); --compile makes them again with the installed TPU compiler, which takes some
minutes.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from absl import flags
from rich.console import Console
from rich.table import Table

from refusion_jax.cli import flag_values
from refusion_jax.cli.errors import UserError
from refusion_jax.config import default_config
from refusion_jax.distributed.chips import Calibration, find_chip
from refusion_jax.distributed.json_files import parse_json
from refusion_jax.distributed.storage import write_file
from refusion_jax.planning.compiler import compile_program, libtpu_version, prepare_environment, tpu_devices
from refusion_jax.planning.costs import Costs, Operation, count
from refusion_jax.planning.estimate import estimate
from refusion_jax.planning.programs import lower_train

FILE = "published_runs.json"


def define_flags(own: flags.FlagValues) -> None:
    """The flags of this benchmark."""
    flags.DEFINE_bool("compile", False, "Compile the programs again: pip install -e '.[plan]'", flag_values=own)
    flags.DEFINE_string("output", "", "File to write the runs with their counts to", flag_values=own)


def main(own: flags.FlagValues) -> None:
    """Prints one JSON object per run and per generation, then a table."""
    if own.output:
        flag_values.check_output("output", Path(own.output))
    runs = read_runs()
    if own.compile:
        prepare_environment()
        libtpu_version()
        runs = [compiled_again(run) for run in runs]
    if own.output:
        write_file(own.output, write_runs(runs))
    errors = left_out_errors(runs)
    table = Table("run", "step", "expected", "ratio", "left out", title="Published training steps and our estimates")
    for run in runs:
        ratio, error = run.seconds / run.expected, errors.get(run.name)
        record = {"run": run.name, "topology": run.topology, "published_seconds": run.published_seconds}
        record |= {"comparable_seconds": run.seconds, "expected_seconds": run.expected, "ratio": ratio}
        print(json.dumps(record | {"left_out_error": error, "source": run.source}))
        told = "not calibrated" if error is None else f"{error:+.1%}"
        table.add_row(run.name, f"{run.seconds:.2f} s", f"{run.expected:.2f} s", f"{ratio:.3f}", told)
    for generation, found in calibrate(runs).items():
        print(json.dumps({"generation": generation, **dataclasses.asdict(found)}))
        table.add_row(f"all of {generation}", "", "", f"{found.factor:.3f}", f"95 % within {found.spread:.1%}")
    sizes = [abs(error) for error in errors.values()]
    print(json.dumps({"left_out_mean": statistics.mean(sizes), "left_out_worst": max(sizes), "runs": len(sizes)}))
    Console().print(table)


@dataclasses.dataclass(frozen=True)
class PublishedRun:
    """One published run, and our program of the same shape."""

    name: str
    topology: str
    rows_per_chip: float
    config: dict  # keys of a config that differ from its defaults
    published_seconds: float  # of one step
    extra_seconds: float  # for arithmetic that only our program does, minus those for arithmetic that only theirs did
    source: str
    costs: Costs  # of our program, aggregated by `summed`

    @property
    def generation(self) -> str:
        return self.topology.split(":")[0]

    @property
    def seconds(self) -> float:
        """The step time that our program would have had."""
        return self.published_seconds + self.extra_seconds

    @property
    def expected(self) -> float:
        """Our estimate in seconds, before the calibration factor."""
        return estimate(self.costs, find_chip(self.topology)).expected


def read_runs() -> list[PublishedRun]:
    """The published runs that ship with the package."""
    stored = resources.files("refusion_jax.planning").joinpath(FILE).read_bytes()
    return parse_json(stored, list[PublishedRun], FILE)


def write_runs(runs: Sequence[PublishedRun]) -> str:
    """The text of a file that `read_runs` reads."""
    return "[\n" + ",\n".join(json.dumps(dataclasses.asdict(run)) for run in runs) + "\n]\n"


def compiled_again(run: PublishedRun) -> PublishedRun:
    """The run with our program compiled and counted again; UserError if it does not fit."""
    config = default_config()
    config.update_from_flattened_dict(run.config)
    chip, devices = find_chip(run.topology), len(tpu_devices(run.topology, 1))
    config.batch_size = int(run.rows_per_chip * devices / chip.per_chip)
    compiled = compile_program(lower_train, (config.to_json(), run.topology, 1), memory_only=True)
    if compiled.overrun or compiled.peak > chip.hbm_limit:  # the compiler would compute more, to need less memory
        raise UserError(f"{run.name} does not fit: {compiled.peak / 2**30:.1f} GiB; another mesh or optimizer may")
    return dataclasses.replace(run, costs=summed(count(compiled.module, devices), run.topology))


def summed(costs: Costs, topology: str) -> Costs:
    """The same costs, with operations summed by what bounds them on these chips, which preserves the roofline."""
    chip, sums = find_chip(topology), {}
    for o in costs.operations:
        reached = chip.peak_flops * min(1.0, o.width / chip.matrix_unit)
        key = o.width, o.flops / reached >= o.bytes / chip.hbm_bandwidth
        flops, size = sums.get(key, (0.0, 0.0))
        sums[key] = flops + o.times * o.flops, size + o.times * o.bytes
    operations = tuple(
        Operation(1, flops, 0, width) if arithmetic else Operation(1, 0, size, width)
        for (width, arithmetic), (flops, size) in sums.items()
    )
    return dataclasses.replace(costs, operations=operations)


def calibrate(runs: Sequence[PublishedRun]) -> dict[str, Calibration]:
    """The factor of every generation with at least two runs, and the expected spread of a further run.

    The spread is the deviation of single runs from the mean of their generation: pooled over all generations, because
    each has few runs, or the generation's own if that is larger.
    """
    logs = {generation: found for generation, found in _logs(runs).items() if len(found) > 1}
    squares = sum((x - statistics.mean(found)) ** 2 for found in logs.values() for x in found)
    pooled = math.sqrt(squares / sum(len(found) - 1 for found in logs.values()))
    return {
        generation: Calibration(
            factor=math.exp(statistics.mean(found)),
            spread=math.expm1(2 * max(pooled, statistics.stdev(found)) * math.sqrt(1 + 1 / len(found))),
            runs=len(found),
        )
        for generation, found in logs.items()
    }


def left_out_errors(runs: Sequence[PublishedRun]) -> dict[str, float]:
    """Relative error of predicting each run from the others of its generation, by name of the run."""
    errors = {}
    for run in runs:
        others = _logs([r for r in runs if r is not run]).get(run.generation)
        if others:
            errors[run.name] = math.exp(statistics.mean(others)) * run.expected / run.seconds - 1
    return errors


def _logs(runs: Sequence[PublishedRun]) -> dict[str, list[float]]:
    """Logarithms of published over estimated step times, by generation."""
    found: dict[str, list[float]] = {}
    for run in runs:
        found.setdefault(run.generation, []).append(math.log(run.seconds / run.expected))
    return found

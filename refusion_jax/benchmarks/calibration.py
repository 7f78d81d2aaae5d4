"""Compares the estimates of `plan` with step times of training runs that others have published.

  python -m refusion_jax.bench calibration
  python -m refusion_jax.bench calibration --compile --output=published_runs.json

For each run it prints the published step time (plus the time of what our remat policy recomputes and theirs does not),
our estimate for the same shape and chips before calibration, their ratio, and the error of predicting the run from the
others of its generation. The factor and spread of each generation follow; refusion_jax/distributed/chips.py holds them
for `plan`. The counts of our programs are stored; --compile makes them again with the installed TPU compiler, which
takes some minutes.
"""

import dataclasses
import json
import statistics
from pathlib import Path

from absl import flags
from rich.console import Console
from rich.table import Table

from refusion_jax.cli import flag_values
from refusion_jax.cli.errors import UserError
from refusion_jax.distributed.storage import write_file
from refusion_jax.planning import calibration
from refusion_jax.planning.compiler import libtpu_version, prepare_environment


def define_flags(own: flags.FlagValues) -> None:
    """The flags of this benchmark."""
    flags.DEFINE_bool("compile", False, "Compile the programs again: pip install libtpu", flag_values=own)
    flags.DEFINE_string("output", "", "Where to write the runs with the new counts; needs --compile", flag_values=own)


def main(own: flags.FlagValues) -> None:
    """Prints one JSON object a run and a generation, then a table."""
    if own.output and not own.compile:
        raise UserError(f"--output={own.output}: only --compile makes new counts to write")
    if own.output:
        flag_values.check_output("output", Path(own.output))
    runs = calibration.read_runs()
    if own.compile:
        prepare_environment()
        libtpu_version()
        runs = [calibration.compiled_again(run) for run in runs]
    if own.output:
        write_file(own.output, calibration.write_runs(runs))
    errors = calibration.left_out_errors(runs)
    table = Table("run", "step", "expected", "ratio", "left out", title="Published training steps and our estimates")
    for run in runs:
        ratio, error = run.seconds / run.expected, errors.get(run.name)
        record = {"run": run.name, "topology": run.topology, "published_seconds": run.published_seconds}
        record |= {"comparable_seconds": run.seconds, "expected_seconds": run.expected, "ratio": ratio}
        print(json.dumps(record | {"left_out_error": error, "source": run.source}))
        told = "not calibrated" if error is None else f"{error:+.1%}"
        table.add_row(run.name, f"{run.seconds:.2f} s", f"{run.expected:.2f} s", f"{ratio:.3f}", told)
    for generation, found in calibration.calibrate(runs).items():
        print(json.dumps({"generation": generation, **dataclasses.asdict(found)}))
        table.add_row(f"all of {generation}", "", "", f"{found.factor:.3f}", f"95 % within {found.spread:.1%}")
    sizes = [abs(error) for error in errors.values()]
    summary = {"left_out_mean": statistics.mean(sizes), "left_out_worst": max(sizes), "runs": len(sizes)}
    print(json.dumps(summary))
    Console().print(table)
    print(
        f"left out one by one: {summary['left_out_mean']:.1%} off on average, {summary['left_out_worst']:.1%} at most"
    )

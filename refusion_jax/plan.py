"""Asks the TPU compiler whether a run fits a TPU slice, and estimates how fast it is. No TPU is needed.

  pip install -e '.[plan]'
  python -m refusion_jax.plan --config=configs/refusion_8b.py --topology=v5p:2x4x4 --rows_per_chip=2
  python -m refusion_jax.plan --config=configs/refusion_8b.py --topology=v5e:8x8 --search
  python -m refusion_jax.plan --hlo=DIRECTORY/NAME.after_optimizations.txt --topology=v5p:2x4x4

The step that `train` runs is compiled for the topology's chips by libtpu, on this machine. Memory is what the compiler
assigns; FLOPs, memory traffic and collectives are counted in the compiled program. The time is a roofline of these
counts against the chip's documented peaks, scaled by how much longer published training runs took than their rooflines
on the same generation: a range that is expected to hold 95 % of such runs (`python -m refusion_jax.bench calibration`).
Those train 7 to 512 B parameters in steps of seconds; the range says little about steps of milliseconds. For the
decoder there is only the roofline. --what=split searches where to cut a model between a device and a server
(refusion_jax/split/README.md). --hlo reports the same for the step of another framework, dumped by its compiler
(xla_dump_to with xla_dump_hlo_as_text). The exit code is 2 if the run does not fit.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import ml_collections
from absl import flags
from rich.console import Console

from refusion_jax.cli import command
from refusion_jax.cli.errors import UserError
from refusion_jax.cli.progress import waiting
from refusion_jax.config import check, help_texts
from refusion_jax.config.keys import keys
from refusion_jax.config.model import adopt_shape, model_config
from refusion_jax.distributed.chips import find_chip, topology_of
from refusion_jax.distributed.xla_options import version_mismatch
from refusion_jax.planning.compiler import libtpu_version, prepare_environment, tpu_devices
from refusion_jax.planning.report import plan_decode, plan_dump, plan_train, to_json, to_table
from refusion_jax.planning.search import fix_for, fix_for_decode, search
from refusion_jax.split import report as split_report
from refusion_jax.systems.api import all_settings, own_settings
from refusion_jax.systems.registry import default_decoder, found_everywhere, systems

_CONFIG = command.define_config("Config file, such as configs/refusion_8b.py")
_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "TPU slice, such as v5p:2x4x4 or v5e:8x8, or its accelerator type, such as v5p-64 or v5litepod-64"
)
_SLICES = flags.DEFINE_integer(
    "slices",
    1,
    "Number of slices, joined by the data-centre network; also sets --config.mesh.replica unless it is given; `train` "
    "needs that flag",
    lower_bound=1,
    upper_bound=1024,
)
_HLO = flags.DEFINE_string("hlo", None, "Instead of --config: the optimized HLO of a step, dumped by any framework")
_WHAT = flags.DEFINE_enum("what", "train", ["train", "decode", "split"], "What to compile; split: find where to cut")
_ROWS = flags.DEFINE_float("rows_per_chip", None, "Sets --config.batch_size to this many rows per chip")
_MEMORY_ONLY = flags.DEFINE_bool(
    "memory_only", False, "Compile no machine code: the same figures in seconds instead of minutes"
)
_SEARCH = flags.DEFINE_bool("search", False, "Try remat x rows per forward x mesh at this batch; name the fastest")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object per line instead of a table")
command.define_settings(all_settings())
split_report.define_flags(flags.FLAGS)
# The flags that each kind of plan uses, besides --config and --json.
_USES = {
    "train": {"topology", "slices", "rows_per_chip", "memory_only", "search"},
    "decode": {"topology", "slices", "what", "memory_only", *(f"decode.{name}" for name in all_settings())},
    "split": {"what", "decode.method", *split_report.FLAGS},
    "hlo": {"topology", "slices", "hlo"},
}


def main() -> None:
    kind = "hlo" if _HLO.value is not None else _WHAT.value
    check_use(kind)
    if kind == "split":
        return plan_split()
    if (_CONFIG.value is None) == (_HLO.value is None) or _TOPOLOGY.value is None:
        raise UserError(
            "--config=configs/NAME.py and --topology=GENERATION:SHAPE are needed, or --hlo=FILE in place of --config; "
            "--help explains"
        )
    config, topology, slices = _CONFIG.value, topology_of(_TOPOLOGY.value), _SLICES.value
    if topology != _TOPOLOGY.value:
        print(f"{_TOPOLOGY.value} is {topology}", file=sys.stderr)
    libtpu_version()
    if kind == "hlo":
        return show(plan_dump(Path(_HLO.value), topology, slices))
    if slices > 1 and config.mesh.replica == 1:
        config.mesh.replica = slices
    if _ROWS.value is not None:
        chips = len(tpu_devices(topology, slices)) / find_chip(topology).per_chip
        if _ROWS.value <= 0 or _ROWS.value * chips % 1:
            raise UserError(f"--rows_per_chip={_ROWS.value:g}: not a whole number of rows on {chips:g} chips")
        config.batch_size = int(_ROWS.value * chips)
    check(config)
    adopt_shape(config)
    for name in systems().keys() - found_everywhere().keys():
        if systems()[name].section in config or name == config.objective:
            raise UserError(f"system {name!r}: --config registers it, and the compiler's process does not know it")
    if kind == "decode":
        given = command.given()
        settings = own_settings(given.get("method") or default_decoder(config.objective), given)
        with waiting(f"compiling for {topology}"):
            record = plan_decode(config, topology, slices, settings, _MEMORY_ONLY.value)
        show_verdict(record, lambda: fix_for_decode(config, topology, slices, settings))
    elif _SEARCH.value:
        show_search(config, topology, slices)
    else:
        with waiting(f"compiling for {topology}"):
            record = plan_train(config, topology, slices, _MEMORY_ONLY.value)
        show_verdict(record, lambda: fix_for(config, topology, slices))


def plan_split() -> None:
    """Prints where to cut the model of a config between a device and a server; compiles nothing."""
    if _CONFIG.value is None:
        raise UserError("--config=configs/NAME.py: needed with --what=split")
    config = _CONFIG.value
    check(config)
    adopt_shape(config)
    method = command.given().get("method") or default_decoder(config.objective)
    itemsize = 2 if config.dtype == "bfloat16" else 4
    found = split_report.choose_split(model_config(config), itemsize, method, flags.FLAGS)
    split_report.show(*found, _JSON.value)


def check_use(kind: str) -> None:
    """Raises UserError if this kind of plan does not use a flag: its verdict would ignore it."""
    given = {name for name in set().union(*_USES.values()) if flags.FLAGS[name].value != flags.FLAGS[name].default}
    for name in sorted(given - _USES[kind]):
        raise UserError(f"--{name}: cannot be used with {'--hlo' if kind == 'hlo' else f'--what={kind}'}")


def show_verdict(record: dict, find_fix: Callable[[], str]) -> None:
    """Prints one plan; UserError, with the flags that would make it fit, if it does not fit."""
    warn_of_other_versions()
    show(record)
    if not record["fits"]:
        with waiting("looking for flags that make it fit"):
            fix = find_fix()
        tried = f"{fix} makes it fit" if fix else "no change that was tried makes it fit: take more chips"
        needs = f"{record['peak_hbm_gib']:.2f} of {record['hbm_limit_gib']:.2f} GiB per chip of {record['topology']}"
        raise UserError(f"needs {needs}; {tried}")


def warn_of_other_versions() -> None:
    """Warns of other compiler versions; called after a plan, so that failures stay one line."""
    if mismatch := version_mismatch():
        print(mismatch, file=sys.stderr)


def show(record: dict) -> None:
    """Prints one plan."""
    if _JSON.value:
        print(to_json(record), flush=True)
    else:
        Console(soft_wrap=not Console().is_terminal).print(to_table(record))
        if "rests_on" in record:
            print(f"The estimate rests on {record['rests_on']}.")
        if sums := record["blocking_all_reduces"]:
            print(f"{sums:,.0f} all-reduces of 1 MB and more stop the chip.")


def show_search(config: ml_collections.ConfigDict, topology: str, slices: int) -> None:
    """Prints every candidate as it is known, then the fastest."""
    found = []
    with waiting(f"searching what is fastest on {topology}"):
        for record in search(config, topology, slices):
            if _JSON.value:
                print(to_json(record), flush=True)
            else:
                verdict = f"{record['step_seconds'] * 1e3:8,.0f} ms" if record["fits"] else "   does not fit"
                print(f"{record['peak_hbm_gib']:7.2f} GiB {verdict:>15}   {record['flags']}", flush=True)
            if record["fits"]:
                found.append(record)
    if not found:
        raise UserError(f"nothing that was tried fits {topology} at {config.batch_size} rows per step: take more chips")
    warn_of_other_versions()
    if not _JSON.value:
        fastest = min(found, key=lambda record: record["step_seconds"])
        show(fastest)
        print(f"fastest by the estimate: {fastest['flags']}")


if __name__ == "__main__":
    prepare_environment()
    command.run(main, help_texts, keys)

"""Plans one config on one topology: the compiler's report and our estimates, as a record and as a table."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import ml_collections
from rich.table import Column, Table

from refusion_jax.cli.errors import refusing
from refusion_jax.config.model import model_config
from refusion_jax.decoding.sampling import SAMPLED
from refusion_jax.decoding.settings import Settings
from refusion_jax.distributed import sharding
from refusion_jax.distributed.chips import find_chip
from refusion_jax.model.flops import count_weights
from refusion_jax.planning import hlo, programs
from refusion_jax.planning.compiler import Compiled, assigned_bytes, compile_program, libtpu_version, tpu_devices
from refusion_jax.planning.costs import GATHER_BY_SUM, Costs, count
from refusion_jax.planning.estimate import Estimate, estimate
from refusion_jax.training.program import train_program

GIB = 2.0**30


def plan_train(config: ml_collections.ConfigDict, topology: str, slices: int, memory_only: bool) -> dict:
    """Compiles the training step of a config and reports its memory, costs and estimated time.

    Values are per JAX device unless the key says otherwise. On TPU7x a chip is two devices; `chips` and `rows_per_chip`
    refer to whole chips. UserError if the config cannot run on the topology.
    """
    compiled = compile_program(programs.lower_train, (config.to_json(), topology, slices), memory_only)
    mesh, chip = sharding.make_mesh(config.mesh, tpu_devices(topology, slices)), find_chip(topology)
    costs = count(compiled.module, mesh.size // slices)
    times, shape = estimate(costs, chip), model_config(config)
    tokens = config.batch_size * config.row_length
    program = train_program(config, shape, mesh)
    model_flops = config.batch_size * program.flops_per_row / mesh.size
    state, (weights, active) = programs.state_bytes(program), count_weights(shape)
    return {
        **_program("train", topology, slices, mesh.size, compiled, costs),
        "mesh": dict(mesh.shape),
        "rows_per_chip": config.batch_size * chip.per_chip / mesh.size,
        "row_length": config.row_length,
        "remat": config.remat,
        "accumulation": config.accumulation,
        "state_gib": state / GIB,
        "activations_gib": (compiled.peak - state) / GIB,
        **_times(times, topology),
        "weights": weights,
        "active_weights": active,
        "model_flops_per_chip": model_flops,
        "mfu": model_flops / (times.step * chip.peak_flops),
        "tokens_per_second": tokens / times.step,
        "tokens_per_day": tokens / times.step * 86_400,
        **_compiler(compiled, memory_only),
    }


def plan_dump(path: Path, topology: str, slices: int) -> dict:
    """Reports on a training step that any framework has compiled for TPUs, as `plan_train` does on ours.

    The path is that of its optimized HLO, NAME.after_optimizations.txt as dumped by `xla_dump_to`, with the buffer
    assignment in the same directory. UserError if the files are missing or hold no program.
    """
    assignment = path.with_name(path.name.removesuffix(".txt") + "-buffer-assignment.txt")
    devices = len(tpu_devices(topology, slices))
    with refusing(f"--hlo={path} cannot be read"):
        module, sizes = hlo.parse(path.read_text()), assigned_bytes(assignment.read_text())
        costs = count(module, devices // slices)
    compiled = Compiled(**sizes, module=module, seconds=0, cpu_seconds=None, overrun="")
    return {
        **_program("program", topology, slices, devices, compiled, costs),
        "arguments_gib": compiled.arguments / GIB,
        **_times(estimate(costs, find_chip(topology)), topology),
    }


def plan_decode(
    config: ml_collections.ConfigDict, topology: str, slices: int, settings: Settings, memory_only: bool
) -> dict:
    """Compiles decoding; raises as `plan_train`.

    Costs are those of one pass of the prefill (at most 256 tokens of the rows that are admitted at once) plus one of
    decoding, as the number of either depends on the data, and those of the latter; both for a full cache. Without a
    temperature they leave out what only sampling does.
    """
    compiled = compile_program(programs.lower_decode, (config.to_json(), topology, slices, settings), memory_only)
    mesh, chip = sharding.make_mesh(config.mesh, tpu_devices(topology, slices)), find_chip(topology)
    unused = "" if settings.temperature else SAMPLED
    costs = count(compiled.module, mesh.size // slices, unused)
    loop = dataclasses.replace(compiled.module, entry=decoding_loop(compiled.module))
    forward = count(loop, mesh.size // slices, unused)
    return {
        **_program("decode", topology, slices, mesh.size, compiled, costs),
        "mesh": dict(mesh.shape),
        "rows_per_chip": settings.batch_size * chip.per_chip / mesh.size,
        "row_length": settings.cache_length or config.row_length,
        "state_gib": compiled.arguments / GIB,
        "activations_gib": (compiled.peak - compiled.arguments) / GIB,
        "prefill_and_forward_seconds": estimate(costs, chip).roofline,
        "forward_seconds": estimate(forward, chip).roofline,
        "forward_flops_per_chip": forward.flops,
        "forward_hbm_bytes_per_chip": forward.bytes,
        "calibrated": False,
        **_compiler(compiled, memory_only),
    }


def decoding_loop(module: hlo.Module) -> str:
    """The body of the decoding loop: the last loop whose end depends on the data; the one before is the prefill's.

    Its costs are those of one forward pass, of the most expensive compiled shape.
    """
    entry = module.computations[module.entry]
    loops = [i for i in entry.instructions.values() if i.opcode == "while"]
    return [i.attribute("body") for i in loops if hlo.trip_count(module, i) is None][-1]


def _program(what: str, topology: str, slices: int, devices: int, compiled: Compiled, costs: Costs) -> dict:
    chip = find_chip(topology)
    blocking = [
        c for c in costs.collectives if c.kind in (GATHER_BY_SUM, "all-reduce") and not c.overlapped and c.is_large
    ]
    return {
        "what": what,
        "topology": topology,
        "slices": slices,
        "chips": devices // chip.per_chip,
        "devices": devices,
        "peak_hbm_gib": compiled.peak / GIB,
        "hbm_limit_gib": chip.hbm_limit / GIB,
        "headroom_gib": (chip.hbm_limit - compiled.peak) / GIB,
        "fits": compiled.peak <= chip.hbm_limit and not compiled.overrun,
        "host_gib": compiled.host / GIB,
        "flops_per_chip": costs.flops,
        "hbm_bytes_per_chip": costs.bytes,
        "collective_bytes_per_chip": sum(c.bytes for c in costs.collectives),
        "gathers_by_all_reduce": sum(c.count for c in blocking if c.kind == GATHER_BY_SUM),
        "blocking_all_reduces": sum(c.count for c in blocking),
        "collectives": [dataclasses.asdict(c) for c in sorted(costs.collectives, key=lambda c: -c.bytes)],
    }


def _times(times: Estimate, topology: str) -> dict:
    known, generation = find_chip(topology).calibration, topology.split(":")[0]
    names = ("compute", "hbm", "operations", "ici", "dcn", "waiting", "roofline", "step")
    return {
        **{f"{name}_seconds": getattr(times, name) for name in names},
        "step_seconds_range": [times.fastest, times.slowest],
        "calibrated": True,
        "rests_on": f"{known.runs} published runs of dense models on {generation}: {known.factor:.2f} x what is "
        f"counted here, 95 % of runs within {known.spread:.1%}",
    }


def _compiler(compiled: Compiled, memory_only: bool) -> dict:
    return {
        "memory_only": memory_only,
        "compile_seconds": compiled.seconds,
        "compile_cpu_seconds": compiled.cpu_seconds,
        "libtpu": libtpu_version(),
        "jax": jax.__version__,
    }


def to_json(record: dict) -> str:
    """One line of JSON, with floats rounded to six digits."""
    return json.dumps(json.loads(json.dumps(record), parse_float=lambda text: float(f"{float(text):.6g}")))


def to_table(r: dict) -> Table:
    """A plan as a table."""
    split = ", ".join(f"{axis}={size}" for axis, size in r.get("mesh", {}).items() if size > 1)
    slices = f"{r['slices']} slices of " if r["slices"] > 1 else ""
    title = f"{r['what']} on {slices}{r['topology']}: {r['chips']} chips{f' ({split})' if split else ''}"
    where = "one chip" if r["devices"] == r["chips"] else "one device, half a chip"
    what = "one pass of the prefill and one forward" if r["what"] == "decode" else "one step"
    table = Table(f"{where}, {what}", Column(justify="right"), title=title, title_justify="left")
    for label, value in _rows(r):
        table.add_row(label, value)
    return table


def _rows(r: dict) -> Iterator[tuple[str, str]]:
    """(label, value) of each row."""
    is_train, is_dump = r["what"] == "train", r["what"] == "program"
    if not is_dump:
        yield "rows x tokens, of a chip", f"{r['rows_per_chip']:g} x {r['row_length']:,}"
        if is_train and r["weights"] > r["active_weights"]:  # a mixture of experts
            yield "weights, those that a token uses", f"{r['weights'] / 1e9:.3g} G, {r['active_weights'] / 1e9:.3g} G"
        yield "state" if is_train else "weights and prompts", f"{r['state_gib']:.2f} GiB"
        yield "activations, gradients and buffers", f"{r['activations_gib']:.2f} GiB"
    yield "peak HBM", f"{r['peak_hbm_gib']:.2f} of {r['hbm_limit_gib']:.2f} GiB"
    yield "verdict", f"fits, {r['headroom_gib']:.2f} GiB to spare" if r["fits"] else "DOES NOT FIT"
    if r["host_gib"]:
        yield "offloaded to the host", f"{r['host_gib']:.2f} GiB"
    yield "FLOPs", f"{r['flops_per_chip']:.3g}"
    yield "HBM traffic", _bytes(r["hbm_bytes_per_chip"])
    yield "received from other chips", _bytes(r["collective_bytes_per_chip"])
    for c in r["collectives"]:
        if c["bytes"] >= 1e6:
            how = ", fused with arithmetic" if c["fused"] else ", overlapped" if c["overlapped"] else ""
            yield f"  {c['kind']} x {c['count']:,.0f}, {c['over']}{how}", _bytes(c["bytes"])
    if r["what"] == "decode":
        yield "both, at least (not calibrated)", _seconds(r["prefill_and_forward_seconds"])
        yield "one forward: HBM traffic", _bytes(r["forward_hbm_bytes_per_chip"])
        yield "one forward, at least (not calibrated)", _seconds(r["forward_seconds"])
    else:
        dcn = "not documented" if r["dcn_seconds"] is None else _seconds(r["dcn_seconds"])
        yield "arithmetic at the peak", _seconds(r["compute_seconds"])
        yield "HBM at the peak", _seconds(r["hbm_seconds"])
        yield "operations, each at its roofline", _seconds(r["operations_seconds"])
        yield "network within the slice, between slices", f"{_seconds(r['ici_seconds'])}, {dcn}"
        yield "  of which nothing hides", _seconds(r["waiting_seconds"])
        yield "all of it at the peaks: the roofline", _seconds(r["roofline_seconds"])
        yield "estimated step", "{:.3g} to {:.3g} s".format(*r["step_seconds_range"])
    if is_train:
        yield "estimated MFU (attention counted where a key is seen)", f"{r['mfu']:.1%}"
        yield "estimated tokens per day, all chips", f"{r['tokens_per_day'] / 1e9:,.2f} G"
    if not is_dump:
        cpu = f", {r['compile_cpu_seconds']:.0f} CPU s" if r["compile_cpu_seconds"] else ""
        how = " up to the buffer assignment" if r["memory_only"] else ""
        yield f"compiled{how} by libtpu {r['libtpu']}", f"{r['compile_seconds']:.1f} s{cpu}"


def _bytes(size: float) -> str:
    return f"{size / 1e9:,.2f} GB"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"

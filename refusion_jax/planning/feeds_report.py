"""Plans a recorded decoding run: tokens per second by batch size, against one token a forward."""

import dataclasses
from collections.abc import Sequence

import ml_collections
from rich.table import Table

from refusion_jax.cli.errors import SettingError, UserError
from refusion_jax.config import check_mesh
from refusion_jax.config.model import model_config
from refusion_jax.decoding.recording import Recording
from refusion_jax.distributed import sharding
from refusion_jax.distributed.chips import find_chip
from refusion_jax.planning.compiler import tpu_devices
from refusion_jax.planning.feeds import BATCH_SIZES, Price, Target, Workload, price


def plan_feeds(
    config: ml_collections.ConfigDict, topology: str, slices: int, recordings: dict[str, Recording]
) -> list[dict]:
    """A record for each recording and batch size. All times are estimates without calibration.

    Args:
      config: its `model`, `mesh` and `dtype` are used.
      topology: of the chips.
      slices: number of slices.
      recordings: by file name.

    Raises:
      UserError: where a recording is not of one row at a time, or the mesh does not fit the model.
    """
    for name, recording in recordings.items():
        if recording.rows != 1:
            raise UserError(
                f"--feeds={name}: was recorded with {recording.rows} rows at once; record with --decode.batch_size=1"
            )
    mesh, chip = sharding.make_mesh(config.mesh, tpu_devices(topology, slices)), find_chip(topology)
    target = Target(model_config(config), config.dtype, chip, dict(mesh.shape))
    check_mesh(config, mesh)
    if mesh.shape["sequence"] > 1:
        raise SettingError("config", "mesh.sequence", mesh.shape["sequence"], "decoding does not split rows")
    where = {"topology": topology, "slices": slices, "chips": mesh.size // chip.per_chip, "mesh": dict(mesh.shape)}
    records = []
    for name, recording in recordings.items():
        about = {"feeds": name, "decoder": recording.decoder, "settings": recording.settings}
        records += [{"what": "feeds"} | where | about | record for record in price_all(recording, target)]
    return records


def price_all(recording: Recording, target: Target) -> list[dict]:
    """Estimates of a recording and of one token a forward, for every batch size; for one row alone, where rows wait.

    Args:
      recording: of one row at a time.
      target: model and chips; what is in int8 follows from the recording's settings.
    """
    settings = dict(pair.partition("=")[::2] for pair in recording.settings.split())
    in_int8 = {name: settings[name] for name in ("weights", "cache") if name in settings}
    target = dataclasses.replace(target, **in_int8)
    own, single = Workload.recorded(recording), Workload.one_token_a_forward(recording)
    records = []
    for rows in BATCH_SIZES[:1] if recording.rows_wait else BATCH_SIZES:
        here, there = price(own, rows, target), price(single, rows, target)
        records.append(
            {
                "batch_size": rows,
                "calibrated": False,
                "tokens_per_second": here.tokens_per_second,
                "one_token_a_forward": there.tokens_per_second,
                "speedup": here.tokens_per_second / there.tokens_per_second,
                "tokens_per_forward": own.tokens / own.forwards,
                "places_per_forward": own.load.tokens * rows,
                **_parts(here, ""),
                **_parts(there, "one_token_"),
                "prefill_share": here.prefill_share,
                "fits": here.fits,
            }
        )
    return records


def _parts(price: Price, name: str) -> dict:
    return {
        f"{name}forward_seconds": price.forward_seconds,
        f"{name}memory_seconds": price.memory_seconds,
        f"{name}arithmetic_seconds": price.arithmetic_seconds,
        f"{name}network_seconds": price.network_seconds,
        f"{name}bound": price.bound,
    }


def feeds_table(records: Sequence[dict]) -> Table:
    """The records of one recording as a table."""
    first = records[0]
    split = ", ".join(f"{axis}={size}" for axis, size in first["mesh"].items() if size > 1)
    decoder = f"{first['decoder']} {first['settings']}".strip()
    table = Table(
        *("batch", "tokens/s", "one/forward", "ratio", "ms/forward", "memory", "arithmetic", "network"),
        title=f"{first['feeds']}: {decoder}, {first['tokens_per_forward']:.2f} tokens a forward, beside one a forward\n"
        f"Estimate, not calibrated, for {first['topology']}: {first['chips']} chips{f' ({split})' if split else ''}",
        title_justify="left",
    )
    for column in table.columns:
        column.justify = "right"
    for r in records:
        parts = [f"{r[f'{name}_seconds'] / r['forward_seconds']:.0%}" for name in ("memory", "arithmetic", "network")]
        table.add_row(
            str(r["batch_size"]),
            f"{r['tokens_per_second']:,.0f}" if r["fits"] else "does not fit",
            f"{r['one_token_a_forward']:,.0f}",
            f"{r['speedup']:.2f}x",
            f"{r['forward_seconds'] * 1e3:.2f}",
            *parts,
        )
    return table

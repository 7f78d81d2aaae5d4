"""Searches for the fastest settings that fit: remat policy x rows per forward x mesh, at the same global batch.

Rows per forward are changed by gradient accumulation, which does not change the result of training. Every candidate is
compiled up to its buffer assignment, which takes a few seconds. `chips` counts JAX devices here, two per chip on TPU7x.
"""

import bisect
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import ml_collections

from refusion_jax.cli.errors import UserError
from refusion_jax.config.model import model_config
from refusion_jax.decoding.settings import Settings
from refusion_jax.distributed.chips import find_chip
from refusion_jax.distributed.sharding import make_mesh, shard_count
from refusion_jax.model.remat import REMAT_POLICIES
from refusion_jax.planning.compiler import tpu_devices
from refusion_jax.planning.fastest import as_flags, changes
from refusion_jax.planning.programs import state_bytes
from refusion_jax.planning.report import plan_decode, plan_train
from refusion_jax.training.program import train_program

*_, _SMALL, _SMALLEST = REMAT_POLICIES  # the two that need the least memory


def search(config: ml_collections.ConfigDict, topology: str, slices: int) -> Iterator[dict]:
    """Yields the record of each candidate, with its "flags", as soon as it is known; UserError if none can run."""
    devices, fault, can_run = tpu_devices(topology, slices), None, False
    for mesh in _meshes(config, len(devices)):
        parts = shard_count(make_mesh(with_flags(config, mesh).mesh, devices), "batch")
        for remat in REMAT_POLICIES:
            for accumulation in _accumulations(config, parts):
                flags = {"remat": remat, "accumulation": accumulation} | mesh
                try:
                    record = plan_train(with_flags(config, flags), topology, slices, memory_only=True)
                except UserError as error:  # a size that this mesh does not divide
                    fault = fault or error
                    continue
                can_run, record["flags"] = True, as_flags(flags)
                yield record
                if not record["fits"]:
                    break  # more rows per forward would need more memory
    if fault and not can_run:
        raise fault


def fix_for(config: ml_collections.ConfigDict, topology: str, slices: int) -> str:
    """The smallest change in how a step runs that makes it fit, as flags; "" if no tried change does."""

    def fits(flags: dict) -> bool:
        if not changes(config, flags):
            return False  # this is the config that needs a fix
        changed = with_flags(config, flags)
        try:
            mesh = make_mesh(changed.mesh, tpu_devices(topology, slices))
            if state_bytes(train_program(changed, model_config(changed), mesh)) > find_chip(topology).hbm_limit:
                return False  # even without activations: nothing needs to be compiled
            return plan_train(changed, topology, slices, memory_only=True)["fits"]
        except UserError:
            return False  # a size that this mesh does not divide

    found = {"remat": _SMALL}
    if config.remat in (_SMALL, _SMALLEST) or not fits(found):
        parts = shard_count(make_mesh(config.mesh, tpu_devices(topology, slices)), "batch")
        counts = sorted(_accumulations(config, parts))
        others = [n for n in counts if n != config.accumulation]
        count = _first_that_fits(others, lambda n: fits({"remat": _SMALL, "accumulation": n}))
        if count is not None:
            found["accumulation"] = count
        else:
            least = {"remat": _SMALL, "accumulation": counts[-1]}
            split = {"mesh.data": 1, "mesh.fsdp": -1, "mesh.replica": slices}
            found = next((flags for flags in (least | split, least | {"remat": _SMALLEST}) if fits(flags)), {})
    return as_flags(changes(config, found))


def fix_for_decode(config: ml_collections.ConfigDict, topology: str, slices: int, settings: Settings) -> str:
    """The flag for the largest batch, halved as often as needed, that fits and can be split, or ""."""

    def fits(rows: int) -> bool:
        smaller = dataclasses.replace(settings, batch_size=rows)
        return plan_decode(config, topology, slices, smaller, memory_only=True)["fits"]

    parts = shard_count(make_mesh(config.mesh, tpu_devices(topology, slices)), "batch")
    halves = [settings.batch_size >> n for n in range(1, settings.batch_size.bit_length())]
    rows = _first_that_fits([n for n in halves if settings.batch_size % n == 0 == n % parts], fits)
    return "" if rows is None else f"--decode.batch_size={rows}"


def _first_that_fits(counts: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The first count that fits, where each takes less memory than the one before it; None if none fits."""
    at = bisect.bisect_left(counts, True, key=fits)
    return counts[at] if at < len(counts) else None


def with_flags(config: ml_collections.ConfigDict, flags: dict) -> ml_collections.ConfigDict:
    """The config with dotted keys changed."""
    changed = copy.deepcopy(config)
    changed.update_from_flattened_dict(flags)
    return changed


def _accumulations(config: ml_collections.ConfigDict, parts: int) -> list[int]:
    """Accumulations to try, from the fewest rows per forward to the whole batch, which a mesh splits into `parts`.

    Rows per forward double from one to the next, which keeps the search short; the config's own accumulation is one.
    """
    most = max(config.batch_size // parts, 1)
    powers = {most >> n for n in range(most.bit_length()) if most % (1 << n) == 0}
    return sorted(powers | {1, config.accumulation}, reverse=True)


def _meshes(config: ml_collections.ConfigDict, chips: int) -> Iterator[dict]:
    """The mesh of the config, one with all chips on fsdp, and several with part of the chips on data or tensor."""
    shape = {f"mesh.{axis}": size for axis, size in config.mesh.items()}
    whole = shape | {"mesh.data": 1, "mesh.fsdp": -1, "mesh.tensor": 1, "mesh.sequence": 1}
    seen = []
    parts = (*(("mesh.data", n) for n in (2, 4, 8, 16)), *(("mesh.tensor", n) for n in (2, 4)))
    for mesh in (shape, whole, *(whole | {axis: n} for axis, n in parts)):
        set_sizes = math.prod(size for size in mesh.values() if size > 0)
        if mesh not in seen and (chips % set_sizes == 0 if -1 in mesh.values() else chips == set_sizes):
            seen.append(mesh)
            yield mesh

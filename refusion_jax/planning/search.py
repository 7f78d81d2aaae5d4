"""Searches for the fastest settings that fit: remat policy x rows a forward x mesh, at the same global batch.

Rows a forward are changed by gradient accumulation, which does not change the result of training. Every candidate is
compiled up to its buffer assignment, which takes a few seconds. `chips` counts JAX devices here, two a chip on TPU7x.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import ml_collections

from refusion_jax.decoding.settings import Settings
from refusion_jax.model.remat import REMAT_POLICIES
from refusion_jax.planning.report import plan_decode, plan_train
from refusion_jax.runtime.errors import UserError

*_, _SMALL, _SMALLEST = REMAT_POLICIES  # the two that need the least memory


def search(
    config: ml_collections.ConfigDict,
    topology: str,
    slices: int,
    chips: int,
    tell: Callable[[dict], None],
    policies: Sequence[str] = tuple(REMAT_POLICIES),
) -> list[dict]:
    """Plans every candidate.

    Args:
      config: of the run; its batch size is kept.
      topology: to plan for.
      slices: number of slices.
      chips: in all slices.
      tell: called with each record as it is known; candidates that cannot be built have none.
      policies: remat policies to try.

    Returns:
      Records of the candidates that fit, fastest first; each has "flags", which select it.
    """
    found = []
    for mesh in _meshes(config, chips):
        for remat in policies:
            for accumulation in _accumulations(config, chips):
                flags = {"remat": remat, "accumulation": accumulation} | mesh
                try:
                    record = plan_train(with_flags(config, flags), topology, slices, memory_only=True)
                except UserError:
                    continue  # a size that this mesh does not divide
                record["flags"] = as_flags(flags)
                tell(record)
                if not record["fits"]:
                    break  # more rows a forward would need more memory
                found.append(record)
    return sorted(found, key=lambda record: record["step_seconds"])


def fix_for(config: ml_collections.ConfigDict, topology: str, slices: int, chips: int) -> str:
    """The smallest change of settings that makes a step fit, as flags; "" if nothing that was tried does."""
    least = max(_accumulations(config, chips))
    tries: list[dict] = [{"remat": _SMALL}] if config.remat not in (_SMALL, _SMALLEST) else []
    tries += [{"remat": _SMALL, "accumulation": n} for n in sorted(_accumulations(config, chips))]
    tries += [{"remat": _SMALL, "accumulation": least, "mesh.data": 1, "mesh.fsdp": -1, "mesh.replica": slices}]
    tries += [{"remat": _SMALLEST, "accumulation": least}]
    for flags in tries:
        if all(_get(config, key) == value for key, value in flags.items()):
            continue
        try:
            if plan_train(with_flags(config, flags), topology, slices, memory_only=True)["fits"]:
                return as_flags({key: value for key, value in flags.items() if _get(config, key) != value})
        except UserError:
            continue
    return ""


def fix_for_decode(config: ml_collections.ConfigDict, topology: str, slices: int, settings: Settings) -> str:
    """The largest batch that fits, by halving, as a flag; "" if there is none."""
    rows = settings.batch_size
    while rows % 2 == 0:
        rows //= 2
        try:
            smaller = dataclasses.replace(settings, batch_size=rows)
            if plan_decode(config, topology, slices, smaller, memory_only=True)["fits"]:
                return f"--decode.batch_size={rows}"
        except UserError:
            break  # the mesh does not divide it
    return ""


def with_flags(config: ml_collections.ConfigDict, flags: dict) -> ml_collections.ConfigDict:
    """The config with dotted keys changed."""
    changed = copy.deepcopy(config)
    changed.update_from_flattened_dict(flags)
    return changed


def as_flags(flags: dict) -> str:
    """As on a command line."""
    return " ".join(f"--config.{key}={value}" for key, value in flags.items())


def _get(config: ml_collections.ConfigDict, key: str):
    for name in key.split("."):
        config = config[name]
    return config


def _accumulations(config: ml_collections.ConfigDict, chips: int) -> list[int]:
    """Accumulations to try, from the fewest rows a forward (one a chip, if there are enough) to the whole batch."""
    most = max(config.batch_size // chips, 1)
    return [most // n for n in range(1, most + 1) if most % n == 0 and math.log2(n).is_integer()]


def _meshes(config: ml_collections.ConfigDict, chips: int) -> Iterator[dict]:
    """The mesh of the config, one with all chips on fsdp, and some with part of them on data or tensor."""
    shape = {f"mesh.{axis}": size for axis, size in config.mesh.items()}
    whole = shape | {"mesh.data": 1, "mesh.fsdp": -1, "mesh.tensor": 1, "mesh.sequence": 1}
    seen = []
    parts = (*(("mesh.data", n) for n in (2, 4, 8, 16)), *(("mesh.tensor", n) for n in (2, 4)))
    for mesh in (shape, whole, *(whole | {axis: n} for axis, n in parts)):
        if mesh not in seen and chips % math.prod(size for size in mesh.values() if size > 0) == 0:
            seen.append(mesh)
            yield mesh

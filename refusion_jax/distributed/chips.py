"""The capabilities of each TPU generation, and how far published runs were from them: the one place for these numbers.

Of NVIDIA's chips only peaks and bandwidths are here, from their data sheets.

Peaks, bandwidths and sizes are those that Google documents (docs.cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e and
/tpu7x). The inter-chip bandwidth is documented for both directions together (v5p: 1,200 GB/s), and for v4 as the rate
of reductions over a pod of 4,096 chips (1.1 PB/s); here it is the rate at which a chip receives. Other sources put it
10 % lower on every generation, which the calibration absorbs. The memory limit is what the compiler (libtpu 0.0.51)
lets a program use, or the documented size if that is less (v5p: 95 of the compiler's 95.73 GiB).

Everything is for one JAX device, which is a chip, but on TPU7x half of one.
"""

import dataclasses
import re

from refusion_jax.cli.errors import UserError


@dataclasses.dataclass(frozen=True)
class Calibration:
    """How published steps compare with our estimates of the same steps; planning/published_runs.json has the runs."""

    factor: float  # published over estimated, the geometric mean of the generation's runs
    spread: float  # 95 % of runs are expected within the estimate divided by and multiplied with 1 + this
    runs: int  # number of published runs that it was fitted to


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device of a TPU generation; rates are per second, sizes in bytes."""

    device_kind: str  # as in jax.Device.device_kind
    peak_flops: float  # dense bf16
    hbm_limit: float  # memory that a program may use
    hbm_bandwidth: float
    ici_bandwidth: float  # received over all links to the other chips of the slice
    dcn_bandwidth: float | None  # of the data-centre network, a chip's part of its host's; None: not documented
    example: str  # a topology
    calibration: Calibration
    matrix_unit: int = 128  # side of the matrix unit: narrower products leave a part of it idle
    per_chip: int = 1  # JAX devices of a chip
    narrow: str = ""  # dtype, by its HLO name, whose products are documented to be twice as fast as in bf16


_G = 2.0**30
# Calibrations are what `python -m refusion_jax.bench calibration` computes; tests/test_calibration.py holds them to it.
CHIPS = {
    "v4": Chip(
        *("TPU v4", 275e12, 30.75 * _G, 1.2e12, 270e9, None, "v4:2x4x4"),
        calibration=Calibration(factor=1.247, spread=0.066, runs=2),
    ),
    "v5e": Chip(
        *("TPU v5 lite", 197e12, 15.75 * _G, 819e9, 200e9, 200e9 / 8 / 8, "v5e:8x8"),
        narrow="s8",
        calibration=Calibration(factor=1.085, spread=0.085, runs=4),
    ),
    "v5p": Chip(
        *("TPU v5", 459e12, 95 * _G, 2.765e12, 600e9, 50e9 / 8, "v5p:2x4x4"),
        narrow="s8",
        calibration=Calibration(factor=1.155, spread=0.052, runs=6),
    ),
    "v6e": Chip(
        *("TPU v6 lite", 918e12, 31.24 * _G, 1.64e12, 400e9, 800e9 / 8 / 8, "v6e:4x8"),
        matrix_unit=256,
        narrow="s8",
        calibration=Calibration(factor=1.443, spread=0.049, runs=13),
    ),
    "tpu7x": Chip(
        *("TPU7x", 2307e12 / 2, 94.74 * _G, 7.38e12 / 2, 1.2e12 / 2 / 2, None, "tpu7x:4x4x4"),
        matrix_unit=256,
        per_chip=2,
        narrow="f8e4m3fn",
        calibration=Calibration(factor=1.232, spread=0.055, runs=3),
    ),
}


# The names under which Google Cloud rents slices: v4-N, v5p-N and tpu7x-N count TensorCores, of which a chip has two,
# v5litepod-N and v6e-N count chips. Chips can be arranged in several shapes; a name takes the default one, which is
# nearest to a cube (docs.cloud.google.com/tpu/docs/types-topologies, /v4, /v5e, /v5p, /v6e, and default_topologies of
# github.com/AI-Hypercomputer/xpk).
NAMES = "v4-N, v5p-N, tpu7x-N (N cores: 8, 16, 32, 64, k*128), v5litepod-N, v6e-N (N chips: 1, 4, 8, 16, ..., 256)"
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_BELOW_A_CUBE = {8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4"}  # by TensorCores


def topology_of(name: str) -> str:
    """The topology of an accelerator type, v5p:2x4x4 of v5p-64; any other name is returned unchanged."""
    found = re.fullmatch(r"(v4|v5p|tpu7x|v5litepod|v5e|v6e)-([1-9][0-9]{0,4})", name)
    if not found:
        return name
    generation, count = found[1].replace("litepod", "e"), int(found[2])
    if generation in ("v5e", "v6e"):
        shape = _FLAT.get(count)
    else:
        shape = _BELOW_A_CUBE.get(count) if count % 128 else _of_cubes(count // 128)
    return f"{generation}:{shape}" if shape else name


def _of_cubes(cubes: int) -> str:
    """The shape nearest to a cube, made of `cubes` blocks of 4x4x4 chips, with its shortest side first."""
    shapes = (
        (a, b, cubes // (a * b))
        for a in range(1, cubes + 1)
        for b in range(a, cubes // a + 1)
        if cubes % (a * b) == 0 and b <= cubes // (a * b)
    )
    return "x".join(str(4 * side) for side in min(shapes, key=sum))


def find_chip(topology: str) -> Chip:
    """The chip of a topology such as "v5p:2x4x4"; UserError if the generation is unknown."""
    generation = topology.split(":")[0]
    if generation not in CHIPS or ":" not in topology:
        examples = ", ".join(chip.example for chip in CHIPS.values())
        raise UserError(
            f"--topology={topology[:60]}: unknown; known are GENERATION:SHAPE such as {examples}, and the accelerator "
            f"types {NAMES}"
        )
    return CHIPS[generation]


# Dense bf16 FLOP/s and bytes/s of memory, by the beginning of jax.Device.device_kind.
_GPUS = {
    "NVIDIA A100": (312e12, 2.04e12),
    "NVIDIA H100": (989e12, 3.35e12),
    "NVIDIA H100 NVL": (835e12, 3.94e12),
    "NVIDIA H100 PCIe": (756e12, 2.04e12),
    "NVIDIA H200": (989e12, 4.8e12),
    "NVIDIA H200 NVL": (835e12, 4.8e12),
}


def peak_flops(device_kind: str) -> float | None:
    """Peak of dense bf16 arithmetic, FLOP/s, or None if unknown (CPUs)."""
    return _peaks(device_kind)[0]


def memory_bandwidth(device_kind: str) -> float | None:
    """Bytes/s of a device's memory, or None if unknown (CPUs)."""
    return _peaks(device_kind)[1]


def _peaks(device_kind: str) -> tuple[float, float] | tuple[None, None]:
    """FLOP/s and bytes/s of memory, by the longest name that the kind begins with."""
    chips = {chip.device_kind: (chip.peak_flops, chip.hbm_bandwidth) for chip in CHIPS.values()} | _GPUS
    known = [name for name in chips if device_kind.startswith(name)]
    return chips[max(known, key=len)] if known else (None, None)


# Two cores of an AMD EPYC: weights in the last-level cache (32 MiB) are read as fast as they are multiplied; reading
# larger weights from memory takes as long as computing about 16 tokens.
_CPU_CACHE, _CPU_TOKENS = 32 * 2**20, 16


def free_tokens(weight_bytes: int, device_kind: str, itemsize: int = 2) -> int:
    """How many tokens one forward pass can compute in the time in which its weights are read.

    That is where arithmetic and memory take the same time: peak FLOP/s over bytes/s (2 FLOPs per weight); on a
    CPU a rule from measurements. 0 if nothing is known, or nothing is free. An `itemsize` (bytes per weight) above 2
    counts as 2, since wider products take longer, too.
    """
    flops, bandwidth = _peaks(device_kind)
    if flops:
        return round(flops / bandwidth * min(itemsize, 2) / 2)
    return _CPU_TOKENS if device_kind == "cpu" and weight_bytes > _CPU_CACHE else 0

"""What each TPU generation can do: the one place for these numbers.

Peaks, bandwidths and sizes are those that Google documents (cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e). The
inter-chip bandwidth is documented for both directions together, or in bits a second for one; here it is what a chip can
receive. The memory limit is what the compiler (libtpu 0.0.51) lets a program use of it.
"""

import dataclasses

from refusion_jax.runtime.errors import UserError


@dataclasses.dataclass(frozen=True)
class Chip:
    """One TPU chip; rates are a second, sizes in bytes."""

    device_kind: str  # what jax.Device.device_kind says
    peak_flops: float  # dense bf16
    hbm_limit: float  # memory that a program may use
    hbm_bandwidth: float
    ici_bandwidth: float  # received over all links to the other chips of the slice
    dcn_bandwidth: float | None  # of the data-centre network, a chip's part of its host's; None: not documented
    example: str  # a topology


_G = 2.0**30
CHIPS = {
    "v4": Chip("TPU v4", 275e12, 30.75 * _G, 1.228e12, 300e9, None, "v4:2x4x4"),
    "v5e": Chip("TPU v5 lite", 197e12, 15.75 * _G, 819e9, 200e9, 200e9 / 8 / 8, "v5e:8x8"),
    "v5p": Chip("TPU v5", 459e12, 95.73 * _G, 2.765e12, 600e9, 50e9 / 8, "v5p:2x4x4"),
    "v6e": Chip("TPU v6 lite", 918e12, 31.24 * _G, 1.64e12, 400e9, 800e9 / 8 / 8, "v6e:4x8"),
}


def find_chip(topology: str) -> Chip:
    """The chip of a topology such as "v5p:2x4x4".

    Raises:
      UserError: where the generation is unknown, naming those that are known.
    """
    generation = topology.split(":")[0]
    if generation not in CHIPS or ":" not in topology:
        examples = ", ".join(chip.example for chip in CHIPS.values())
        raise UserError(f"--topology={topology}: unknown; known are GENERATION:SHAPE such as {examples}")
    return CHIPS[generation]

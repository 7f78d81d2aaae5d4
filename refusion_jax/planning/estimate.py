"""From counts to time: a roofline against the documented peaks of the chip. An estimate, and its parts.

A chip does one operation after the other; each takes the time of its FLOPs or of its memory traffic, whichever is
longer. Collectives that the compiler runs beside arithmetic are hidden unless all of them together take longer than
everything else; for the others the chip waits. Real steps are slower: no operation reaches a peak.
"""

import dataclasses

from refusion_jax.planning.costs import Costs
from refusion_jax.runtime.chips import Chip


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of one step."""

    compute: float  # all FLOPs at the peak
    hbm: float  # all memory traffic at the peak
    operations: float  # one operation after the other, each at its roofline
    ici: float  # all collectives within a slice
    dcn: float | None  # all collectives between slices; None where the chip's part of that network is not documented
    waiting: float  # the part of the collectives that nothing hides
    step: float  # the estimate

    def mfu(self, model_flops: float, chip: Chip) -> float:
        """Model FLOPs of a chip and step over what it could do in that time."""
        return model_flops / (self.step * chip.peak_flops)


def estimate(costs: Costs, chip: Chip) -> Estimate:
    """The time of a step with these costs on this chip."""
    operations = sum(
        times * max(flops / chip.peak_flops, size / chip.hbm_bandwidth) for times, flops, size in costs.operations
    )

    def seconds(over: str, bandwidth: float, only_waiting: bool) -> float:
        chosen = (c for c in costs.collectives if c.over == over and not (only_waiting and c.overlapped))
        return sum(c.bytes for c in chosen) / bandwidth

    dcn_bandwidth = chip.dcn_bandwidth or float("inf")
    ici, dcn = seconds("ici", chip.ici_bandwidth, False), seconds("dcn", dcn_bandwidth, False)
    waiting = seconds("ici", chip.ici_bandwidth, True) + seconds("dcn", dcn_bandwidth, True)
    return Estimate(
        compute=costs.flops / chip.peak_flops,
        hbm=costs.bytes / chip.hbm_bandwidth,
        operations=operations,
        ici=ici,
        dcn=dcn if chip.dcn_bandwidth or not any(c.over == "dcn" for c in costs.collectives) else None,
        waiting=waiting,
        step=max(operations + waiting, ici, dcn),
    )

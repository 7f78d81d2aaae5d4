"""Estimates the time of a step from its counted costs: a roofline at the chip's documented peaks, then calibration.

The roofline. A chip runs one operation after the other; each takes the time of its FLOPs or of its memory traffic,
whichever is longer. On newer chips the matrix unit is wider than an attention head, so that attention kernels reach
only part of the peak. Collectives that the compiler overlaps with arithmetic are hidden unless they take longer than
everything else; for the others the chip waits.

The calibration. Real steps are slower than the roofline, by much the same factor within a generation, which published
runs give (`Chip.calibration`). The estimate is this factor times the roofline, after one correction: collectives that
overlap with arithmetic without being fused with it are taken to be only partly hidden.
"""

import dataclasses
import math

from refusion_jax.distributed.chips import Chip
from refusion_jax.planning.costs import Costs

# The share of overlapped but unfused collectives that is not hidden. With none, half and all of it, the mean error of
# predicting each published run from the others is 2.3, 2.1 and 2.1 %. Half is chosen because the published runs used
# other compilers, which overlap less than ours.
_SHOWN_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of one step."""

    compute: float  # all FLOPs at the peak
    hbm: float  # all memory traffic at the peak
    operations: float  # one operation after the other, each at its roofline
    ici: float  # all collectives within a slice
    dcn: float | None  # all collectives between slices; None if the bandwidth of that network is not documented
    waiting: float  # collectives that are not overlapped
    roofline: float  # of the whole step
    expected: float  # the roofline plus the part of overlapped collectives that is not hidden; not calibrated
    step: float  # the estimate, calibrated
    fastest: float  # 95 % of runs are expected between these two, never below the roofline
    slowest: float


def estimate(costs: Costs, chip: Chip) -> Estimate:
    """The time of a step with these costs on this chip."""
    compute = operations = 0.0
    for o in costs.operations:
        arithmetic = o.times * o.flops / (chip.peak_flops * (2 if o.narrow and o.narrow == chip.narrow else 1))
        reached = min(1.0, o.width / chip.matrix_unit)  # of the peak
        compute += arithmetic
        operations += max(arithmetic / reached, o.times * o.bytes / chip.hbm_bandwidth)

    def moving(over: str, bandwidth: float, only_waiting: bool) -> float:
        chosen = (c for c in costs.collectives if c.over == over and not (only_waiting and c.overlapped))
        return sum(c.bytes for c in chosen) / bandwidth

    dcn_bandwidth = chip.dcn_bandwidth or math.inf
    ici, dcn = moving("ici", chip.ici_bandwidth, False), moving("dcn", dcn_bandwidth, False)
    waiting = moving("ici", chip.ici_bandwidth, True) + moving("dcn", dcn_bandwidth, True)
    unfused = sum(c.bytes for c in costs.collectives if c.over == "ici" and c.overlapped and not c.fused)
    roofline = max(operations + waiting, ici, dcn)
    shown = _SHOWN_SHARE * unfused / chip.ici_bandwidth
    expected, known = max(operations + waiting + shown, ici, dcn), chip.calibration
    step = expected * known.factor
    return Estimate(
        compute=compute,
        hbm=costs.bytes / chip.hbm_bandwidth,
        operations=operations,
        ici=ici,
        dcn=dcn if chip.dcn_bandwidth or not any(c.over == "dcn" for c in costs.collectives) else None,
        waiting=waiting,
        roofline=roofline,
        expected=expected,
        step=step,
        fastest=max(step / (1 + known.spread), roofline),
        slowest=step * (1 + known.spread),
    )

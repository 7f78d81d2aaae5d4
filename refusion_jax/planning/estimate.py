"""From counts to time: a roofline against the documented peaks of the chip, and what published runs say of it.

A chip does one operation after the other; each takes the time of its FLOPs or of its memory traffic, whichever is
longer. The matrix unit of newer chips is wider than an attention head, so that the kernels reach a part of the peak.
Collectives that the compiler runs beside arithmetic are hidden unless all of them together take longer than everything
else; for the others the chip waits. That is the roofline.

Real steps are slower, since no operation reaches a peak, and by generation very evenly so. Where published runs give
that factor (`Chip.calibration`), it makes the estimate of the roofline, after one correction: collectives that merely
run beside arithmetic, instead of being fused with it, are taken to show in part.
"""

import dataclasses
import math

from refusion_jax.planning.costs import Costs, Operation
from refusion_jax.runtime.chips import Chip

# Published runs are predicted the better, leaving each out, the more of these collectives is taken to show, and of
# those fused with arithmetic (v5e) the less: none, half and all of it give 3.7, 3.3 and 3.0 % on average. Half, since
# other compilers made the programs that ran, with less beside their arithmetic than ours.
_BESIDE_SHOWS = 0.5


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of one step."""

    compute: float  # all FLOPs at the peak
    hbm: float  # all memory traffic at the peak
    operations: float  # one operation after the other, each at its roofline
    memory_bound: float  # of these: operations whose memory traffic takes longer than their arithmetic
    ici: float  # all collectives within a slice
    dcn: float | None  # all collectives between slices; None where the chip's part of that network is not documented
    waiting: float  # the part of the collectives that nothing hides
    roofline: float  # all of it, at the peaks
    expected: float  # the same with the part of overlapped collectives that shows, before the factor of the chip
    step: float  # the estimate: calibrated where the chip is, the roofline otherwise
    fastest: float | None  # 95 % of runs lie between these two, and none below the roofline; None without calibration
    slowest: float | None

    def mfu(self, model_flops: float, chip: Chip) -> float:
        """Model FLOPs of a chip and step over what it could do in that time."""
        return model_flops / (self.step * chip.peak_flops)


def estimate(costs: Costs, chip: Chip) -> Estimate:
    """The time of a step with these costs on this chip."""
    seconds = [(o.times * arithmetic, o.times * hbm) for o in costs.operations for arithmetic, hbm in [_parts(o, chip)]]
    operations = sum(max(parts) for parts in seconds)

    def moving(over: str, bandwidth: float, only_waiting: bool) -> float:
        chosen = (c for c in costs.collectives if c.over == over and not (only_waiting and c.overlapped))
        return sum(c.bytes for c in chosen) / bandwidth

    dcn_bandwidth = chip.dcn_bandwidth or math.inf
    ici, dcn = moving("ici", chip.ici_bandwidth, False), moving("dcn", dcn_bandwidth, False)
    waiting = moving("ici", chip.ici_bandwidth, True) + moving("dcn", dcn_bandwidth, True)
    beside = sum(c.bytes for c in costs.collectives if c.over == "ici" and c.overlapped and not c.fused)
    roofline = max(operations + waiting, ici, dcn)
    shown = _BESIDE_SHOWS * beside / chip.ici_bandwidth
    expected, known = max(operations + waiting + shown, ici, dcn), chip.calibration
    step = expected * known.factor if known else roofline
    return Estimate(
        compute=costs.flops / chip.peak_flops,
        hbm=costs.bytes / chip.hbm_bandwidth,
        operations=operations,
        memory_bound=sum(hbm for arithmetic, hbm in seconds if hbm > arithmetic),
        ici=ici,
        dcn=dcn if chip.dcn_bandwidth or not any(c.over == "dcn" for c in costs.collectives) else None,
        waiting=waiting,
        roofline=roofline,
        expected=expected,
        step=step,
        fastest=max(step / (1 + known.spread), roofline) if known else None,
        slowest=step * (1 + known.spread) if known else None,
    )


def _parts(operation: Operation, chip: Chip) -> tuple[float, float]:
    """Of one operation: (seconds for its arithmetic, for its memory traffic); it takes the longer of the two."""
    reached = chip.peak_flops * min(1.0, operation.width / chip.matrix_unit)
    return operation.flops / reached, operation.bytes / chip.hbm_bandwidth

"""Estimates of the same decoding with 8B parameters on TPUs, for every decoder and batch size.

All points near a decoder's best accuracy are estimated (planning/decode_estimate.py): a small batch is bound by reading
the weights, where the most tokens per forward are best, and a large one by arithmetic, where the fewest places are. At
each batch size the fastest point counts.
"""

import itertools
from typing import Any

from refusion_jax.benchmarks.decode import shape_of
from refusion_jax.benchmarks.headline.results import Scored
from refusion_jax.distributed.chips import find_chip
from refusion_jax.planning.decode_estimate import forward_costs

MODEL = "8b"
BATCH_SIZES = tuple(2**i for i in range(9))
TOPOLOGIES = {"v5e:2x4": 8, "v5p:2x2x1": 4}  # number of chips, all of which share the heads


def tpu_estimates(points: list[Scored], problems: int) -> list[dict[str, Any]]:
    """The estimates of a decoder, a record for each topology."""
    about, found = {key: points[0][key] for key in ("system", "decoder", "start")}, []
    for topology in TOPOLOGIES:
        batches = [[_estimate(point, problems, topology, size) for point in points] for size in BATCH_SIZES]
        best = [max(own, key=lambda record: record["tokens_per_second"]) for own in batches]
        found.append(about | {"model": MODEL, "topology": topology, "batches": best})
    return found


def _estimate(point: Scored, problems: int, topology: str, batch_size: int) -> dict[str, Any]:
    tokens, forwards = point["tokens"] / problems, point["forwards"] / problems
    context = point["prompt_tokens"] + tokens / 2  # in the middle of an answer
    # A prefill counts as one forward more, since some decoders make their first drafts in it.
    prefills, seen = (1, context) if point["has_cache"] else (0, 0)

    def tokens_per_second(forwards: float, places: float, seen: float) -> float:
        costs = forward_costs(shape_of(MODEL), batch_size, places, seen, TOPOLOGIES[topology])
        return batch_size * tokens / (forwards * costs.seconds(find_chip(topology)))

    speed = tokens_per_second(forwards + prefills, point["width"], seen)
    baseline = tokens_per_second(tokens + 1, 1, context)
    return {
        "batch_size": batch_size,
        "settings": point["settings"],
        "tokens_per_second": speed,
        "one_token_per_forward": baseline,
        "speedup": speed / baseline,
        "tokens_per_forward": tokens / forwards,
    }


def faster_up_to(batches: list[dict[str, Any]]) -> int:
    """The largest batch size up to which a decoder is faster than one token per forward; 0 if none."""
    faster = itertools.takewhile(lambda record: record["speedup"] > 1, batches)
    return max((record["batch_size"] for record in faster), default=0)

"""Estimates of the same decoding with 8B parameters on TPUs, for every decoder and batch size, by arithmetic.

How many forwards an answer takes depends on what the model has learnt, not on its size; how long a forward pass takes
depends on its size and on the chip. So the first is counted with a small model, and the second computed here for a
large one. Nothing is compiled. All points near a decoder's best accuracy are estimated: a small batch is bound by
reading the weights, so that more tokens per forward are best, and a large one by arithmetic, so that fewer places are
best. At each batch size the fastest point counts.

Each forward reads the weights and the used cache entries of all rows once. The products with the weights, and
attention, each take the time of their FLOPs or of their bytes at the chip's documented peaks, whichever is longer;
activations stay on the chip. Chips that share the heads then wait for two all-reduces per layer and one for the
embedding. tests/test_tpu_decoding.py compares these counts with those of the compiled program.

Real chips are slower than this roofline; by how much has not been measured for decoding. The latency of operations and
collectives, and rows that idle at the end of a queue are left out; a decoder that runs narrower forwards than its
compiled width is faster than estimated.

Axes: D hidden size, L layers, E experts, T places of all rows.
"""

import dataclasses

from refusion_jax.benchmarks.decode import shape_of
from refusion_jax.benchmarks.headline.results import BatchEstimate, Scored, TpuEstimate
from refusion_jax.decoding.cache import bytes_per_token
from refusion_jax.distributed.chips import Chip, find_chip
from refusion_jax.model.flops import weights_in_layers
from refusion_jax.model.shape import ModelConfig

MODEL = "8b"
BATCH_SIZES = tuple(2**i for i in range(9))
TOPOLOGIES = {"v5e:2x4": 8, "v5p:2x2x1": 4}  # number of chips, all of which share the heads
_DTYPE, _ITEMSIZE = "bfloat16", 2  # of weights, cache and activations


def tpu_estimates(points: list[Scored], problems: int) -> list[TpuEstimate]:
    """The estimates for a decoder, one per topology."""
    found = []
    for topology in TOPOLOGIES:
        batches = [[_estimate(point, problems, topology, size) for point in points] for size in BATCH_SIZES]
        best = [max(own, key=lambda estimate: estimate.tokens_per_second) for own in batches]
        found.append(TpuEstimate(*points[0].curve, MODEL, topology, best))
    return found


def _estimate(point: Scored, problems: int, topology: str, batch_size: int) -> BatchEstimate:
    tokens, forwards = point.tokens / problems, point.forwards / problems
    context = point.prompt_tokens + tokens / 2  # in the middle of an answer
    # A prefill counts as one more forward pass, since some decoders make their first drafts in it.
    prefills, seen = (1, context) if point.has_cache else (0, 0)

    def tokens_per_second(forwards: float, places: float, seen: float) -> float:
        costs = forward_costs(shape_of(MODEL), batch_size, places, seen, TOPOLOGIES[topology])
        return batch_size * tokens / (forwards * costs.seconds(find_chip(topology)))

    speed = tokens_per_second(forwards + prefills, point.width, seen)
    baseline = tokens_per_second(tokens + 1, 1, context)
    return BatchEstimate(
        batch_size=batch_size,
        settings=point.settings,
        tokens_per_second=speed,
        one_token_per_forward=baseline,
        speedup=speed / baseline,
        tokens_per_forward=tokens / forwards,
    )


@dataclasses.dataclass(frozen=True)
class ForwardCosts:
    """The costs of one forward pass on one chip."""

    weight_flops: float  # of products with weights, including the output head
    weight_bytes: float
    attention_flops: float
    cache_bytes: float  # of entries that are read, and of those that are written
    network_bytes: float  # received by the chip in all-reduces

    def seconds(self, chip: Chip) -> float:
        """Seconds at the chip's peaks."""
        products = max(self.weight_flops / chip.peak_flops, self.weight_bytes / chip.hbm_bandwidth)
        attention = max(self.attention_flops / chip.peak_flops, self.cache_bytes / chip.hbm_bandwidth)
        return products + attention + self.network_bytes / chip.ici_bandwidth


def forward_costs(model: ModelConfig, rows: int, places: float, context: float, chips: int = 1) -> ForwardCosts:
    """The costs of one forward on each of the chips that share the heads; `context` counts cache entries per row."""
    c, T = model, rows * places
    D, L, heads = c.hidden_size, c.num_hidden_layers, c.num_attention_heads * c.head_dim
    E, used = c.num_experts, c.num_experts_per_tok
    read = E * (1 - (1 - used / E) ** T) if E else 0  # experts to which at least one of the tokens goes
    multiplied, read = (weights_in_layers(c, n) + c.vocab_size * D for n in (used, read))
    return ForwardCosts(
        weight_flops=2 * T * multiplied / chips,
        weight_bytes=_ITEMSIZE * read / chips,
        attention_flops=4 * L * heads * T * (context + places) / chips,
        cache_bytes=rows * (context + places) * bytes_per_token(c, _DTYPE) / chips,
        network_bytes=(2 * L + 1) * 2 * T * D * _ITEMSIZE * (chips - 1) / chips,
    )

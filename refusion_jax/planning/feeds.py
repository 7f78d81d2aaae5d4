"""Estimates by arithmetic, without compiling, how fast a recorded decoding run would be on TPUs.

A recording (`generate --record_feeds`, decoding/recording.py) of one row at a time tells how many tokens each forward
of an answer fed, and how many cache entries they attended to. A batch of N rows is modelled as N such rows side by
side: rows of the queue are independent and finished ones are refilled, so a forward feeds N times the mean of a row.
The share of padding in the compiled shapes is taken from the recording. Not modelled: that forwards of one batch differ
in what they feed, that a decoder which speculates would speculate less in larger batches (so record it with and
without, and take the faster), and that rows run empty at the end of a queue.

A forward of T places, on one of K chips that share the heads, reads its shard of the weights and of the used cache
entries once; activations stay on the chip, as they do in the compiled program while there are few. Each product takes
the time of its FLOPs or of its bytes at the chip's documented peaks, whichever is longer. Two all-reduces a layer and
one for the embedding follow. tests/test_tpu_decoding.py compares these counts with those of the compiled program.
Prompts are prefilled as the queue does it, an eighth of the batch at once. The baseline is one token a forward for the
same answers: one place a row. Weights and cache that were recorded in int8 are priced so, for both.

Real chips are slower than this roofline. By how much has not been measured for decoding, so it is not calibrated. The
latencies that it leaves out, of collectives and operations, matter most for short forwards, that is for small batches,
and there they are the same for every forward of any decoder.

Axes: D hidden size, N query heads, G key/value heads, H head size, F mlp size, V vocabulary, L layers.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Self

import jax.numpy as jnp

from refusion_jax.decoding.cache import bytes_per_token
from refusion_jax.decoding.memory import REFILL
from refusion_jax.decoding.recording import Recording
from refusion_jax.distributed.chips import Chip
from refusion_jax.model.transformer import ModelConfig
from refusion_jax.planning.costs import Collective, Costs, Operation
from refusion_jax.planning.estimate import estimate

BATCH_SIZES = tuple(2**i for i in range(9))


@dataclasses.dataclass(frozen=True)
class Load:
    """The work of one forward, on the chips that share a row; numbers may be means."""

    tokens: float  # places that are computed
    cached: float  # entries of the cache that are read
    pairs: float  # of a token and a key that it attends to
    has_head: bool = True  # whether logits are computed

    def times(self, rows: float) -> Self:
        """The work for this many rows."""
        return dataclasses.replace(self, tokens=self.tokens * rows, cached=self.cached * rows, pairs=self.pairs * rows)


@dataclasses.dataclass(frozen=True)
class Target:
    """The model and the hardware it runs on."""

    model: ModelConfig
    dtype: str  # of computation
    chip: Chip
    mesh: Mapping[str, int]  # sizes of all axes; rows are not split over `sequence`
    weights: str = "same"  # "same" as dtype or "int8", see `Transformer.rounded`
    cache: str = "same"  # likewise

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the dtype of computation."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def tensor(self) -> int:
        """Chips that share the heads."""
        return self.mesh["tensor"]

    @property
    def shards(self) -> int:
        """Shards of the batch."""
        return self.mesh["replica"] * self.mesh["data"] * self.mesh["fsdp"]

    def product_bytes(self, inputs: int, outputs: int) -> int:
        """Bytes of the weights of one product, over all chips; in int8 with a scale for every output."""
        if self.weights == "int8":
            return outputs * (inputs + jnp.dtype(jnp.float32).itemsize)
        return self.itemsize * inputs * outputs

    def weight_bytes(self, with_embedding: bool = False) -> float:
        """Bytes of weights a chip that a forward reads, or of all with the embedding; with fsdp, after the gather."""
        c = self.model
        layer = sum(self.product_bytes(inputs, outputs) for inputs, outputs in _products(c))
        tables = 2 if with_embedding and not c.tie_word_embeddings else 1
        head = self.product_bytes(c.hidden_size, c.vocab_size)
        return (c.num_hidden_layers * layer + tables * head) / self.tensor

    def cache_bytes(self, entries: float) -> float:
        """Bytes a chip of this many cache entries, over all its rows."""
        stored = jnp.int8 if self.cache == "int8" else self.dtype
        return entries * bytes_per_token(self.model, stored) / self.tensor


def _products(c: ModelConfig) -> list[tuple[int, int]]:
    """(inputs, outputs) of the matrix products of a layer."""
    D, F, H = c.hidden_size, c.intermediate_size, c.head_dim
    heads, keys = c.num_attention_heads * H, c.num_key_value_heads * H
    return [(D, heads + 2 * keys), (heads, D), (D, 2 * F), (F, D)]


def forward_costs(load: Load, target: Target) -> Costs:
    """The costs of one forward on one chip."""
    c, size, K, T = target.model, target.itemsize, target.tensor, load.tokens
    L, D = c.num_hidden_layers, c.hidden_size
    operations = []
    for inputs, outputs in _products(c):
        operations.append(Operation(L, 2 * T * inputs * outputs / K, target.product_bytes(inputs, outputs) / K))
    per_pair = 4 * c.num_attention_heads * c.head_dim  # scores and values
    operations.append(Operation(L, per_pair * load.pairs / K, target.cache_bytes(load.cached + T) / L))
    if load.has_head:
        operations.append(Operation(1, 2 * T * c.vocab_size * D / K, target.product_bytes(D, c.vocab_size) / K))
    collectives = []
    if K > 1:
        count = 2 * L + 1
        received = count * 2 * T * D * size * (K - 1) / K
        collectives.append(Collective("all-reduce", "ici", count, overlapped=False, bytes=received))
    if (parts := target.mesh["fsdp"]) > 1:
        received = target.weight_bytes() * (parts - 1) / parts
        collectives.append(Collective("all-gather", "ici", L + 1, overlapped=True, bytes=received))
    return Costs(
        flops=sum(o.times * o.flops for o in operations),
        bytes=sum(o.times * o.bytes for o in operations),
        operations=tuple(operations),
        collectives=tuple(collectives),
    )


@dataclasses.dataclass(frozen=True)
class Workload:
    """What the forwards of a decoder feed to decode some answers."""

    load: Load  # mean of one row in one forward
    forwards: float  # mean of an answer
    tokens: float  # mean of an answer
    prefill: Load | None  # mean of one row
    capacity: int  # cache entries of a row

    @classmethod
    def recorded(cls, recording: Recording) -> Self:
        """The workload of a recorded run."""
        answers, times = _answers(recording), recording.row_forwards
        tokens = sum(one.tokens * one.times for one in recording.feeds) / times
        pairs = sum(one.tokens * (one.cached + one.tokens) * one.times for one in recording.feeds) / times
        cached = sum(one.cached * one.times for one in recording.feeds) / times
        filler = recording.filler
        return cls(
            load=Load(tokens * filler, cached, pairs * filler),
            forwards=times / answers,
            tokens=recording.tokens / answers,
            prefill=_prefill(recording) if recording.prefills else None,
            capacity=recording.cache_length,
        )

    @classmethod
    def one_token_a_forward(cls, recording: Recording) -> Self:
        """The workload of decoding the same answers left to right, one token a forward."""
        answers, tokens = _answers(recording), recording.tokens
        # The k-th token is predicted at the one before it, which attends to all that were given or decoded earlier.
        seen = sum(a.times * a.tokens * (a.given - 1 + (a.tokens - 1) / 2) for a in recording.answers) / tokens
        return cls(
            load=Load(1, seen, seen + 1),
            forwards=tokens / answers,
            tokens=tokens / answers,
            prefill=_prefill(recording),
            capacity=max(a.given + a.tokens for a in recording.answers),
        )


def _answers(recording: Recording) -> int:
    return sum(one.times for one in recording.answers)


def _prefill(recording: Recording) -> Load:
    """The mean prefill of a row: causal, and without logits."""
    answers = _answers(recording)
    given = sum(one.given * one.times for one in recording.answers) / answers
    pairs = sum(one.given * (one.given + 1) / 2 * one.times for one in recording.answers) / answers
    return Load(given, 0, pairs, has_head=False)


@dataclasses.dataclass(frozen=True)
class Price:
    """What a workload takes at one batch size."""

    tokens_per_second: float  # of the whole batch, prefills included
    forward_seconds: float
    memory_seconds: float  # of these, operations that are bound by memory
    arithmetic_seconds: float  # operations that are bound by arithmetic
    network_seconds: float  # collectives that are not overlapped
    prefill_share: float  # of all time
    fits: bool  # whether weights and cache fit into the memory of a chip

    @property
    def bound(self) -> str:
        """What takes most of a forward's time."""
        parts = {name: getattr(self, f"{name}_seconds") for name in ("memory", "arithmetic", "network")}
        return max(parts, key=parts.get)


def price(work: Workload, rows: int, target: Target) -> Price:
    """Estimates a workload at one batch size.

    Args:
      work: from a recording.
      rows: of the batch, over all chips.
      target: model and chips.
    """
    own, refill = math.ceil(rows / target.shards), math.ceil(rows / REFILL)
    forward = estimate(forward_costs(work.load.times(own), target), target.chip)
    prefill = 0.0
    if work.prefill:
        admitted = work.prefill.times(math.ceil(refill / target.shards))
        prefill = estimate(forward_costs(admitted, target), target.chip).roofline / refill
    decoding = work.forwards * forward.roofline / rows
    needed = target.weight_bytes(with_embedding=True) / target.mesh["fsdp"] + target.cache_bytes(own * work.capacity)
    return Price(
        tokens_per_second=work.tokens / (decoding + prefill),
        forward_seconds=forward.roofline,
        memory_seconds=forward.memory_bound,
        arithmetic_seconds=forward.operations - forward.memory_bound,
        network_seconds=forward.roofline - forward.operations,
        prefill_share=prefill / (decoding + prefill),
        fits=needed <= target.chip.hbm_limit,
    )

"""Where to cut a model, and how to round it, within the memory of a device and a limit on the seconds of an answer.

After section "unified optimization" of arXiv 2511.04002, of which we have read reviews: the split point, the bits of
weights and of the cache, the coding of hidden states and the length of the cache are chosen together. All of the few
thousand candidates are evaluated. Precision is reduced only if a limit requires it: of the candidates within both
limits, the ones with the least loss are taken, compared by hidden states, cache, weights; and of these the fastest.

A forward pass over T tokens takes

    N (f_d + T e_d) + (L - N) (f_s + T e_s) + T h + rtt + (bytes up + bytes down) / bandwidth

with N of L layers on the device, f and e a layer's fixed seconds and seconds per token, and h those of the output head,
in the same ratio to e_d as its weights to a layer's. The device has the head: for a vocabulary of 151,936 and 1,024
values per token, logits would be 148 times the bytes of hidden states. An answer takes its forward passes, and the
bytes of its prompt.
"""

import dataclasses
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from refusion_jax.cli.errors import UserError
from refusion_jax.decoding.cache import bytes_per_token
from refusion_jax.decoding.decoder import Decoder
from refusion_jax.model.flops import weights_in_layers
from refusion_jax.model.key_values import attend_over
from refusion_jax.model.ragged import Ragged
from refusion_jax.model.shape import ModelConfig
from refusion_jax.split.codec import CODECS
from refusion_jax.split.parts import abstract_part

BITS = {"int8": 8.25, "int4": 4.5}  # bits of a weight, including its share of a scale
PRECISIONS = ("same", *BITS)
_FRAME = 100  # bytes of a frame in addition to its tokens: numbers of the forward pass, TLS, TCP
_PLACE = 4  # bytes of a token's position
_MEASURED, _REPEATS = (1, 16), 5  # tokens of the forward passes that `measure` runs, and how often


@dataclasses.dataclass(frozen=True)
class Machine:
    """How fast a machine runs one layer."""

    fixed: float  # seconds, whatever the number of tokens
    each: float  # seconds per token

    @classmethod
    def of_flops(cls, config: ModelConfig, flops: float) -> "Machine":
        """A machine that is limited only by its arithmetic."""
        return cls(0.0, 2 * _used_by_token(config) / flops)

    def seconds(self, layers: int, tokens: float) -> float:
        return layers * (self.fixed + tokens * self.each)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One place to cut a model, with its precisions, and how it decodes then."""

    layers: int  # of the device
    weights: str  # one of PRECISIONS, on the device; so is the next
    cache: str
    codec: str  # one of CODECS
    fed: float  # tokens of a forward pass, one of `Decoder.typical`
    cache_length: int  # tokens that fit next to the weights
    memory: float  # bytes, with a cache for the desired tokens
    parts: dict[str, float]  # seconds of a forward pass, by part
    answer: float  # seconds

    @property
    def rank(self) -> tuple:
        """Lower is better: less loss of precision, by the number of steps, then by importance; then a faster answer."""
        lost = [*CODECS].index(self.codec), PRECISIONS.index(self.cache), PRECISIONS.index(self.weights)
        return sum(lost), lost, self.answer


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model, the machines that share it, the link between them, the desired answers, and the limits."""

    config: ModelConfig
    device: Machine
    server: Machine
    rtt: float  # seconds
    bandwidth: float  # bytes per second
    memory: float  # bytes for weights and cache on the device, at most; infinite without a limit, as is the latency
    latency: float  # seconds of an answer, at most
    prompt: int  # tokens
    new_tokens: int
    itemsize: int = 4  # bytes of the dtype of computation

    def choose(self, decoder: type[Decoder]) -> tuple[list[Candidate], Candidate, str]:
        """(the candidates within both limits; the best of them; which limits bind, and the costliest part of a pass).

        Raises UserError if there is none, with the least memory and the shortest answer of all candidates.
        """
        found = self.candidates(decoder)
        fitting = [each for each in found if each.memory <= self.memory and each.answer <= self.latency]
        if not fitting:
            memory, answer = min(each.memory for each in found), min(each.answer for each in found)
            raise UserError(
                f"nothing keeps both limits: the least memory is {memory / 2**30:.3g} of --device_memory="
                f"{self.memory / 2**30:g} GiB, the shortest answer {answer:.3g} of --latency={self.latency:g} s"
            )
        best = min(fitting, key=lambda each: each.rank)
        better = [each for each in found if each.rank < best.rank]
        has_limit = {
            "device memory": any(each.memory > self.memory for each in better),
            "latency": any(each.answer > self.latency for each in better),
        }
        limits = " and ".join(name for name, binds in has_limit.items() if binds)
        slowest = max(best.parts, key=best.parts.get)
        return fitting, best, f"{limits or 'no limit'}; most of a forward pass is {slowest}"

    def candidates(self, decoder: type[Decoder]) -> list[Candidate]:
        """All places to cut the model, at all precisions."""
        found, dtypes = [], (f"float{8 * self.itemsize}", *BITS)
        one_layer = dataclasses.replace(self.config, num_hidden_layers=1)
        of_layer = {cache: bytes_per_token(one_layer, dtype) for cache, dtype in zip(PRECISIONS, dtypes, strict=True)}
        for layers in range(1, self.config.num_hidden_layers):
            for weights, cache, codec, fed in itertools.product(PRECISIONS, PRECISIONS, CODECS, decoder.typical):
                weight_bytes, token_bytes = self._weight_bytes(layers, weights), layers * of_layer[cache]
                parts, answer = self.seconds(layers, codec, decoder.typical[fed], fed)
                room = int(min(max(self.memory - weight_bytes, 0) / token_bytes, 2**31))
                memory = weight_bytes + (self.prompt + self.new_tokens) * token_bytes
                found.append(Candidate(layers, weights, cache, codec, fed, room, memory, parts, answer))
        return found

    def seconds(self, layers: int, codec: str, tokens: float, fed: float) -> tuple[dict[str, float], float]:
        """(seconds per forward, by part; seconds of an answer), with `tokens` committed and `fed` fed per forward."""
        c, rest = self.config, self.config.num_hidden_layers - layers
        each = CODECS[codec].bytes_per_token(c.hidden_size, self.itemsize)
        head = self.device.each * c.vocab_size * c.hidden_size / _used_by_token(c)
        parts = {
            "the device": self.device.seconds(layers, fed) + fed * head,
            "the server": self.server.seconds(rest, fed),
            "the round trip": self.rtt,
            "the bandwidth": (2 * (_FRAME + fed * each) + fed * _PLACE) / self.bandwidth,
        }
        for_token = (each + _PLACE) / self.bandwidth + self.device.each * layers + self.server.each * rest
        return parts, sum(parts.values()) * self.new_tokens / tokens + self.prompt * for_token

    def _weight_bytes(self, layers: int, weights: str) -> float:
        """Bytes of the embedding, the output head and the first layers, on the device."""
        c = self.config
        each = BITS[weights] / 8 if weights in BITS else self.itemsize
        outside = c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
        first = dataclasses.replace(
            c, num_hidden_layers=layers, first_k_dense_replace=min(layers, c.first_k_dense_replace)
        )
        return each * (outside + weights_in_layers(first, c.num_experts))


def _used_by_token(config: ModelConfig) -> float:
    """The number of weights of one layer by which a token is multiplied."""
    return weights_in_layers(config, config.num_experts_per_tok) / config.num_hidden_layers


def measure(config: ModelConfig, dtype: str, weights: str = "same", cache: str = "same") -> Machine:
    """Measures this machine with the last layers of a model with random weights; the fastest repeat counts."""
    L = config.num_hidden_layers
    graphdef, state = nnx.split(abstract_part(config, max(L - 2, 1), L, dtype))
    draw = np.random.default_rng(0)
    state = jax.tree.map(lambda w: jnp.asarray(draw.normal(0, 0.02, w.shape), w.dtype), state)
    part = nnx.merge(graphdef, state).rounded(weights, cache)
    before, cached = -part.layers.first, part.empty_cache(1, 64)
    graphdef, params = nnx.split(part)

    @jax.jit
    def run(params, x):
        ragged = Ragged.whole(*x.shape[:2])
        attend = attend_over(cached, jnp.full((1,), 32), jnp.ones((1, *2 * x.shape[1:2]), bool), ragged, before)
        return nnx.merge(graphdef, params).through_layers(x, jnp.zeros(x.shape[:2], jnp.int32), attend)[0]

    took = []
    for tokens in _MEASURED:
        x = jnp.ones((1, tokens, config.hidden_size), part.dtype)
        run(params, x).block_until_ready()
        times = []
        for _ in range(_REPEATS):
            began = time.perf_counter()
            run(params, x).block_until_ready()
            times.append(time.perf_counter() - began)
        took.append(min(times) / part.config.num_hidden_layers)
    few, many = _MEASURED
    each = max(took[1] - took[0], 0.0) / (many - few)
    return Machine(max(took[0] - few * each, 0.0), each)

"""Bits per byte of held-out responses, given their prompts, during training.

This is the exact likelihood for slots in reading order, or the usual one of a left-to-right model; for masked
diffusion, one draw of the bound for each document, the same in every evaluation. The system defines the forward that
scores a text, as in `evaluation/likelihood.py`; here the rows are made once and stay on the devices.

Axes: N rows, padded with empty ones to whole batches of B; T tokens of a row.
"""

import math
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from refusion_jax.data.interface import Tokenizer
from refusion_jax.distributed import sharding
from refusion_jax.evaluation.likelihood import bytes_of, documents, lay_out, log_probabilities, packed
from refusion_jax.systems.registry import find_system
from refusion_jax.systems.scoring import ScoredText

_ROUNDING = 256  # T is a multiple of this; short documents share a row
_SLOT_SIZE = 8  # as in `evaluate`


def bits_per_byte(
    config: ml_collections.ConfigDict,
    rows: Iterable[Mapping[str, np.ndarray]],
    tokenizer: Tokenizer,
    graphdef: nnx.GraphDef,
    mesh: Mesh,
) -> Callable[[dict], dict[str, jax.Array | bool]] | None:
    """Builds (weights) -> {"eval_bits_per_byte": float32 scalar}, with a mark if it is a bound.

    Args:
      config: the run's.
      rows: of the held-out set.
      tokenizer: of the rows.
      graphdef: of the transformer.
      mesh: of the weights.

    Returns:
      None if the likelihood of the objective is not known, or the rows hold no text.
    """
    system = find_system(config.objective)
    if system.scoring is None:
        return None
    prompts, responses = documents(rows, system.scoring.needs_prompt)
    size = bytes_of(responses, tokenizer)
    if not size:
        return None
    feeds = [
        system.scoring.forward(
            ScoredText(p, r, _SLOT_SIZE, "left_to_right", tokenizer.mask_id, (0, number, 0), f"document {number}")
        )
        for number, (p, r) in enumerate(zip(prompts, responses, strict=True))
        if len(r)
    ]
    multiple = math.lcm(_ROUNDING, sharding.shard_count(mesh, "length"))
    T = -(-max(map(len, feeds)) // multiple) * multiple
    in_rows = packed([len(feed) for feed in feeds], T)
    N = -(-len(in_rows) // config.batch_size) * config.batch_size
    where = sharding.sharding(mesh, "batch", "length")
    arrays = {
        name: jax.make_array_from_callback(x.shape, where, lambda index, x=x: x[index])
        for name, x in lay_out(feeds, in_rows, N, T).items()
    }
    parts = N // config.batch_size * config.accumulation

    def evaluate(params: dict, arrays: dict[str, jax.Array]) -> jax.Array:
        def part(_, some):
            log_p, *_ = log_probabilities(nnx.merge(graphdef, params), some)
            return None, jnp.sum(jnp.where(some["weights"] > 0, some["weights"] * log_p, 0.0))

        nats = jnp.sum(jax.lax.scan(part, None, sharding.split_batch(arrays, parts))[1])
        return -nats / size / np.log(2)

    jitted = jax.jit(evaluate, out_shardings=sharding.sharding(mesh))
    mark = {"eval_bits_per_byte_is_bound": True} if system.scoring.is_bound else {}
    return lambda params: {"eval_bits_per_byte": jitted(params, arrays)} | mark

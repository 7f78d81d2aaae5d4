"""Measures recall and time of the approximate output head, to choose --decode.head_rows.

  python -m refusion_jax.bench head --checkpoint=runs/quickstart
  python -m refusion_jax.bench head --vocabulary=151936 --hidden_size=1024 --tokens=1,8,64

With a checkpoint, the model predicts the tokens of one batch of its own training data. For each number of rows,
`recall` is the share of tokens whose most probable prediction is among the rows, and `mass` the mean probability of all
rows chosen. Without a checkpoint, the head alone is timed on random weights, exact and approximate in turns, with the
bytes that a forward reads.
"""

import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from etils import epath

from refusion_jax.batch.batch import Batch, is_labelled
from refusion_jax.checkpoints.directory import find_step
from refusion_jax.checkpoints.load import load_model
from refusion_jax.cli import flag_values
from refusion_jax.config.run_config import read_config
from refusion_jax.model.approximate_head import rounded_head, shortlisted_logits
from refusion_jax.model.layers import head_product
from refusion_jax.model.transformer import Transformer
from refusion_jax.training.inspection import training_batch


def define_flags(own: flags.FlagValues) -> None:
    """The flags of this benchmark."""
    flags.DEFINE_string("checkpoint", None, "A run of ours, whose recall is measured", flag_values=own)
    flags.DEFINE_list("rows", ["4", "16", "64", "128"], "Rows computed exactly, each measured", flag_values=own)
    flags.DEFINE_list("tokens", ["1", "8", "64"], "Tokens of a forward, each timed", flag_values=own)
    flags.DEFINE_integer("vocabulary", 32_768, "Rows of the head that is timed", lower_bound=2, flag_values=own)
    flags.DEFINE_integer("hidden_size", 1024, "Its width", lower_bound=1, flag_values=own)
    flags.DEFINE_integer("repeats", 9, "Runs of each, in turns; the median counts", lower_bound=1, flag_values=own)


def main(own: flags.FlagValues) -> None:
    """Prints one JSON object a number of rows (and of tokens)."""
    rows, tokens = (flag_values.read_counts(name, own[name].value) for name in ("rows", "tokens"))
    if own.checkpoint:
        directory = find_step(epath.Path(own.checkpoint))[0]
        batch = training_batch(read_config(directory), directory, step=0)[2]
        records = recall(load_model(own.checkpoint), batch, rows)
    else:
        records = timed(own.vocabulary, own.hidden_size, tokens, rows, own.repeats)
    for record in records:
        print(json.dumps({"benchmark": "head"} | record), flush=True)


def recall(model: Transformer, batch: Batch, rows: list[int]) -> list[dict]:
    """Recall and mass at the labelled tokens of a batch, for each number of rows."""
    hidden = model.hidden(batch.inputs, batch.positions, batch.visibility)
    x = hidden[np.asarray(is_labelled(batch))][None]  # [1, N, D]
    exact = model.logits(x)
    log_p, best = jax.nn.log_softmax(exact), jnp.argmax(exact, axis=-1)
    head = model.output_head
    records = []
    for count in rows:
        found = jnp.isfinite(shortlisted_logits(x, head, rounded_head(head), count))
        records.append(
            {
                "rows": count,
                "vocabulary": model.config.vocab_size,
                "tokens": x.shape[1],
                "recall": float(jnp.mean(jnp.take_along_axis(found, best[..., None], axis=-1))),
                "mass": float(jnp.mean(jnp.sum(jnp.where(found, jnp.exp(log_p), 0), axis=-1))),
            }
        )
    return records


def timed(vocabulary: int, hidden_size: int, tokens: list[int], rows: list[int], repeats: int) -> list[dict]:
    """Milliseconds of a head of random weights, and the bytes that it reads."""
    head = jax.random.normal(jax.random.key(0), (vocabulary, hidden_size))
    rounded = jax.jit(rounded_head)(head)
    ways = {0: jax.jit(head_product)} | {
        count: jax.jit(functools.partial(shortlisted_logits, rounded=rounded, rows=count)) for count in rows
    }
    records = []
    for count in tokens:
        x = jax.random.normal(jax.random.key(1), (1, count, hidden_size))
        taken = {name: [] for name in ways}
        for turn in range(repeats + 1):
            for name, function in ways.items():
                began = time.perf_counter()
                jax.block_until_ready(function(x, head))
                if turn:
                    taken[name].append(1e3 * (time.perf_counter() - began))
        ms = {name: float(np.median(values)) for name, values in taken.items()}
        size = vocabulary * hidden_size
        for name in rows:
            own = {"tokens": count, "rows": name, "ms": ms[name], "exact_ms": ms[0]}
            records.append(own | {"bytes": size + 4 * count * name * hidden_size, "exact_bytes": 4 * size})
    return records

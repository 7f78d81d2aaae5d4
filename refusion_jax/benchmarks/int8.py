"""Measures what int8 weights and cache change: bytes, logits, held-out loss and answers, on the built-in problems.

  python -m refusion_jax.bench int8 --checkpoint=runs/quickstart

For each combination of --decode.weights and --decode.cache it prints the bytes of the arrays; on held-out problems,
corrupted with the same noise for all, the error of the logits at labelled tokens (root mean square, relative to the
standard deviation of the logits), the loss and its perplexity; the share of problems answered rightly; and the shares
of answers, and of their tokens by position, that are the same as without rounding.
"""

import json
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from absl import flags
from etils import epath
from flax import nnx
from rich.console import Console
from rich.table import Table

from refusion_jax.batch.batch import Batch, is_labelled, loss_terms
from refusion_jax.batch.rows import Rows, noise_keys
from refusion_jax.benchmarks._problems import MAX_NEW_TOKENS, checkpoints_of, held_out, share_right
from refusion_jax.checkpoints.directory import find_step
from refusion_jax.checkpoints.load import choose_method, load_model, load_tokenizer
from refusion_jax.config.run_config import read_config
from refusion_jax.data.examples import Example
from refusion_jax.data.packing import pack, tokenize, usable
from refusion_jax.decoding.cache import Cache
from refusion_jax.model.transformer import Transformer
from refusion_jax.systems.api import DecodeSettings, decode
from refusion_jax.training.inspection import corrupted

_WAYS = (("same", "same"), ("int8", "same"), ("same", "int8"), ("int8", "int8"))  # weights, cache


def define_flags(own: flags.FlagValues) -> None:
    """The flags of this benchmark."""
    flags.DEFINE_string("checkpoint", None, "A run on the built-in problems, or one step of it", flag_values=own)
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of what is not in int8", flag_values=own)
    flags.DEFINE_integer("problems", 200, "How many held-out problems", lower_bound=1, flag_values=own)
    flags.DEFINE_integer("batch_size", 64, "Prompts decoded at once", lower_bound=1, flag_values=own)


def main(own: flags.FlagValues) -> None:
    """Prints one JSON object a way, then a table."""
    (checkpoint,) = checkpoints_of(own)
    columns = ("weight_bytes", "cache_bytes_per_token", "logit_error", "loss", "right", "answers_kept", "tokens_kept")
    formats = ("{:,}", "{:,}", "{:.2%}", "{:.4f}", "{:.1%}", "{:.1%}", "{:.1%}")
    table = Table("weights", "cache", *(name.replace("_", " ") for name in columns))
    for record in measure(checkpoint, own.dtype, own.problems, own.batch_size):
        print(json.dumps(record), flush=True)
        values = (how.format(record[name]) for how, name in zip(formats, columns, strict=True))
        table.add_row(record["weights"], record["cache"], *values)
    Console().print(table)


def measure(checkpoint: str, dtype: str, count: int, batch_size: int) -> Iterator[dict]:
    """Yields one record for each combination, the first without rounding."""
    model, tokenizer = load_model(checkpoint, dtype), load_tokenizer(checkpoint)
    config = read_config(find_step(epath.Path(checkpoint))[0])
    problems = held_out(count)
    examples = [Example(problem.query, problem.response, problem.query) for problem in problems]
    packed = pack(usable(tokenize(examples, tokenizer, config.row_length), "stop"), config.row_length)
    batch = corrupted(config, tokenizer, Rows(**packed[:]), noise_keys(0, 0, len(packed)))
    prompts = tokenizer.encode_prompts([problem.query for problem in problems])
    method = choose_method(epath.Path(checkpoint), None)
    exact_logits, exact_answers = None, None
    for weights, cache in _WAYS:
        rounded, how = model.rounded(weights, cache), {"weights": weights, "cache": cache}
        settings = DecodeSettings(method, max_new_tokens=MAX_NEW_TOKENS, batch_size=batch_size, **how)
        answers, (logits, loss) = decode(model, prompts, settings).tokens, likelihood(rounded, batch)
        if exact_answers is None:
            exact_logits, exact_answers = logits, answers
        pairs = list(zip(answers, exact_answers, strict=True))
        same = sum(a == b for pair in pairs for a, b in zip(*pair, strict=False))
        yield {
            "benchmark": "int8",
            **how,
            "dtype": dtype,
            "problems": count,
            "weight_bytes": sum(x.nbytes for x in jax.tree.leaves(nnx.state(rounded))),
            "cache_bytes_per_token": sum(x.nbytes for x in jax.tree.leaves(Cache.empty(rounded, 1, 1).entries)),
            "logit_error": float(jnp.sqrt(jnp.mean((logits - exact_logits) ** 2)) / jnp.std(exact_logits)),
            "loss": loss,
            "perplexity": math.exp(loss),
            "right": share_right(problems, answers, tokenizer),
            "answers_kept": sum(a == b for a, b in pairs) / count,
            "tokens_kept": same / sum(map(len, exact_answers)),
        }


def likelihood(model: Transformer, batch: Batch) -> tuple[jax.Array, float]:
    """(logits of labelled tokens, mean of the loss terms in nats), with keys and values rounded as in the cache."""

    @jax.jit
    def run(model, batch):
        rows = len(batch.inputs)
        none = Cache.empty(model, rows, 0)
        logits, _ = model.extend(batch.inputs, batch.positions, none.entries, none.length, batch.visibility.mask())
        return logits[:, :, : model.config.num_tokens], loss_terms(logits, batch)

    logits, terms = run(model, batch)
    return logits[is_labelled(batch)], float(sum(terms.values()) / len(terms))

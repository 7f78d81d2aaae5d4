"""Measures the speed of `prepare` and of the loader, and what packing saves; prints JSON lines, then a table.

  python -m refusion_jax.bench data

`prepare` with one worker is compared with the tokenizer alone on the same text, and the loader with the training step
of the quickstart's model, each in the same run.
"""

import functools
import json
import os
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from absl import flags
from etils import epath
from flax import nnx
from rich.console import Console
from rich.table import Table

from refusion_jax.batch.rows import Rows
from refusion_jax.config import default_config, make_objective
from refusion_jax.data.examples import Fields
from refusion_jax.data.fast_tokenizer import load_tokenizer_file
from refusion_jax.data.loader import host_batches
from refusion_jax.data.packing import fit
from refusion_jax.data.preparation import plan_chunks, prepare
from refusion_jax.data.prepared import PreparedRows
from refusion_jax.data.shards import Settings
from refusion_jax.data.tokenizer import MASK_PIECE, SentencePieceTokenizer
from refusion_jax.model.transformer import ModelConfig, Transformer, logical_axes
from refusion_jax.training.optimizer import make_optimizer, make_schedule
from refusion_jax.training.train_step import init_state, make_train_step

# Tokens a document: like GSM8K's questions with worked answers, or with a long tail like web pages.
LENGTHS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "GSM8K-like": lambda rng, n: np.clip(rng.lognormal(5.1, 0.4, n), 40, 600).astype(int),
    "long tail": lambda rng, n: np.clip(20 * (1 + rng.pareto(0.8, n)), 1, 4096).astype(int),
}


def measure_fill(documents: int, row_length: int) -> list[dict]:
    """Share of positions with a real token: packed, padded to the row, and padded to the longest of 32."""
    found = []
    for kind, draw in LENGTHS.items():
        lengths = np.minimum(draw(np.random.default_rng(0), documents // 32 * 32), row_length)
        rows = fit(lengths.tolist(), row_length)
        longest = lengths.reshape(-1, 32).max(axis=1).sum() * 32
        found.append(
            {
                "what": f"fill, {kind}, rows of {row_length}",
                "packed": lengths.sum() / (len(rows) * row_length),
                "padded": lengths.sum() / (len(lengths) * row_length),
                "padded_to_longest_of_32": lengths.sum() / longest,
            }
        )
    return found


def write_text(path: Path, mebibytes: int) -> None:
    """Writes JSONL of queries and responses, cut at random from the source of the standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    words = " ".join(file.read_text() for file in files).split(" ")
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        while file.tell() < mebibytes << 20:
            at, query, response = rng.integers(len(words) - 300), rng.integers(20, 60), rng.integers(30, 160)
            item = {
                "query": " ".join(words[at : at + query]),
                "response": " ".join(words[at + query : at + query + response]),
            }
            file.write(json.dumps(item) + "\n")


def train_tokenizers(directory: Path, texts: list[str]) -> dict[str, Path]:
    """Trains a sentencepiece model and a byte-level BPE of Hugging Face's library, with 16,000 pieces each."""
    (directory / "tokenizer.model").write_bytes(SentencePieceTokenizer.train(texts, 16_000).model)
    fast = tokenizers.Tokenizer(tokenizers.models.BPE())
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=16_000, special_tokens=["<eos>", "<pad>"], show_progress=False)
    fast.train_from_iterator(texts, trainer)
    fast.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "pad_token": "<pad>"}))
    return {"sentencepiece": directory / "tokenizer.model", "tokenizers": directory / "tokenizer.json"}


def measure_prepare(directory: Path, lines: list[dict], library: str, file: Path, repeats: int) -> dict:
    """Tokens a second on one core, by the tokenizer alone and by `prepare`, in turns; the best of each."""
    tokenizer = load_tokenizer_file(file, MASK_PIECE)
    if isinstance(tokenizer, SentencePieceTokenizer):
        tokenizer.threads = 1
    settings = Settings(str(file), MASK_PIECE, "unset", 4096, "best_fit", "skip", False, 0.0, Fields(flag="--"))
    alone, whole = [], []
    for repeat in range(repeats):
        began, tokens = time.process_time(), 0
        for start in range(0, len(lines), 1024):
            batch = lines[start : start + 1024]
            tokens += sum(map(len, tokenizer.encode([line["query"] for line in batch])))
            tokens += sum(map(len, tokenizer.encode([line["response"] for line in batch])))
        alone.append(tokens / (time.process_time() - began))
        began = time.process_time()
        manifest = prepare(
            plan_chunks([str(directory / "text.jsonl")], 64 << 20),
            epath.Path(directory) / f"{library}{repeat}",
            settings,
            tokenizer,
            command="",
            processes=1,
            started=lambda what, size: None,
            advance=lambda size, tokens: None,
        )
        whole.append(manifest.tokens / (time.process_time() - began))
    return {
        "what": f"prepare, tokens/s of one core, {library}",
        "tokenizer_alone": max(alone),
        "prepare": max(whole),
        "ratio": statistics.median(w / a for w, a in zip(whole, alone, strict=True)),
        "fill": manifest.fill,
    }


def measure_loader(path: Path, batch_size: int, steps: int, verify: bool) -> dict:
    """Rows and tokens a second from a prepared directory, shuffled, with threads that read ahead."""
    rows = PreparedRows(str(path), verify)
    batches = host_batches(rows, range(batch_size), batch_size=batch_size, seed=0, first_step=0, last_step=steps)
    next(batches)
    began = time.monotonic()
    tokens = sum(batch["tokens"].size for batch in batches)
    seconds = time.monotonic() - began
    return {
        "what": f"loader, rows of {rows.manifest.row_length}{', checksums' if verify else ''}",
        "rows_per_second": batch_size * (steps - 1) / seconds,
        "tokens_per_second": tokens / seconds,
    }


def measure_step(batch_size: int, row_length: int, steps: int) -> float:
    """Tokens a second of the training step of the quickstart's model on one device."""
    config = default_config()
    model = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    model |= {"head_dim": 32, "intermediate_size": 384, "vocab_size": 512}
    config.model.update(model)
    ids = {"num_tokens": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 4}
    shape = ModelConfig(**config.model, max_position_embeddings=row_length, **ids)
    built = Transformer(shape, nnx.Rngs(0), config.dtype, config.remat)
    schedule = make_schedule(config)
    optimizer = make_optimizer(config, schedule, logical_axes(built))
    graphdef, params = nnx.split(built)
    step_fn = make_train_step(graphdef, make_objective(config, 4), optimizer, schedule, 0, 1)
    state, step = init_state(nnx.to_pure_dict(params), optimizer), jax.jit(step_fn, donate_argnums=0)
    ones = jnp.ones((batch_size, row_length), jnp.int32)
    rows = Rows(ones, ones, ones.astype(bool))
    state, _ = jax.block_until_ready(step(state, rows))
    began = time.monotonic()
    for _ in range(steps):
        state, _ = step(state, rows)
    jax.block_until_ready(state)
    return steps * batch_size * row_length / (time.monotonic() - began)


def define_flags(own: flags.FlagValues) -> None:
    """The flags of this benchmark."""
    number = functools.partial(flags.DEFINE_integer, flag_values=own, lower_bound=1)
    number("mebibytes", 32, "MiB of text to prepare")
    number("repeats", 3, "How often to prepare it")
    number("documents", 100_000, "Documents to pack", lower_bound=32)  # some for each of the shards
    number("steps", 100, "Batches to load, and steps to train", lower_bound=2)  # the first is not timed


def main(own: flags.FlagValues) -> None:
    """Prints one JSON object a measurement, then a table."""
    results = [result for length in (1024, 4096) for result in measure_fill(own.documents, length)]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_text(directory / "text.jsonl", own.mebibytes)
        lines = [json.loads(line) for line in (directory / "text.jsonl").open()]
        files = train_tokenizers(directory, [line["response"] for line in lines[:20_000]])
        results += [measure_prepare(directory, lines, *file, own.repeats) for file in files.items()]
        results += [measure_loader(directory / "sentencepiece0", 32, own.steps, verify) for verify in (False, True)]
        step = measure_step(32, 64, own.steps)
    loaded = results[-2]["tokens_per_second"]
    results.append({"what": "quickstart's step, tokens/s", "step": step, "loader": loaded, "ratio": loaded / step})
    table = Table("what", "figures")
    for result in results:
        print(json.dumps(result), flush=True)
        shown = (f"{name} {value:,.4g}" for name, value in result.items() if name != "what")
        table.add_row(result["what"], "\n".join(shown))
    Console().print(table)

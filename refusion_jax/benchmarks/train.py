"""Compares training speed in one run: our step with PyTorch's, and packed rows with padded ones.

  python -m refusion_jax.bench train

The PyTorch step is a plain Qwen3 of transformers with the same shape, loss, batch and dtype: weighted cross-entropy,
gradient clipping and AdamW. Document lengths are drawn from a built-in long-tailed distribution or from the file
--lengths, which holds one length a line or JSONL with {"query", "response"} (counted in bytes / 4).
"""

import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from refusion_jax.batch.rows import Rows, noise_keys
from refusion_jax.cli.errors import UserError
from refusion_jax.config import default_config, make_objective
from refusion_jax.config.model import model_config
from refusion_jax.distributed import sharding
from refusion_jax.distributed.json_files import read_json_lines
from refusion_jax.training.program import train_program


def define_flags(own: flags.FlagValues) -> None:
    """The flags of this benchmark."""
    flags.DEFINE_integer("steps", 5, "Steps timed of each program, interleaved", flag_values=own)
    flags.DEFINE_integer("batch_size", 8, "Rows per step", flag_values=own)
    flags.DEFINE_integer("row_length", 512, "Tokens per row", flag_values=own)
    flags.DEFINE_integer("hidden_size", 256, "Width; the model has 4 layers of heads of 64", flag_values=own)
    flags.DEFINE_string("lengths", "", "Where document lengths come from (see above)", flag_values=own)
    flags.DEFINE_bool("torch", True, "Compare with PyTorch: pip install -e '.[compare]'", flag_values=own)


def main(own: flags.FlagValues) -> None:
    """Prints one JSON object per measurement, then a table."""
    if own.row_length < 2 or own.batch_size < 1 or own.steps < 1:
        raise UserError("--row_length must be at least 2, --batch_size and --steps 1")
    if own.hidden_size < 64 or own.hidden_size % 64 or own.hidden_size // 64 % 2 and own.hidden_size > 64:
        raise UserError(
            f"--hidden_size={own.hidden_size}: must be 64 or a multiple of 128, as two heads share their keys"
        )
    lengths = read_lengths(own.lengths)

    config = default_config()
    config.batch_size, config.row_length = own.batch_size, own.row_length
    config.model.hidden_size, config.model.intermediate_size = own.hidden_size, 3 * own.hidden_size
    config.model.num_attention_heads = own.hidden_size // 64
    config.model.num_key_value_heads = max(own.hidden_size // 128, 1)

    packed, padded = (make_rows(lengths, own.batch_size, own.row_length, pack) for pack in (True, False))
    programs = {"ours, packed": ours(config, packed), "ours, padded": ours(config, padded)}
    if own.torch:
        programs["PyTorch, padded"] = theirs(config, padded)
        programs["PyTorch, packed"] = theirs(config, packed)
    real = {"packed": int((packed.segment_ids > 0).sum()), "padded": int((padded.segment_ids > 0).sum())}
    seconds = interleaved(programs, own.steps)

    table = Table("step", "ms", "real tokens per second", "against ours, packed")
    reference = None
    for name, times in seconds.items():
        rate = real[name.split(", ")[1]] / float(np.median(times))
        reference = reference or rate
        record = {"benchmark": "train", "step": name, "ms": 1e3 * float(np.median(times)), "tokens_per_second": rate}
        record |= {"ratio": rate / reference, "fill": real[name.split(", ")[1]] / packed.tokens.size}
        record |= {"batch_size": own.batch_size, "row_length": own.row_length, "hidden_size": own.hidden_size}
        print(json.dumps(record), flush=True)
        table.add_row(name, f"{record['ms']:.0f}", f"{rate:,.0f}", f"{rate / reference:.2f}")
    Console().print(table)


def interleaved(programs: dict[str, Callable[[], None]], steps: int) -> dict[str, list[float]]:
    """Seconds of each step; programs are interleaved, so that other load on the machine affects all of them alike."""
    for run in programs.values():
        run()  # compiles
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(steps):
        for name, run in programs.items():
            time.sleep(0.5)  # PyTorch's threads keep spinning for 0.2 s, which would slow down the next program
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def read_lengths(path: str) -> np.ndarray:
    """Lengths of documents in tokens; by default log-normal, with a median of 150 and a tenth above 470."""
    if not path:
        return np.exp(np.random.default_rng(0).normal(np.log(150), 0.9, 10_000)).astype(int) + 2
    lengths = []
    for number, value in read_json_lines(path, int | dict[str, Any]):
        if isinstance(value, dict):
            value = sum(len(str(x).encode()) for x in value.values()) // 4 + 2
        if type(value) is not int or not 2 <= value < 2**31:
            raise UserError(f"--lengths={path}:{number}: must be a length of at least 2 tokens, or an object of texts")
        lengths.append(value)
    if not lengths:
        raise UserError(f"--lengths={path}: holds no length")
    return np.array(lengths)


def make_rows(lengths: np.ndarray, batch_size: int, row_length: int, pack: bool) -> Rows:
    """Rows of random tokens in documents of these lengths, at most a row; a third of each is its prompt."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 4000, (batch_size, row_length)).astype(np.int32)
    segments, response = np.zeros_like(tokens), np.zeros(tokens.shape, bool)
    for row in range(batch_size):
        start, segment = 0, 1
        while True:
            length = min(int(rng.choice(lengths)), row_length)
            if start + length > row_length:
                break
            segments[row, start : start + length] = segment
            response[row, start + length // 3 : start + length] = True
            start, segment = start + length, segment + 1
            if not pack:
                break
    return Rows(tokens, segments, response)


def ours(config, rows: Rows) -> Callable[[], None]:
    """Runs one of our steps, on all devices."""
    mesh = sharding.make_mesh(config.mesh)
    program = train_program(config, model_config(config), mesh)
    with jax.set_mesh(mesh):
        state = jax.jit(program.fresh_state, out_shardings=program.shardings)()
    rows = jax.device_put(rows, sharding.sharding(mesh, "batch", "length"))

    def run() -> None:
        nonlocal state
        with jax.set_mesh(mesh):
            state, metrics = program.step(state, rows)
        metrics["loss"].block_until_ready()

    return run


def theirs(config, rows: Rows) -> Callable[[], None]:
    """Runs one step of PyTorch, on a batch that our objective has corrupted in advance, with its attention mask."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UserError("--torch needs PyTorch and transformers: pip install -e '.[compare]', or --notorch") from error
    m = config.model
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
    )
    shape = {name: m[name] for name in names.split()}
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**shape, tie_word_embeddings=m.tie_word_embeddings, attn_implementation="sdpa")
    )
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, weight_decay=config.weight_decay)
    objective = make_objective(config, m.vocab_size - 1)
    batch = jax.jit(objective.corrupt)(jax.tree.map(jnp.asarray, rows), noise_keys(0, 0, config.batch_size))
    weight = torch.tensor(sum(np.asarray(w) for w in batch.weights.values()))
    inputs, positions, labels = (
        torch.tensor(np.asarray(x), dtype=torch.long) for x in (batch.inputs, batch.positions, batch.labels)
    )
    mask = torch.tensor(np.asarray(batch.visibility.mask()))[:, None]

    def run() -> None:
        logits = model(input_ids=inputs, position_ids=positions, attention_mask=mask, use_cache=False).logits
        entropy = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        loss = (entropy * weight.flatten()).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        loss.item()

    return run

"""Compares our decoder with the authors' PyTorch code, on the same weights, prompts and settings.

  python -m refusion_jax.bench authors --checkout=ReFusion --checkpoint=tests/golden/model --prompts=prompts.jsonl
  python -m refusion_jax.bench authors --checkout=ReFusion --size=medium --decode.token_threshold=0

--checkout is a clone of https://github.com/ML-GSAI/ReFusion, whose code is run by --python, an interpreter that has
torch and the version of transformers that their code asks for (4.52). They decode one prompt at a time with a KV cache,
on one thread or on one for every core, whichever is faster. We decode as many at a time as --batch_sizes say, by their
algorithm of infilling and by exact infilling, or by what each --setup says. Repeats are interleaved; `ratio` is the
median over the repeats of our tokens per second over theirs, between the least and the most. `same` is the share of
answers that are equal, which all should be by their algorithm in float32, except where their code has a defect. Only
decoded tokens count, and no compilation.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from absl import flags
from flax import nnx
from rich.console import Console
from rich.table import Table

from refusion_jax.benchmarks.decode import (
    define_shared,
    prompts_in,
    random_model,
    random_prompts,
    read_setup,
    read_shared,
    timed,
)
from refusion_jax.checkpoints.load import load_model
from refusion_jax.cli import flag_values
from refusion_jax.cli.errors import UserError
from refusion_jax.decoding.requests import prepare
from refusion_jax.distributed.cores import available_cores
from refusion_jax.model import huggingface
from refusion_jax.model.transformer import Transformer
from refusion_jax.systems.registry import default_system


def define_flags(own: flags.FlagValues) -> None:
    """The flags of this benchmark."""
    flags.DEFINE_string("checkout", None, "Clone of the authors' repository; its code is run", flag_values=own)
    flags.DEFINE_string("python", sys.executable, "Interpreter that has torch and transformers", flag_values=own)
    flags.DEFINE_integer("count", 40, "How many prompts, the first ones", 1, 100_000, flag_values=own)
    flags.DEFINE_list("batch_sizes", ["1", "32"], "Prompts that we decode at once, each measured", flag_values=own)
    define_shared(own)


def main(own: flags.FlagValues) -> None:
    """Prints one JSON object per setup and batch size, then a table."""
    if not own.checkout or not (pathlib.Path(own.checkout) / "generate.py").is_file():
        raise UserError(f"--checkout={own.checkout or ''}: must be a clone of https://github.com/ML-GSAI/ReFusion")
    batch_sizes = flag_values.read_counts("batch_sizes", own.batch_sizes)
    model = load_model(own.checkpoint, own.dtype) if own.checkpoint else random_model(own.size, own.dtype)
    table = Table("setup", "batch", "tokens/s", "theirs", "ratio", "least, most", "same answers")
    for record in measure(model, own, batch_sizes):
        print(json.dumps(record), flush=True)
        least, middle, most = record["ratio"]
        speeds = (f"{record[name]:,.0f}" for name in ("tokens_per_second", "their_tokens_per_second"))
        ratios = f"{middle:.2f}", f"{least:.2f} {most:.2f}", f"{record['same']:.1%}"
        table.add_row(record["setup"], str(record["batch_size"]), *speeds, *ratios)
    Console().print(table)


def measure(model: Transformer, own: flags.FlagValues, batch_sizes: list[int]) -> list[dict]:
    """Decodes with theirs and with each of our setups and batch sizes, interleaved: one record for each of ours."""
    method, c = next(iter(default_system().decoders)), model.config
    shared = read_shared(own)
    setups = own.setup or [f"{method} infill=threshold", f"{method} infill=exact"]
    plain = read_setup(f"{method} infill=threshold", shared).for_model(c)
    subjects = {
        (setup, size): read_setup(setup, shared | {"batch_size": size}) for setup in setups for size in batch_sizes
    }
    requests = (
        prompts_in(own.prompts, own.checkpoint, plain)[: own.count] if own.prompts else random_prompts(own.count, 32, c)
    )
    queues = {key: prepare(requests, settings, c) for key, settings in subjects.items()}
    settings = {  # as the authors' code calls them
        "gen_length": plain.new_tokens,
        "slot_size": plain.slot_size,
        "serial_num_blocks": plain.serial_blocks,
        "slot_threshold": plain.slot_threshold,
        "token_threshold": plain.token_threshold,
        "eos_id": c.eos_token_id,
        "mask_id": c.mask_token_id,
    }
    asked = {"prompts": [list(request.prompt) for request in requests], "settings": settings}

    speeds: dict[Any, list[float]] = {key: [] for key in ["theirs", *subjects]}
    answers: dict[Any, list[list[int]]] = {}
    with their_code(model, own) as reply_to:
        device = reply_to()["device"]
        # The number of threads that decodes faster: a small model is slower on several. The first time starts them.
        tried = {n: [reply_to(threads=n, **asked)["seconds"] for _ in range(2)] for n in {1, available_cores()}}
        threads = min(tried, key=lambda n: tried[n][1])
        for repeat in range(own.repeats + 1):  # the first one compiles
            theirs = reply_to(threads=threads, **asked)
            taken = {"theirs": sum(map(len, theirs["answers"])) / theirs["seconds"]}
            for key, queue in queues.items():
                found, seconds = timed(model, queue)
                answers[key] = [answer.tokens for answer in found]
                taken[key] = sum(len(answer.commit_order) for answer in found) / seconds
            if repeat:
                for key, speed in taken.items():
                    speeds[key].append(speed)
    eos = c.eos_token_id
    cut = [answer[: [*answer, eos].index(eos) + 1] for answer in theirs["answers"]]  # through the first EOS
    return [
        {
            "benchmark": "authors",
            "setup": setup,
            "batch_size": size,
            "prompts": len(requests),
            "tokens_per_second": float(np.median(speeds[setup, size])),
            "their_tokens_per_second": float(np.median(speeds["theirs"])),
            "ratio": np.percentile(np.divide(speeds[setup, size], speeds["theirs"]), [0, 50, 100]).tolist(),
            "same": sum(map(list.__eq__, answers[setup, size], cut)) / len(requests),
            "parameters": sum(x.size for x in jax.tree.leaves(nnx.state(model))),
            "dtype": own.dtype,
            "their_device": device,
            "their_threads": threads,
        }
        for setup, size in subjects
    ]


@contextmanager
def their_code(model: Transformer, own: flags.FlagValues) -> Iterator[Callable[..., dict[str, Any]]]:
    """Starts a process that runs the authors' code on the model's weights, see theirs.py.

    Yields a function that sends it a line, unless there is none, and returns its reply; UserError where it has ended.
    """
    script = pathlib.Path(__file__).with_name("theirs.py")
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as errors:
        huggingface.save(model, pathlib.Path(directory))
        line = [own.python, str(script), str(pathlib.Path(own.checkout).absolute()), directory, own.dtype]
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=errors, text=True)
        except OSError as error:
            raise UserError(f"--python={own.python}: cannot be run: {error.strerror}") from error

        def reply_to(**asked: Any) -> dict[str, Any]:
            if asked:
                process.stdin.write(json.dumps(asked) + "\n")
                process.stdin.flush()
            if reply := process.stdout.readline():
                return json.loads(reply)
            process.wait()
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
            raise UserError(f"--python={own.python}: the authors' code ended with: {last[0][:500]}")

        try:
            yield reply_to
        finally:
            process.kill()
            process.communicate()

"""The worker processes of `prepare`, each with a tokenizer; they end with their parent."""

import dataclasses
import io
import json
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np
from etils import epath

from refusion_jax.cli.errors import UserError
from refusion_jax.data.examples import Bad
from refusion_jax.data.fast_tokenizer import load_tokenizer_file
from refusion_jax.data.input_splits import InputSplit
from refusion_jax.data.interface import Tokenizer
from refusion_jax.data.manifest import PROGRESS
from refusion_jax.data.shards import SPLITS, Report, Settings, digests, make_shard
from refusion_jax.data.tokenizer import SentencePieceTokenizer
from refusion_jax.distributed.storage import replacing, write_file

_tokenizer: Tokenizer  # of this process, and what it works by
_settings: Settings
_output: epath.Path


def _start(settings: Settings, output: str) -> None:
    global _tokenizer, _settings, _output
    _settings, _output = settings, epath.Path(output)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _tokenizer = load_tokenizer_file(settings.tokenizer, settings.mask_piece, settings.thinking)
    if isinstance(_tokenizer, SentencePieceTokenizer):
        _tokenizer.threads = 1
    if parent := multiprocessing.parent_process():
        threading.Thread(target=_die_with, args=(parent,), daemon=True).start()


def _die_with(parent) -> None:
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


class Pool:
    """Runs tasks on chunks in order; with one process, in this one."""

    def __init__(self, settings: Settings, output: epath.Path, processes: int):
        """Starts nothing yet."""
        self._executor = None
        if processes > 1:
            context = multiprocessing.get_context("spawn")  # fork copies threads' locks
            self._executor = ProcessPoolExecutor(processes, context, _start, (settings, str(output)))
        else:
            _start(settings, str(output))

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, kind, *_) -> None:
        if self._executor:
            for process in list((self._executor._processes or {}).values()) if kind else ():
                process.terminate()  # after an error nobody waits for the chunks that are under way
            self._executor.shutdown(cancel_futures=True)

    def run(self, task: Callable[..., Report], chunks: dict[int, list[InputSplit]]) -> Iterator[Report]:
        """The report of every chunk, in order.

        Args:
          task: `write_digests` or `write_shard`.
          chunks: by index.

        Raises:
          UserError: where a process died.
        """
        if self._executor is None:
            yield from (task(index, chunk) for index, chunk in chunks.items())
            return
        futures = [self._executor.submit(task, index, chunk) for index, chunk in chunks.items()]
        try:
            yield from (future.result() for future in futures)
        except BrokenProcessPool:
            raise UserError(
                "a worker process died (out of memory?): fewer --workers or a smaller --shard_mib need less; "
                "the same command goes on from here"
            ) from None


def write_digests(index: int, chunk: list[InputSplit]) -> Report:
    """Writes the digests of a chunk's examples."""
    save(_output / PROGRESS / f"digests-{index:05}.npy", digests(chunk, _settings.fields))
    return Report()


def write_shard(index: int, chunk: list[InputSplit]) -> Report:
    """Makes the shards of a chunk, then writes its report."""
    progress, settings = _output / PROGRESS, _settings
    name = f"rows-{index:05}.array_record"
    names = dict(zip(SPLITS, (_output / name, _output / "held_out" / name), strict=True))
    duplicates = set(load(progress / f"duplicates-{index:05}.npy").tolist()) if settings.dedup else set()
    with replacing(progress / f"dropped-{index:05}.jsonl") as dropped, open(dropped, "w") as file:

        def drop(bad: Bad) -> None:
            file.write(json.dumps({"where": str(bad.where), "kind": bad.kind, "reason": bad.reason}) + "\n")

        report = make_shard(chunk, names, settings, _tokenizer, duplicates, drop)
    if not (report.first_bad and settings.on_error == "stop"):
        write_file(progress / f"done-{index:05}.json", json.dumps(dataclasses.asdict(report)).encode())
    return report


def save(path: epath.Path, array: np.ndarray) -> None:
    """Writes an array atomically."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    write_file(path, buffer.getvalue())


def load(path: epath.Path) -> np.ndarray:
    """Reads what `save` wrote."""
    with path.open("rb") as file:
        return np.load(io.BytesIO(file.read()), allow_pickle=False)

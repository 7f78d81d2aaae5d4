"""The workers of `prepare`, each with a tokenizer, and the processes of this machine in which they run.

What a worker makes of a chunk depends on the chunk and the settings only, and is written whole or not at all: it does
not matter which worker makes it, where, when, or how often.
"""

import dataclasses
import functools
import json
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Protocol, Self

from etils import epath

from refusion_jax.cli.errors import UserError
from refusion_jax.data import duplicates
from refusion_jax.data.examples import Bad
from refusion_jax.data.fast_tokenizer import load_tokenizer_file
from refusion_jax.data.filters import Filters
from refusion_jax.data.input_splits import InputSplit
from refusion_jax.data.manifest import PROGRESS
from refusion_jax.data.shards import SPLITS, Report, Settings, keys, make_shard
from refusion_jax.data.tokenizer import SentencePieceTokenizer
from refusion_jax.distributed.storage import replacing, write_file


class Worker:
    """Makes what is asked for of one chunk at a time."""

    def __init__(self, settings: Settings, output: str):
        """Loads the tokenizer, and what the filters go by."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
        self._settings, self._output = settings, epath.Path(output)
        self._tokenizer = load_tokenizer_file(settings.tokenizer, settings.mask_piece, settings.thinking)
        self._filters = Filters(settings.filters)
        if isinstance(self._tokenizer, SentencePieceTokenizer):
            self._tokenizer.threads = 1

    def write_keys(self, index: int, chunk: list[InputSplit]) -> Report:
        """Keeps the digests of a chunk's examples."""
        duplicates.save_keys(self._output / PROGRESS, index, keys(chunk, self._settings, self._filters))
        return Report()

    def write_shard(self, index: int, chunk: list[InputSplit]) -> Report:
        """Makes the shards of a chunk, then writes its report."""
        progress, settings = self._output / PROGRESS, self._settings
        name = f"rows-{index:05}.array_record"
        names = dict(zip(SPLITS, (self._output / name, self._output / "held_out" / name), strict=True))
        looked = settings.dedup or settings.near_dedup
        repeated = set(duplicates.load_repeated(progress, index).tolist()) if looked else set()
        with replacing(progress / f"dropped-{index:05}.jsonl") as dropped, open(dropped, "w") as file:

            def drop(bad: Bad) -> None:
                file.write(json.dumps({"where": str(bad.where), "kind": bad.kind, "reason": bad.reason}) + "\n")

            report = make_shard(chunk, names, settings, self._tokenizer, self._filters, repeated, drop)
        outcome = "stopped" if report.first_bad and settings.on_error == "stop" else "done"
        write_file(progress / f"{outcome}-{index:05}.json", json.dumps(dataclasses.asdict(report)).encode())
        return report


Task = Callable[[Worker, int, list[InputSplit]], Report]  # a method of Worker


class Runner(Protocol):
    """What has tasks done, anywhere."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_) -> None: ...

    def run(self, task: Task, chunks: dict[int, list[InputSplit]]) -> Iterator[Report]:
        """The report of every chunk, in order."""

    def mark_repeated(self, progress: epath.Path, chunks: int) -> None:
        """As `duplicates.mark_repeated`."""


class Processes(Runner):
    """Processes of this machine; with one, or one chunk, this process. They end with their parent."""

    def __init__(self, settings: Settings, output: epath.Path, *, count: int):
        """Starts nothing yet."""
        context = multiprocessing.get_context("spawn")  # fork copies threads' locks
        self._settings, self._output, self._count = settings, str(output), count
        self._executor = ProcessPoolExecutor(count, context, _start, (settings, self._output))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, *_) -> None:
        for process in list((self._executor._processes or {}).values()) if kind else ():
            process.terminate()  # after an error nobody waits for the chunks that are under way
        self._executor.shutdown(cancel_futures=True)

    @functools.cached_property
    def _own_worker(self) -> Worker:
        return Worker(self._settings, self._output)

    def run(self, task: Task, chunks: dict[int, list[InputSplit]]) -> Iterator[Report]:
        """The report of every chunk, in order.

        Raises:
          UserError: where a process died.
        """
        if min(self._count, len(chunks)) <= 1:
            yield from (task(self._own_worker, index, chunk) for index, chunk in chunks.items())
            return
        futures = [self._executor.submit(_do, task, index, chunk) for index, chunk in chunks.items()]
        try:
            yield from (future.result() for future in futures)
        except BrokenProcessPool:
            raise UserError(
                "a worker process died (out of memory?): fewer --workers or a smaller --shard_mib need less; "
                "the same command goes on from here"
            ) from None

    def mark_repeated(self, progress: epath.Path, chunks: int) -> None:
        duplicates.mark_repeated(progress, chunks)


_worker: Worker  # of this process


def _start(settings: Settings, output: str) -> None:
    global _worker
    _worker = Worker(settings, output)
    if parent := multiprocessing.parent_process():
        threading.Thread(target=_die_with, args=(parent,), daemon=True).start()


def _die_with(parent) -> None:
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _do(task: Task, index: int, chunk: list[InputSplit]) -> Report:
    return task(_worker, index, chunk)

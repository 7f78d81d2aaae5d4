"""The worker processes of `prepare`, each with a tokenizer; they end with their parent."""

import concurrent.futures
import dataclasses
import io
import json
import multiprocessing
import multiprocessing.connection
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np
from etils import epath

from refusion_jax.cli.errors import UserError
from refusion_jax.data.examples import Bad
from refusion_jax.data.fast_tokenizer import load_tokenizer_file
from refusion_jax.data.interface import Tokenizer
from refusion_jax.data.manifest import PROGRESS
from refusion_jax.data.pieces import Piece
from refusion_jax.data.shards import SPLITS, Report, Settings, digests, make_shard
from refusion_jax.data.tokenizer import SentencePieceTokenizer
from refusion_jax.distributed.storage import write_file


@dataclasses.dataclass
class _Worker:
    """What a worker keeps between chunks."""

    tokenizer: Tokenizer
    settings: Settings
    output: epath.Path
    counters: object  # [bytes, tokens], shared by all processes

    def advance(self, size: int, tokens: int) -> None:
        with self.counters.get_lock():
            self.counters[0] += size
            self.counters[1] += tokens


_worker: _Worker | None = None  # one a process


def _start(settings: Settings, output: str, counters) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    tokenizer = load_tokenizer_file(settings.tokenizer, settings.mask_piece, settings.thinking)
    if isinstance(tokenizer, SentencePieceTokenizer):
        tokenizer.threads = 1
    _worker = _Worker(tokenizer, settings, epath.Path(output), counters)
    if parent := multiprocessing.parent_process():
        threading.Thread(target=_die_with, args=(parent,), daemon=True).start()


def _die_with(parent) -> None:
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


class Pool:
    """Runs tasks on chunks in order; with one process, in this one."""

    def __init__(self, settings: Settings, output: epath.Path, processes: int, advance):
        """Starts nothing yet.

        Args:
          settings: what shapes the rows.
          output: the directory.
          processes: how many.
          advance: hears of bytes and tokens.
        """
        context = multiprocessing.get_context("spawn")  # fork copies threads' locks
        self._counters = context.Array("q", 2)
        self._told = [0, 0]
        self._advance = advance
        initial = (settings, str(output), self._counters)
        self._stops = settings.on_error == "stop"
        self._executor = None
        if processes > 1:
            self._executor = ProcessPoolExecutor(processes, context, _start, initial)
        else:
            _start(*initial)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, kind, *_) -> None:
        if self._executor:
            for process in list((self._executor._processes or {}).values()) if kind else ():
                process.terminate()  # after an error nobody waits for the chunks that are under way
            self._executor.shutdown(cancel_futures=True)

    def run(self, task: Callable, arguments: list[tuple]) -> list[tuple[int, Report | None]]:
        """(index, result) of every chunk, in order; ends after the first report of an error that stops.

        Raises:
          UserError: where a process died.
        """
        return list(self._results(task, arguments))

    def _results(self, task: Callable, arguments: list[tuple]) -> Iterator[tuple[int, Report | None]]:
        if self._executor is None:
            for index, chunk in arguments:
                result = task(index, chunk)
                self._tell()
                yield index, result
                if result and result.first_bad and self._stops:
                    return
            return
        futures = [(index, self._executor.submit(task, index, chunk)) for index, chunk in arguments]
        try:
            for index, future in futures:
                while True:
                    self._tell()
                    if concurrent.futures.wait([future], timeout=0.2).done:
                        break
                result = future.result()
                yield index, result
                if result and result.first_bad and self._stops:
                    return
            self._tell()
        except BrokenProcessPool:
            raise UserError(
                "a worker process died (out of memory?): fewer --workers or a smaller --shard_mib need less; "
                "the same command goes on from here"
            ) from None

    def _tell(self) -> None:
        size, tokens = self._counters[:]
        self._advance(size - self._told[0], tokens - self._told[1])
        self._told = [size, tokens]


def write_digests(index: int, chunk: list[Piece]) -> None:
    """Writes the digests of a chunk's examples."""
    found = digests(chunk, _worker.settings.fields, lambda size: _worker.advance(size, 0))
    save(_worker.output / PROGRESS / f"digests-{index:05}.npy", found)


def write_shard(index: int, chunk: list[Piece]) -> Report:
    """Makes the shards of a chunk, then writes its report."""
    progress, settings = _worker.output / PROGRESS, _worker.settings
    name = f"rows-{index:05}.array_record"
    names = dict(zip(SPLITS, (_worker.output / name, _worker.output / "held_out" / name), strict=True))
    duplicates = set(load(progress / f"duplicates-{index:05}.npy").tolist()) if settings.dedup else set()
    dropped: list[Bad] = []
    advance = _Seldom(_worker.advance)
    report = make_shard(chunk, names, settings, _worker.tokenizer, duplicates, dropped, advance)
    advance.flush()
    if not (report.first_bad and settings.on_error == "stop"):
        lines = "".join(
            json.dumps({"where": str(bad.where), "kind": bad.kind, "reason": bad.reason}) + "\n" for bad in dropped
        )
        write_file(progress / f"dropped-{index:05}.jsonl", lines.encode())
        write_file(progress / f"done-{index:05}.json", json.dumps(dataclasses.asdict(report)).encode())
    return report


class _Seldom:
    """Accumulates counts and forwards them five times a second, as the shared counters have a lock."""

    def __init__(self, advance: Callable[[int, int], None]):
        self._advance, self._held, self._last = advance, [0, 0], time.monotonic()

    def __call__(self, size: int, tokens: int) -> None:
        self._held[0] += size
        self._held[1] += tokens
        if time.monotonic() - self._last > 0.2:
            self.flush()

    def flush(self) -> None:
        self._advance(*self._held)
        self._held, self._last = [0, 0], time.monotonic()


def save(path: epath.Path, array: np.ndarray) -> None:
    """Writes an array atomically."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    write_file(path, buffer.getvalue())


def load(path: epath.Path) -> np.ndarray:
    """Reads what `save` wrote."""
    with path.open("rb") as file:
        return np.load(io.BytesIO(file.read()), allow_pickle=False)


def read_lines(path: epath.Path) -> bytes:
    """The content of a file; empty if it does not exist."""
    return path.read_bytes() if path.exists() else b""

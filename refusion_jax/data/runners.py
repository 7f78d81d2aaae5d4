"""Runs the tasks of workers: the interface of all runners, and the runner with processes of this machine."""

import abc
import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from etils import epath

from refusion_jax.cli.errors import UserError
from refusion_jax.data import duplicates
from refusion_jax.data.input_splits import InputSplit
from refusion_jax.data.shards import PrepareSettings, Report, Worker
from refusion_jax.distributed.host import end_with_parent

Task = Callable[[Worker, int, list[InputSplit]], Report]  # a method of Worker


class Runner(contextlib.AbstractContextManager):
    """Runs tasks on chunks, in processes here or on other machines. Use it in a `with` block, which ends them."""

    @abc.abstractmethod
    def run(self, task: Task, chunks: dict[int, list[InputSplit]]) -> Iterator[Report]:
        """The report of every chunk, in order."""

    def mark_repeated(self, progress: epath.Path, chunks: int) -> None:
        """Finds and saves the repeated documents of all chunks."""
        duplicates.mark_repeated(progress, chunks)


class Processes(Runner):
    """Processes of this machine, or this process if `count` or the chunks are one. They end with their parent."""

    def __init__(self, settings: PrepareSettings, output: epath.Path, *, count: int):
        """Starts nothing yet."""
        context = multiprocessing.get_context("spawn")  # fork copies threads' locks
        self._given, self._count = (settings, str(output)), count
        self._executor = ProcessPoolExecutor(count, context, _start, self._given)

    def __exit__(self, kind, *_) -> None:
        for process in list((self._executor._processes or {}).values()) if kind else ():
            process.terminate()  # after an error, do not wait for unfinished chunks
        self._executor.shutdown(cancel_futures=True)

    def run(self, task: Task, chunks: dict[int, list[InputSplit]]) -> Iterator[Report]:
        """The report of every chunk, in order; UserError if a process died."""
        if min(self._count, len(chunks)) <= 1:
            worker = Worker(*self._given)
            yield from (task(worker, index, chunk) for index, chunk in chunks.items())
            return
        # Workers inherit the blocked SIGINT: Ctrl-C reaches them, too, and an idle one would print a traceback.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            try:
                futures = [self._executor.submit(_do, task, index, chunk) for index, chunk in chunks.items()]
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            yield from (future.result() for future in futures)
        except BrokenProcessPool:
            raise UserError(
                "a worker process died (out of memory?): fewer --workers or a smaller --shard_mib need less; "
                "the same command resumes from here"
            ) from None


_worker: Worker  # of this process


def _start(settings: PrepareSettings, output: str) -> None:
    global _worker
    _worker = Worker(settings, output)
    end_with_parent()


def _do(task: Task, index: int, chunk: list[InputSplit]) -> Report:
    return task(_worker, index, chunk)

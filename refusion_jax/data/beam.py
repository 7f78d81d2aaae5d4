"""Runs the workers of `prepare` on Apache Beam: on this machine, Dataflow, Flink or Spark."""

import logging
import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import apache_beam as beam
import numpy as np
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.transforms.environments import SubprocessSDKEnvironment
from etils import epath

from refusion_jax.cli.errors import Failure
from refusion_jax.cli.paths import is_remote
from refusion_jax.data import duplicates
from refusion_jax.data.input_splits import InputSplit
from refusion_jax.data.manifest import PROGRESS
from refusion_jax.data.runners import Runner, Task
from refusion_jax.data.shards import PrepareSettings, Report, Worker
from refusion_jax.distributed.json_files import read_json

# Prism lets a worker run eight chunks at a time, in threads that keep the memory of their chunks: with shards of 64 MiB
# a worker takes 774 MiB, and 443 with two threads of its own.
_THREADS = ThreadPoolExecutor(2)


class BeamRunner(Runner):
    """Pipelines that read the input and write the output themselves: what flows through them is small."""

    def __init__(self, settings: PrepareSettings, output: epath.Path, *, options: list[str], count: int):
        """Starts nothing yet. All workers must reach the output directory, the input and the tokenizer.

        The options are Beam's, one of which names its runner; without any, `count` processes of this machine run it.
        """
        self._settings, self._output, self._runner = settings, output, None
        # Prism also ends a pipeline after this time, by default after five minutes.
        self._options = ["--job_server_timeout=86400", *(options or [f"--direct_num_workers={count}"])]
        if not options:  # Ctrl-C goes to all processes: this one ends the workers, and reports it in one line
            worker = f"{shlex.quote(sys.executable)} -m apache_beam.runners.worker.sdk_worker_main 2> {os.devnull}"
            wait = "while kill -0 $PPID $!; do sleep .5; done; kill $!; wait $!"  # they would survive this one for ever
            command = f"trap '' INT; {worker} & {{ {wait}; }} 2> {os.devnull}"
            self._runner = FnApiRunner(SubprocessSDKEnvironment.from_command_string(command))
        logging.getLogger("apache_beam").setLevel(logging.ERROR)  # it reports each of its threads

    def __exit__(self, *_) -> None:
        """Does nothing: `run` waits for its pipeline."""

    def run(self, task: Task, chunks: dict[int, list[InputSplit]]) -> Iterator[Report]:
        """The report of every chunk, in order, once all are done; Failure if the pipeline fails."""
        self._run(
            beam.Create(list(chunks.items()))
            | beam.Reshuffle()
            | beam.ParDo(_Work(task, self._settings, os.fspath(self._output)))
            | beam.GroupByKey()  # bundles without output make Prism spin: it took a third of the processor time
        )
        for index in chunks:
            made = (self._output / PROGRESS / f"{outcome}-{index:05}.json" for outcome in ("done", "stopped"))
            yield next((read_json(path, Report) for path in made if path.exists()), Report())

    def mark_repeated(self, progress: epath.Path, chunks: int) -> None:
        """As `duplicates.mark_repeated`, with keys grouped by their partition.

        If they are in local files, this process reads them itself: Beam's runners for one machine hold in memory what
        they group.
        """
        if not is_remote(progress):
            super().mark_repeated(progress, chunks)
            return
        count, where = duplicates.partitions(progress, chunks), os.fspath(progress)
        self._run(
            beam.Create(list(range(chunks)))
            | beam.Reshuffle()
            | beam.FlatMap(_parts, where, count)
            | "by partition" >> beam.GroupByKey()
            | beam.FlatMap(_repeated)
            | "by chunk" >> beam.GroupByKey()
            | beam.Map(_save, where)
        )

    def _run(self, transform: beam.PTransform) -> None:
        try:  # in a thread, which Ctrl-C does not reach: Beam would wait for its workers, now and then for ever
            ThreadPoolExecutor(1).submit(self._run_pipeline, transform).result()
        except Exception as error:  # each runner raises its own
            lines = [line.strip() for line in str(error).splitlines() if line.strip(" >")] or [type(error).__name__]
            raise Failure(f"the Beam pipeline failed: {lines[-1]} (the same command resumes from here)") from error

    def _run_pipeline(self, transform: beam.PTransform) -> None:
        with beam.Pipeline(self._runner, PipelineOptions(self._options)) as pipeline:
            pipeline | transform  # noqa: B018  Beam's way to add one


class _Work(beam.DoFn):
    """Runs a task on one chunk after the other, with its own worker."""

    def __init__(self, task: Task, settings: PrepareSettings, output: str):
        self._task, self._settings, self._output = task, settings, output

    def setup(self) -> None:
        self._worker = Worker(self._settings, self._output)

    def process(self, element: tuple[int, list[InputSplit]]) -> Iterator[tuple[int, None]]:
        _THREADS.submit(self._task, self._worker, *element).result()
        yield element[0], None


def _parts(index: int, progress: str, count: int) -> Iterator[tuple[int, tuple[int, bytes]]]:
    """(partition, (chunk, its keys there)) for all partitions."""
    keys = duplicates.load(epath.Path(progress), "digests", index)
    for partition in range(count):
        yield partition, (index, duplicates.in_partition(keys, partition, count).tobytes())


def _repeated(partition: tuple[int, Iterable[tuple[int, bytes]]]) -> Iterator[tuple[int, bytes]]:
    """(chunk, numbers of its repeated documents) of one partition."""
    chunks, keys = zip(*sorted(partition[1]), strict=True)
    found = duplicates.repeated([np.frombuffer(part, "<u8").reshape(-1, 3) for part in keys])
    yield from ((chunk, numbers.tobytes()) for chunk, numbers in zip(chunks, found, strict=True))


def _save(found: tuple[int, Iterable[bytes]], progress: str) -> None:
    index, parts = found
    duplicates.save_repeated(epath.Path(progress), index, np.frombuffer(b"".join(parts), "<u8"))

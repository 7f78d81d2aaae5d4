"""`prepare`: cuts the input into chunks, turns each into a shard in several processes, and writes the manifest last.

DIR/rows-00000.array_record ...   one for each chunk
DIR/manifest.json, DIR/dropped.jsonl (dropped examples with place and reason), the files of the tokenizer
DIR/held_out/                     held-out documents, prepared in the same way
DIR/.progress/                    until all is done: state from which an interrupted run resumes
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator

import numpy as np
from absl import logging
from etils import epath
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from refusion_jax.cli.errors import UserError
from refusion_jax.cli.paths import is_remote
from refusion_jax.cli.progress import progress
from refusion_jax.data.fast_tokenizer import tokenizer_hash
from refusion_jax.data.input_splits import InputSplit, find_files, splits_of
from refusion_jax.data.interface import Tokenizer
from refusion_jax.data.manifest import FILE, PROGRESS, Manifest, read_manifest
from refusion_jax.data.rows import token_type
from refusion_jax.data.runners import Runner, Task
from refusion_jax.data.shards import PrepareSettings, Report, Worker
from refusion_jax.distributed.json_files import read_json
from refusion_jax.distributed.storage import replacing, try_lock, write_file

_DRAWN = 64  # parts of files in a chunk, if they are shuffled


class NothingError(UserError):
    """The whole input has no usable example; running again would not help."""


def plan_chunks(patterns: list[str], size: int, shuffle: bool = False) -> list[list[InputSplit]]:
    """The input in chunks of about `size` bytes, a function of its files; a file that two patterns match comes once.

    With `shuffle` each chunk consists of parts drawn from all files. Refuses patterns that match no file.
    """
    sources: dict[str, str] = {}  # the first pattern that matches each file
    for pattern in patterns:
        files = find_files(pattern)
        if not files:
            raise UserError(f"--input={pattern}: no such file")
        sources |= {path: pattern for path in files if path not in sources}
    cut = {path: splits_of(path, size, size // _DRAWN if shuffle else size) for path in sources}
    parts = [dataclasses.replace(part, source=sources[path]) for path, own in cut.items() for part in own]
    if shuffle:
        parts = [parts[at] for at in np.random.Generator(np.random.PCG64(0)).permutation(len(parts))]
    chunks: list[list[InputSplit]] = [[]]
    held = 0
    for part in parts:
        if chunks[-1] and held + part.size > size:
            chunks.append([])
            held = 0
        chunks[-1].append(part)
        held += part.size
    return chunks


@dataclasses.dataclass(frozen=True)
class Preparation:
    """One run of `prepare`."""

    chunks: list[list[InputSplit]]  # of the input
    output: epath.Path  # the directory
    settings: PrepareSettings  # what shapes the rows
    tokenizer: Tokenizer  # of the rows
    command: str  # for the manifest
    runner: Callable[[PrepareSettings, epath.Path], Runner]  # the files do not depend on it

    def run(self) -> Manifest:
        """Makes the missing shards, then the manifest; UserError if the input or the directory cannot be used."""
        output, plan = self.output, self._fingerprint()
        if (output / FILE).exists():
            manifest = read_manifest(output)
            if manifest.plan != plan:
                raise UserError(f"--output={output} holds other rows (other input or flags); name another directory")
            if manifest.times and manifest.times != self._times:
                logging.warning(
                    "%s is finished, and was not made again: files of the input were modified since, as large as "
                    "before; name another directory if their content has changed",
                    output,
                )
            (output / PROGRESS).rmtree(missing_ok=True)
            return manifest
        begun = {"plan": plan, "files": self._times}
        is_new = _check_unfinished(output, begun)
        with _only_one(output / PROGRESS):
            write_file(output / PROGRESS / "plan.json", json.dumps(begun))
            try:
                return self._finish(self._make(), plan)
            except UserError as error:
                is_of_use = any([*output.glob("rows-*"), *output.glob("held_out/rows-*")])
                if is_new and (isinstance(error, NothingError) or not is_of_use):
                    output.rmtree()
                raise

    def _fingerprint(self) -> str:
        """A digest of all that the output depends on, except on_error, on which finished shards do not depend."""
        settings = list(dataclasses.asdict(self.settings).items())
        settings.insert(4, ("text_packing", "best_fit"))  # was a setting when older directories were made
        shape = dict(settings) | {
            "on_error": None,
            "tokenizer": tokenizer_hash(self.tokenizer),
            "mask_piece": None,
            "thinking": None,
        }
        for bound in ("min_tokens", "max_tokens"):  # missing in older directories
            if not shape[bound]:
                del shape[bound]
        parts = [[dataclasses.astuple(part) for part in chunk] for chunk in self.chunks]
        return hashlib.blake2b(json.dumps([shape, parts]).encode(), digest_size=16).hexdigest()

    @functools.cached_property
    def _times(self) -> str:
        """Changes with the modification time of any file."""
        paths = dict.fromkeys(part.path for chunk in self.chunks for part in chunk)
        times = [str(epath.Path(path).stat().mtime) for path in paths]
        return hashlib.blake2b("\n".join(times).encode(), digest_size=16).hexdigest()

    def _make(self) -> list[Report]:
        """The reports of all chunks, in order, including those that an earlier run has finished."""
        unfinished, settings = self.output / PROGRESS, self.settings
        there = {path.name for path in unfinished.iterdir()}

        def without(name: str) -> dict[int, list[InputSplit]]:
            return {index: chunk for index, chunk in enumerate(self.chunks) if name.format(index) not in there}

        todo = without("done-{:05}.json")
        with self.runner(settings, self.output) as runs:
            if (settings.dedup or settings.near_dedup) and todo:
                self._run(runs, "looking for duplicates", Worker.write_keys, without("digests-{:05}.npy"))
                if without("duplicates-{:05}.npy"):
                    runs.mark_repeated(unfinished, len(self.chunks))
            self._run(runs, "tokenizing", Worker.write_shard, todo)
        done = [unfinished / f"done-{index:05}.json" for index in range(len(self.chunks))]
        return [read_json(path, Report, extra="ignore") for path in done]  # also from older versions

    def _run(self, runs: Runner, what: str, task: Task, left: dict[int, list[InputSplit]]) -> None:
        """Runs a task on some chunks, with a bar on a terminal, otherwise with a line now and then."""
        sizes = [sum(part.size for part in chunk) for chunk in left.values()]
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True)
        columns += TransferSpeedColumn(), TimeRemainingColumn()
        said = time.monotonic()
        with progress(*columns, stderr=False) as bar:
            this = bar.add_task(what, total=sum(sizes))
            for size, report in zip(sizes, runs.run(task, left) if left else (), strict=True):
                if self.settings.on_error == "stop" and report.first_bad:
                    hint = "--on_error=skip leaves out and counts what is malformed or too long"
                    raise UserError(f"{report.first_bad} ({hint}; shards made so far are kept)")
                bar.advance(this, size)
                if bar.disable and time.monotonic() - said > 10:
                    said = time.monotonic()
                    print(f"{what}  {bar.tasks[this].percentage:5.1f} %", flush=True)

    def _finish(self, reports: list[Report], plan: str) -> Manifest:
        """Writes the tokenizer, the dropped examples and the manifests, that of DIR last."""
        output, settings, tokenizer = self.output, self.settings, self.tokenizer
        counted = {
            name: dict(sum((collections.Counter(getattr(report, name)) for report in reports), collections.Counter()))
            for name in ("dropped", "left_out", "sources", "languages", "lengths")
        }
        parts = [part for chunk in self.chunks for part in chunk]
        about = {"files": len({part.path for part in parts}), "bytes": sum(part.size for part in parts)}
        about["examples"] = sum(report.examples for report in reports)
        directories = {"train": output} | ({"held_out": output / "held_out"} if settings.held_out else {})
        shards = {split: tuple(r.shards[split] for r in reports if split in r.shards) for split in directories}
        self._check_any(shards, reports, counted["dropped"])
        with replacing(output / "dropped.jsonl") as dropped, open(dropped, "wb") as file:
            for index in range(len(reports)):
                with (output / PROGRESS / f"dropped-{index:05}.jsonl").open("rb") as part:
                    shutil.copyfileobj(part, file)
        for split, directory in reversed(directories.items()):
            for name, content in tokenizer.files.items():
                write_file(directory / name, content)
            counts = ("rows", "documents", "segments", "tokens")
            totals = {name: sum(getattr(shard, name) for shard in shards[split]) for name in counts}
            manifest = Manifest(
                row_length=settings.row_length,
                token_bytes=token_type(tokenizer.size).itemsize,
                vocabulary=tokenizer.size,
                tokenizer=tokenizer_hash(tokenizer),
                **totals,
                fill=totals["tokens"] / (totals["rows"] * settings.row_length),
                **counted,
                held_out=settings.held_out,
                input=about,
                command=self.command,
                plan=plan,
                shards=shards[split],
                times=self._times,
            )
            write_file(directory / FILE, json.dumps(dataclasses.asdict(manifest), indent=1) + "\n")
        (output / PROGRESS).rmtree()
        return manifest

    def _check_any(self, shards: dict[str, tuple], reports: list[Report], dropped: dict[str, int]) -> None:
        """Refuses to finish without a single row, or without one that is held out."""
        if not shards["train"]:
            bad = (report.first_bad for report in reports if report.first_bad)
            why = ", ".join(f"{count:,} {kind}" for kind, count in dropped.items())
            none = f"all are left out: {why}" if why else f"{self.chunks[0][0].path} holds no example"
            raise NothingError(f"--input: no document can be used; the first problem: {next(bad, none)}")
        if not all(shards.values()):
            raise NothingError(f"--held_out={self.settings.held_out:g}: no document was held out; give a larger share")


def _check_unfinished(output: epath.Path, begun: dict[str, str]) -> bool:
    """Whether the directory is new. Refuses one that holds anything other than the beginning of the same work."""
    if not output.exists() or not any(output.iterdir()):
        return True
    try:
        before = read_json(output / PROGRESS / "plan.json")
    except UserError:
        if [path.name for path in output.iterdir()] == [PROGRESS]:  # killed before anything was done
            return True
        raise UserError(f"--output={output} is not empty; name a new directory") from None
    if before != begun:
        raise UserError(
            f"--output={output} holds unfinished rows of another call (the input has changed, or the flags): "
            f"give the flags of that call, delete it, or name another directory"
        )
    return False


@contextlib.contextmanager
def _only_one(progress: epath.Path) -> Iterator[None]:
    """Locks the directory against other processes; the lock ends with the process."""
    progress.mkdir(parents=True, exist_ok=True)
    if is_remote(progress):
        yield
        return
    with open(progress / "lock", "w") as lock:
        if not try_lock(lock, progress.parent):
            raise UserError(f"--output={progress.parent}: another `prepare` is writing to it")
        for split in (progress.parent, progress.parent / "held_out"):
            for left in split.glob(".tmp-*"):  # from a killed process
                left.unlink()
        yield

"""`prepare`: cuts the input into chunks, makes a shard of each in several processes, and writes the manifest last.

DIR/rows-00000.array_record ...   one for each chunk
DIR/manifest.json, DIR/dropped.jsonl (dropped examples with place and reason), the files of the tokenizer
DIR/held_out/                     held-out documents, prepared in the same way
DIR/.progress/                    until all is done: state from which an interrupted run resumes
"""

import collections
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator

import numpy as np
from absl import logging
from etils import epath

from refusion_jax.cli.errors import UserError
from refusion_jax.cli.paths import is_remote
from refusion_jax.data.fast_tokenizer import tokenizer_hash
from refusion_jax.data.input_splits import InputSplit, find_files, splits_of
from refusion_jax.data.interface import Tokenizer
from refusion_jax.data.manifest import FILE, PROGRESS, Manifest, read_manifest, write_manifest
from refusion_jax.data.rows import token_type
from refusion_jax.data.shards import Report, Settings, Worker
from refusion_jax.data.workers import Runner, Task
from refusion_jax.distributed.json_files import read_json
from refusion_jax.distributed.storage import replacing, write_file

_DRAWN = 64  # parts of files that make a chunk, if they are shuffled


class NothingError(UserError):
    """The whole input was read without any usable example; running again would not help."""


def plan_chunks(patterns: list[str], size: int, shuffle: bool = False) -> list[list[InputSplit]]:
    """The input in chunks of about `size` bytes, a function of the files alone; what two patterns match comes once.

    Args:
      patterns: paths, globs and directories.
      size: bytes.
      shuffle: whether each chunk is of parts of files that are drawn from all of them.

    Raises:
      UserError: where a pattern matches no file.
    """
    parts: list[InputSplit] = []
    seen: set[str] = set()
    for pattern in patterns:
        files = find_files(pattern)
        if not files:
            raise UserError(f"--input={pattern}: no such file")
        new = [path for path in files if path not in seen]
        seen.update(new)
        for path in new:
            own = splits_of(path, size, size // _DRAWN if shuffle else size)
            parts += [dataclasses.replace(part, source=pattern) for part in own]
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


def prepare(
    chunks: list[list[InputSplit]],
    output: epath.Path,
    settings: Settings,
    tokenizer: Tokenizer,
    *,
    command: str,
    runner: Callable[[Settings, epath.Path], Runner],
    started: Callable[[str, int], None],
    advance: Callable[[int, int], None],
) -> Manifest:
    """Makes the missing shards, then the manifest.

    Args:
      chunks: of the input.
      output: the directory.
      settings: what shapes the rows.
      tokenizer: of the rows.
      command: for the manifest.
      runner: has the work done; it changes nothing in the output.
      started: hears of each pass over the input what it is for, and how many bytes it will read.
      advance: hears of each chunk that is done how many bytes it had, and how many tokens were made of it.

    Raises:
      UserError: where the input or the directory cannot be used.
    """
    plan = _fingerprint(chunks, settings, tokenizer)
    if (output / FILE).exists():
        manifest = read_manifest(output)
        if manifest.plan != plan:
            raise UserError(f"--output={output} holds other rows (other input or flags); name another directory")
        if manifest.times and manifest.times != _times(chunks):
            logging.warning(
                "%s is finished, and was not made again: files of the input were modified since, as large as before; "
                "name another directory if their content has changed",
                output,
            )
        _clean(output)
        return manifest
    is_new = _check_unfinished(output, plan, chunks)
    progress = output / PROGRESS
    with _only_one(progress):
        write_file(progress / "plan.json", json.dumps({"plan": plan, "files": _times(chunks)}).encode())
        try:
            reports = _make(chunks, output, settings, runner, started, advance)
            return _finish(output, reports, chunks, settings, tokenizer, command, plan)
        except UserError as error:
            is_of_use = any([*output.glob("rows-*"), *output.glob("held_out/rows-*")])
            if is_new and (isinstance(error, NothingError) or not is_of_use):
                output.rmtree()
            raise


def _fingerprint(chunks: list[list[InputSplit]], settings: Settings, tokenizer: Tokenizer) -> str:
    """A digest of all that the output depends on, without on_error, as finished shards do not depend on it."""
    shape = dataclasses.asdict(settings) | {
        "on_error": None,
        "tokenizer": tokenizer_hash(tokenizer),
        "mask_piece": None,
        "thinking": None,
    }
    parts = [[dataclasses.astuple(part) for part in chunk] for chunk in chunks]
    return hashlib.blake2b(json.dumps([shape, parts]).encode(), digest_size=16).hexdigest()


def _times(chunks: list[list[InputSplit]]) -> str:
    """Changes with the modification time of any file."""
    paths = dict.fromkeys(part.path for chunk in chunks for part in chunk)
    times = [str(epath.Path(path).stat().mtime) for path in paths]
    return hashlib.blake2b("\n".join(times).encode(), digest_size=16).hexdigest()


def _check_unfinished(output: epath.Path, plan: str, chunks: list[list[InputSplit]]) -> bool:
    """Whether the directory is new. Refuses one that holds anything but the beginning of the same work."""
    if not output.exists() or not any(output.iterdir()):
        return True
    try:
        before = read_json(output / PROGRESS / "plan.json")
    except UserError:
        if [path.name for path in output.iterdir()] == [PROGRESS]:  # killed before anything was done
            return True
        raise UserError(f"--output={output} is not empty; name a new directory") from None
    if before != {"plan": plan, "files": _times(chunks)}:
        raise UserError(
            f"--output={output} holds the beginning of other rows (the input has changed, or the flags): "
            f"give the flags it was begun with, delete it, or name another directory"
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
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"--output={progress.parent}: another `prepare` is writing to it") from None
        for split in (progress.parent, progress.parent / "held_out"):
            for left in split.glob(".tmp-*"):  # by one that was killed
                left.unlink()
        yield


def _make(chunks, output, settings, runner, started, advance) -> list[Report]:
    """The reports of all chunks, in order; those of chunks that an earlier run has finished are read."""
    progress = output / PROGRESS
    there = {path.name for path in progress.iterdir()}

    def without(name: str) -> dict[int, list[InputSplit]]:
        return {index: chunk for index, chunk in enumerate(chunks) if name.format(index) not in there}

    todo = without("done-{:05}.json")
    with runner(settings, output) as runs:

        def run(what: str, task: Task, left: dict[int, list[InputSplit]]) -> Iterator[Report]:
            sizes = [sum(part.size for part in chunk) for chunk in left.values()]
            started(what, sum(sizes))
            for size, report in zip(sizes, runs.run(task, left) if left else (), strict=True):
                advance(size, sum(shard.tokens for shard in report.shards.values()))
                yield report

        if (settings.dedup or settings.near_dedup) and todo:
            keyless = without("digests-{:05}.npy")
            collections.deque(run("looking for duplicates", Worker.write_keys, keyless), maxlen=0)
            if without("duplicates-{:05}.npy"):
                runs.mark_repeated(progress, len(chunks))
        for report in run("tokenizing", Worker.write_shard, todo):
            if settings.on_error == "stop" and report.first_bad:
                hint = "--on_error=skip leaves out and counts what is malformed or too long"
                raise UserError(f"{report.first_bad} ({hint}; shards made so far are kept)")
    return [read_json(progress / f"done-{index:05}.json", Report) for index in range(len(chunks))]


def _finish(output, reports, chunks, settings, tokenizer, command, plan) -> Manifest:
    """Writes the tokenizer, the dropped examples and the manifests, that of the whole directory last."""
    counted = {
        name: dict(sum((collections.Counter(getattr(report, name)) for report in reports), collections.Counter()))
        for name in ("dropped", "left_out", "sources", "languages", "lengths")
    }
    parts = [part for chunk in chunks for part in chunk]
    files = {"files": len({part.path for part in parts}), "bytes": sum(part.size for part in parts)}
    shared = {
        "row_length": settings.row_length,
        "token_bytes": token_type(tokenizer.size).itemsize,
        "vocabulary": tokenizer.size,
        "tokenizer": tokenizer_hash(tokenizer),
        **counted,
        "held_out": settings.held_out,
        "input": files | {"examples": sum(report.examples for report in reports)},
        "command": command,
        "plan": plan,
        "times": _times(chunks),
    }
    directories = {"train": output} | ({"held_out": output / "held_out"} if settings.held_out else {})
    shards = {split: tuple(r.shards[split] for r in reports if split in r.shards) for split in directories}
    if not shards["train"]:
        bad = (report.first_bad for report in reports if report.first_bad)
        why = ", ".join(f"{count:,} {kind}" for kind, count in counted["dropped"].items())
        first_bad = next(bad, f"all are left out: {why}" if why else f"{parts[0].path} holds no example")
        raise NothingError(f"--input: no document can be used; the first problem: {first_bad}")
    if not all(shards.values()):
        raise NothingError(f"--held_out={settings.held_out:g}: no document was held out; give a larger share")
    with replacing(output / "dropped.jsonl") as dropped, open(dropped, "wb") as file:
        for index in range(len(chunks)):
            with (output / PROGRESS / f"dropped-{index:05}.jsonl").open("rb") as part:
                shutil.copyfileobj(part, file)
    for split, directory in reversed(directories.items()):
        for name, content in tokenizer.files.items():
            write_file(directory / name, content)
        counts = ("rows", "documents", "segments", "tokens")
        totals = {name: sum(getattr(shard, name) for shard in shards[split]) for name in counts}
        fill = totals["tokens"] / (totals["rows"] * settings.row_length)
        manifest = Manifest(**shared, **totals, fill=fill, shards=shards[split])
        write_manifest(directory, manifest)
    _clean(output)
    return manifest


def _clean(output: epath.Path) -> None:
    if (output / PROGRESS).exists():
        (output / PROGRESS).rmtree()

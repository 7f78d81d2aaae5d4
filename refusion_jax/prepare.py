"""Tokenizes and packs text into rows of fixed length, once, for any number of runs on any number of hosts.

  python -m refusion_jax.prepare --input='my/*.jsonl' --output=prepared/mine --tokenizer=my.model --row_length=4096
  python -m refusion_jax.train --config=configs/small.py --workdir=runs/mine --config.data.path=prepared/mine

Reads .jsonl and .ndjson (also in .gz, .bz2 or .zst), .json (a list), Parquet, WARC and WET; other files are plain text.
An object has a query and a response, or messages (of which --turns are trained on), or a text. A prompt with its
response is never cut. Memory does not grow with the input. After a kill, the same command resumes. The output is the
same to the byte for any number of workers, and for --runner=beam, by which Apache Beam does the work on many machines.
Duplicates, near-duplicates and what filters refuse are left out on demand, and counted.
DIR (the --output) will hold rows-*.array_record, manifest.json, dropped.jsonl and the tokenizer.
"""

import dataclasses
import functools
import logging
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags
from etils import epath

from refusion_jax.cli import command, flag_values
from refusion_jax.cli.errors import UserError, needs, refusing
from refusion_jax.cli.paths import is_remote
from refusion_jax.data.examples import Fields
from refusion_jax.data.fast_tokenizer import THINKING, load_tokenizer_file
from refusion_jax.data.filters import ALL, RULES, Filters, FilterSettings
from refusion_jax.data.input_splits import find_files, pinned
from refusion_jax.data.manifest import LONGEST_ROW, Manifest, file_checksum
from refusion_jax.data.preparation import Preparation, plan_chunks
from refusion_jax.data.runners import Processes, Runner
from refusion_jax.data.shards import PrepareSettings
from refusion_jax.data.tokenizer import MASK_PIECE
from refusion_jax.distributed.host import available_cores

_INPUT = flags.DEFINE_multi_string(
    "input",
    None,
    "A file, a glob or a directory (all files below it), local, gs://, s3:// or hf://datasets/ORG/NAME; may be given "
    "several times",
)
_OUTPUT = flags.DEFINE_string("output", None, "The directory to write, local or gs://")
_SHAPING = [
    flags.DEFINE_string("tokenizer", None, "A sentencepiece model, or a tokenizer.json of Hugging Face"),
    flags.DEFINE_string("mask_piece", MASK_PIECE, "The tokenizer's piece that stands for a masked token"),
    flags.DEFINE_enum("thinking", "unset", list(THINKING), "enable_thinking of the chat template; unset: its default"),
    flags.DEFINE_integer("row_length", 4096, "Tokens per row, as --config.row_length of `train`", 2, LONGEST_ROW),
    flags.DEFINE_bool(
        "dedup", False, "Leave out examples whose text occurred earlier in the input; not texts longer than --shard_mib"
    ),
    flags.DEFINE_bool(
        "near_dedup",
        False,
        "Leave out examples that are near-duplicates of earlier ones: of those that share 0.8 of their word 5-grams, "
        "97.5 % are found (MinHash)",
    ),
    flags.DEFINE_list(
        "filters", [], f"Rules that leave out or change texts, among {', '.join(RULES)}: see the README of data/"
    ),
    flags.DEFINE_list("languages", [], f"Keep texts in these languages, such as en,de; {ALL}: keep and count all"),
    flags.DEFINE_list(
        "decontaminate",
        [],
        "JSONL files of test problems, such as DIR/*.jsonl: leave out what shares 13 consecutive words with one",
    ),
    flags.DEFINE_list("blocked_urls", [], "Files of domains or URL prefixes, one per line: leave out their records"),
    flags.DEFINE_integer("min_tokens", 0, "Leave out documents of fewer tokens", 0),
    flags.DEFINE_integer("max_tokens", 0, "Leave out documents of more tokens; 0: no limit", 0),
    flags.DEFINE_bool("shuffle", False, "Make each shard from randomly drawn parts of all files"),
    flags.DEFINE_float(
        "held_out", 0.0, "Share of documents, chosen by their text, that go to DIR/held_out instead", 0.0, 0.5
    ),
    flags.DEFINE_enum(
        "on_error",
        "stop",
        ["stop", "skip"],
        "At an example that is malformed or longer than a row: stop, or leave it out and list it in dropped.jsonl",
    ),
    flags.DEFINE_integer("shard_mib", 64, "MiB of input per shard, which bounds a worker's memory", 1, 1024),
    flags.DEFINE_enum("turns", "last", ["last", "all"], "Assistant turns of a conversation to train on"),
    flags.DEFINE_string("query_field", "", "JSON field of the prompt; empty: query, question or prompt"),
    flags.DEFINE_string("response_field", "", "JSON field of the answer; empty: response, answer or completion"),
    flags.DEFINE_string("text_field", "", "JSON field of a text without prompt; empty: text"),
]
_WORKERS = flags.DEFINE_integer("workers", None, "Processes; by default one per core", 1, 4096)
_RUNNER = flags.DEFINE_enum(
    "runner", "local", ["local", "beam"], "Processes on this machine, or Apache Beam; the files are the same"
)
_BEAM_OPTIONS = flags.DEFINE_string(
    "beam_options",
    "",
    "Options of Beam, such as '--runner=DataflowRunner --project=P --region=R --temp_location=gs://B/tmp'; empty: "
    "--workers processes on this machine",
)


def command_line(inputs: list[str]) -> str:
    """The command that creates the same files, without the flags for the output and the number of processes."""
    named = [f"--input={pattern}" for pattern in inputs]
    for flag in (flag for flag in _SHAPING if flag.value != flag.default):
        named.append(f"--{flag.name}={','.join(flag.value) if isinstance(flag.value, list) else flag.value}")
    return shlex.join(["python", "-m", "refusion_jax.prepare", *named])


def describe(manifest: Manifest) -> str:
    """The manifest in one line, for people."""
    dropped = ", ".join(f"{count:,} {kind}" for kind, count in manifest.dropped.items())
    turns = ", ".join(f"{count:,} of {role}" for role, count in manifest.left_out.items())
    return (
        f"{manifest.documents:,} documents, {manifest.tokens:,} tokens in {manifest.rows:,} rows of "
        f"{manifest.row_length}, {manifest.fill:.2%} full; left out: {dropped or 'nothing'}"
        + (f"; turns that the chat template leaves out, wholly or in part: {turns}" if turns else "")
    )


def _runner() -> Callable[[PrepareSettings, epath.Path], Runner]:
    count = _WORKERS.value or available_cores()
    if _RUNNER.value == "local":
        if _BEAM_OPTIONS.present:
            raise UserError("--beam_options goes with --runner=beam")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends processes: Python would warn of their semaphores
        return functools.partial(Processes, count=count)
    logging.disable(logging.WARNING)  # Beam warns that BigQuery's libraries are missing
    with needs("beam"):
        from refusion_jax.data.beam import BeamRunner
    logging.disable(logging.NOTSET)
    with refusing("--beam_options", ValueError):
        return functools.partial(BeamRunner, options=shlex.split(_BEAM_OPTIONS.value), count=count)


def _filters(flag: dict[str, Any]) -> FilterSettings:
    """The requested filters, with the checksums of the files that they read."""
    if unknown := set(flag["filters"]) - set(RULES):
        raise UserError(f"--filters={','.join(sorted(unknown))}: no filter of that name; there are {', '.join(RULES)}")
    files = {}
    for name in ("decontaminate", "blocked_urls"):
        found = [path for pattern in flag[name] for path in find_files(pattern) or [pattern]]
        files[name] = tuple((path, file_checksum(path)) for path in found)
    settings = FilterSettings(tuple(flag["filters"]), tuple(flag["languages"]), **files)
    Filters(settings)  # raises for faulty filters before anything is written
    return settings


def main() -> None:
    flag = {flag.name: flag.value for flag in _SHAPING}
    if not _INPUT.value or _OUTPUT.value is None or flag["tokenizer"] is None:
        raise UserError("--input, --output and --tokenizer are needed; --help explains")
    if is_remote(_OUTPUT.value) and not _OUTPUT.value.startswith("gs://"):
        raise UserError(f"--output={_OUTPUT.value}: rows are read only from a disk or gs://; name a place there")
    if not is_remote(_OUTPUT.value):
        flag_values.check_output("output", Path(_OUTPUT.value), directory=True)
        flag_values.check_apart(_OUTPUT.value, _INPUT.value)
    tokenizer = load_tokenizer_file(flag["tokenizer"], flag["mask_piece"], flag["thinking"])
    fields = Fields(flag["query_field"], flag["response_field"], flag["text_field"], "--", flag["turns"])
    shared = {field.name: flag[field.name] for field in dataclasses.fields(PrepareSettings) if field.name in flag}
    settings = PrepareSettings(**shared | {"fields": fields, "filters": _filters(flag)})
    runner, inputs = _runner(), list(map(pinned, _INPUT.value))
    try:
        chunks = plan_chunks(inputs, flag["shard_mib"] << 20, flag["shuffle"])
        output, line = epath.Path(_OUTPUT.value), command_line(inputs)
        manifest = Preparation(chunks, output, settings, tokenizer, line, runner).run()
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command resumes from here") from None
    print(f"{_OUTPUT.value}: {describe(manifest)}")


if __name__ == "__main__":
    command.run(main)

"""Decodes prompts with a trained model.

  python -m refusion_jax.generate --checkpoint=runs/quickstart --prompt='Sort 7 3 9 1.'
  python -m refusion_jax.generate --checkpoint=runs/quickstart --input=prompts.jsonl --output=answers.jsonl

Each line of --input is {"prompt": "text"} or {"prompt_ids": [ids]}, with an "id" if you like. A template,
{"template": ["text", 40, "more text", 24]}, gives some of the text and the lengths, in tokens, of the gaps to fill; it
follows the prompt, if there is one. {"decode": {"max_new_tokens": 64, "seed": 3}} changes settings for one line.

Each line of --output has id, text, tokens (reading order, through the end of text; of a template the given ones too),
commit_order (positions of all decoded tokens in the order of commitment, also those after the end of text), forwards,
rounds and finish_reason (eos, length or stop). Without --output the lines go to stdout, each as soon as those before it
are done; a single --prompt at a terminal gets its text alone, whose slots fill before your eyes. --watch=PAGE.html
also writes a page, which plays the decodings of up to 16 prompts in a browser, forward by forward; answers that are
kept are then decoded again. --compare=DECODER shows another decoder of the model next to them, --compare=runs/other the
default decoder of another model.

While it decodes, answers are kept in OUTPUT.partial as they finish. Killed, or stopped by a full disk, the same command
decodes what is missing; then OUTPUT is written, whole and in the order of the prompts, and OUTPUT.partial deleted.

Several processes, on one machine or on many that share a disk, answer parts of the prompts; killed, each goes on by its
own command. The last one to finish writes the same OUTPUT as a single process would:

  for i in 1 2 3 4; do python -m refusion_jax.generate ... --output=answers.jsonl --part=$i/4 & done; wait

Compiled programs are kept in $XDG_CACHE_HOME/refusion_jax/compiled (~/.cache by default), which is used only where
nobody else can write to it: the second call with the same sizes starts in seconds.

Memory on top of weights: the cache, mostly. It takes 2 x layers x key/value heads x head size x bytes of --dtype for
each token of each of --decode.batch_size rows. An 8B model in bfloat16: 147,456 bytes per token, 4.5 GiB for 64 rows of
512. What cannot fit is refused before anything is compiled. --decode.weights=int8 and --decode.cache=int8 take half of
bfloat16's bytes for weights and cache, and round them (benchmarks/results/int8.md).
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from absl import flags
from etils import epath

from refusion_jax.checkpoints.directory import find_step
from refusion_jax.checkpoints.load import (
    choose_method,
    describe_call,
    find_tokenizer,
    is_foreign,
    load_for,
    read_model_config,
)
from refusion_jax.cli import command, flag_values
from refusion_jax.cli.errors import UserError, naming
from refusion_jax.cli.paths import is_remote
from refusion_jax.cli.progress import track
from refusion_jax.cli.settings import declared
from refusion_jax.data.interface import Tokenizer
from refusion_jax.decoding.decoder import Decoder
from refusion_jax.decoding.journal import Journal, read_records
from refusion_jax.decoding.player import BEGINNING, MOST, Decodings, page
from refusion_jax.decoding.prompts import check_characters, encode_prompt, read_prompts, to_record
from refusion_jax.decoding.requests import Request, prepare
from refusion_jax.decoding.settings import Settings
from refusion_jax.decoding.stops import Stops
from refusion_jax.distributed.compiled_code import keep_for_user
from refusion_jax.distributed.sharding import make_mesh
from refusion_jax.distributed.storage import write_file
from refusion_jax.serving.terminal import Screen, printable
from refusion_jax.systems.api import DecodeSettings, all_settings, check_settings, decoder_for, play, stream
from refusion_jax.systems.registry import decoders, default_decoder, default_system, find_decoder

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, command.CHECKPOINT)
_INPUT = flags.DEFINE_string("input", None, "JSONL file of prompts")
_PROMPT = flags.DEFINE_string("prompt", None, "One prompt, instead of --input")
_OUTPUT = flags.DEFINE_string("output", None, "JSONL file of answers; stdout by default")
_PART = flags.DEFINE_string(
    "part", None, "Answer part I of N of the prompts alone, such as 2/4; the process that ends last writes the --output"
)
_WATCH = flags.DEFINE_string("watch", None, "HTML file that plays the decodings of up to 16 prompts in a browser")
_COMPARE = flags.DEFINE_string(
    "compare", None, "With --watch: a decoder, or a checkpoint, whose decodings are shown next to them"
)
_JSON = flags.DEFINE_bool("json", False, "With --prompt at a terminal: print the whole record, not only the text")
_CACHE = flags.DEFINE_string("compilation_cache", None, command.COMPILED)
_STOP = flags.DEFINE_multi_string("stop", [], "Cut answers where this text begins; may be given several times")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of weights, cache and computation")
_DATA = flags.DEFINE_integer("mesh.data", 1, "Split the batch over this many devices", lower_bound=1)
_TENSOR = flags.DEFINE_integer("mesh.tensor", 1, "Split heads and weights over this many devices", lower_bound=1)
_SETTINGS = command.define_settings(all_settings())


def useless_flags() -> list[str]:
    """Flags of settings that the chosen decoder does not have; of those it has, the help becomes its own."""
    method = command.given(_SETTINGS).get("method")
    if _CHECKPOINT.value:
        method = choose_method(epath.Path(_CHECKPOINT.value), method)
    own = declared(find_decoder(method or default_decoder(default_system().name)).settings)
    for name in own:
        flags.FLAGS[f"decode.{name}"].help = command.help_text(own[name])
    return [f"decode.{name}" for name in _SETTINGS if name not in own]


def check_place(checkpoint: epath.Path, flag: str, output: epath.Path, beginning: bytes, kind: str) -> None:
    """Raises UserError, naming the flag, where a file cannot be written, holds something else, or is among weights."""
    flag_values.check_apart(output, [_INPUT.value] if _INPUT.value else [], flag)
    flag_values.check_file(flag, output, beginning, kind)
    if not is_remote(output) and not is_remote(checkpoint):
        root = checkpoint if is_foreign(checkpoint) else find_step(checkpoint)[0]
        if Path(os.path.realpath(root / "checkpoints")) in Path(os.path.realpath(output)).parents:
            raise UserError(f"--{flag}={output}: lies between the weights of the model; name another place")


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a decoder of a model is asked."""

    checkpoint: epath.Path
    tokenizer: Tokenizer | None
    settings: Settings
    ids: Sequence[object]
    requests: Sequence[Request]
    decoder: Decoder

    @classmethod
    def read(cls, checkpoint: epath.Path, settings: Settings) -> "Asked":
        """The prompts of --prompt or --input, for a model; UserError where the decoder cannot serve them."""
        tokenizer = find_tokenizer(checkpoint)
        if _INPUT.value is None:
            prompts = [(0, Request(encode_prompt(_PROMPT.value, tokenizer, "--prompt"), name="--prompt"))]
        else:
            prompts = read_prompts(Path(_INPUT.value), tokenizer, settings)
        ids, requests = zip(*prompts, strict=True)
        config = read_model_config(checkpoint)
        requests = prepare(requests, settings, config)
        return cls(checkpoint, tokenizer, settings, ids, requests, decoder_for(requests, config))

    @property
    def name(self) -> str:
        """On a page."""
        is_other = _COMPARE.value not in (None, *decoders())
        return f"{self.settings.method}, {self.checkpoint.name}" if is_other else self.settings.method


def other(compare: str, checkpoint: epath.Path, given: dict[str, object]) -> Asked:
    """What is compared: another decoder of the model, or another model, as its decoder's settings say; or UserError."""
    method = compare if compare in decoders() else None
    checkpoint = checkpoint if method else epath.Path(compare)
    if not method and not checkpoint.exists():
        raise UserError(f"--compare={compare}: is neither a directory nor a decoder; known: {', '.join(decoders())}")
    with naming(f"--compare={compare}"):
        return Asked.read(checkpoint, DecodeSettings(**given | {"method": choose_method(checkpoint, method)}))


def parts_of(output: Path | None, text: str) -> tuple[int, list[Path]]:
    """(number from 0 of a part I/N, journals of all N parts).

    Raises UserError where this is no part, or the output no file on a disk, where the parts come together.
    """
    found = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", text)
    part, count = map(int, found.groups()) if found else (1, 0)
    if part > count:
        raise UserError(f"--part={text}: give I/N, such as 2/4, with I from 1 to N")
    if output is None or _WATCH.value:
        raise UserError(f"--part={text}: needs an --output that is a file on a disk, and makes no --watch page")
    return part - 1, [output.with_name(f"{output.name}.partial-{i}-of-{count}") for i in range(1, count + 1)]


class InOrder:
    """Passes on what comes in any order, in order, as soon as all before it is there."""

    def __init__(self, write: Callable[[dict], None]):
        self._write, self._waiting, self._next = write, {}, 0

    def add(self, index: int, record: dict) -> None:
        self._waiting[index] = record
        while self._next in self._waiting:
            self._write(self._waiting.pop(self._next))
            self._next += 1


def show(record: dict) -> None:
    """Prints one answer: a line of JSON, or at a terminal the text of a single prompt."""
    if is_for_people():
        print(printable(record["text"]), flush=True)
    else:
        print(to_line(record), end="", flush=True)


def is_for_people() -> bool:
    """Whether the text of a single prompt, and nothing else, goes to a terminal."""
    is_shown = _PROMPT.value is not None and not _OUTPUT.value and not _JSON.value
    return is_shown and sys.stdout.isatty()


def to_line(record: dict) -> str:
    """A record as a line of JSON."""
    return json.dumps(record, ensure_ascii=False) + "\n"


def main() -> None:
    if _CHECKPOINT.value is None or (_INPUT.value is None) == (_PROMPT.value is None):
        raise UserError("--checkpoint=DIR and one of --input=FILE and --prompt=TEXT are needed; --help explains")
    checkpoint = epath.Path(_CHECKPOINT.value)
    output = epath.Path(_OUTPUT.value) if _OUTPUT.value else None
    watch = epath.Path(_WATCH.value) if _WATCH.value else None
    if output:
        check_place(checkpoint, "output", output, b'{"id": ', "not answers")
    if watch:
        check_place(checkpoint, "watch", watch, BEGINNING, "no page of ours")
    if watch and output and os.path.realpath(watch) in map(os.path.realpath, (output, f"{output}.partial")):
        raise UserError(f"--watch={watch}: is the --output, too, or its OUTPUT.partial; name another place")
    stops = Stops(tuple(_STOP.value))
    for stop in stops.texts:
        check_characters(stop, "--stop")
    given = command.given(_SETTINGS)
    given["method"] = choose_method(checkpoint, given.get("method"))
    check_settings(given["method"], given)
    settings = DecodeSettings(**given)
    split = {"data": _DATA.value, "tensor": _TENSOR.value}
    mesh = make_mesh(split, jax.devices()[: math.prod(split.values())])

    # 1. What is asked for, checked as a whole.
    asked = Asked.read(checkpoint, settings)
    tokenizer, ids, requests = asked.tokenizer, asked.ids, asked.requests
    if stops.texts and tokenizer is None:
        raise UserError(
            f"--stop={stops.texts[0]}: {checkpoint} has no tokenizer, so its answers are no text to look in"
        )
    if watch and len(requests) > MOST:
        raise UserError(f"--watch={watch}: a page plays {MOST} prompts at most; {_INPUT.value} holds {len(requests)}")
    if _COMPARE.value and not watch:
        raise UserError(f"--compare={_COMPARE.value}: needs --watch=PAGE.html, which shows it")
    rival = other(_COMPARE.value, checkpoint, given) if _COMPARE.value else None
    keep_for_user(_CACHE.value)

    # 2. Where the answers go: to a file, through a journal; to anything else as soon as their turn comes.
    with contextlib.ExitStack() as stack:
        journal = None
        target = Path(os.path.realpath(output)) if output and not is_remote(output) else None
        if target and not (target.is_file() or not target.exists()):  # to etils a device is a file, too
            target = None
        mine, parts = parts_of(target, _PART.value) if _PART.value is not None else (0, [])
        if target:
            partial = parts[mine] if parts else target.with_name(f"{target.name}.partial")
            call = describe_call(_CHECKPOINT.value, ids, requests, _STOP.value, _DTYPE.value)
            journal = Journal(partial, call, range(len(requests)))
            stack.callback(journal.close)
            add, records = journal.add, journal.records
        elif output and is_remote(output):
            records = {}
            add = records.__setitem__
        else:
            file = output and stack.enter_context(open(output, "w", buffering=1, encoding="utf-8"))
            records, add = {}, InOrder(lambda record: file.write(to_line(record)) if file else show(record)).add

        # 3. What is not answered yet is decoded; for a page, everything.
        watched = Decodings(asked.name, tokenizer) if watch else None
        own = range(len(requests))[mine :: len(parts) or None]
        todo = [i for i in own if watched or i not in records]
        if done := len(own) - len(todo):
            print(f"{journal.path}: {done} of {len(own)} answers are there, going on", flush=True)
        if todo:
            screen = Screen(requests[0], tokenizer, asked.decoder.ids.eos_id) if is_for_people() else None
            answers = stream(
                load_for(checkpoint, settings, _DTYPE.value, mesh),
                [requests[i] for i in todo],
                asked.decoder,
                watch=(lambda _, answer: screen.show(answer)) if screen else None,
                every=1,
                record=watched.record if watched else None,
            )
            if screen:
                with screen:
                    answers = list(answers)
            for at, answer in track(answers, "decoding", len(own), done) if _INPUT.value else answers:
                record = to_record(ids[todo[at]], answer, tokenizer, stops)
                add(todo[at], record)
                if watched:
                    watched.add(at, requests[at], answer, len(record["tokens"]))

        # 4. The finished files, in the order of the prompts.
        if watched:
            recordings = [watched]
            if rival:
                model = load_for(rival.checkpoint, rival.settings, _DTYPE.value, mesh)
                recordings.append(play(model, rival.requests, rival.tokenizer, rival.name, stops))
            write_file(watch, page([(id, [of.scenes[i] for of in recordings]) for i, id in enumerate(ids)]))
        if parts:
            records = {key: record for path in parts for key, record in read_records(path, call).items()}
            if left := len(requests) - len(records):
                print(f"{journal.path}: {len(own)} answers; {left} are left to other parts")
                return
            stack.callback(lambda: [path.unlink(missing_ok=True) for path in parts])
        if journal or (output and is_remote(output)):
            write_file(output, "".join(to_line(records[i]) for i in range(len(requests))))
            if journal:
                journal.delete()
            print(f"{output}: {len(requests)} answers, {len(todo)} of them decoded now")


if __name__ == "__main__":
    command.run(main, hidden=useless_flags)

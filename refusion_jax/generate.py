"""Decodes prompts with a trained model.

  python -m refusion_jax.generate --checkpoint=runs/quickstart --prompt='Sort 7 3 9 1.'
  python -m refusion_jax.generate --checkpoint=runs/quickstart --input=prompts.jsonl --output=answers.jsonl

Each line of --input is {"prompt": "text"} or {"prompt_ids": [ids]}, with an "id" if you like. A template,
{"template": ["text", 40, "more text", 24]}, gives some of the text and the lengths, in tokens, of the gaps to fill; it
follows the prompt, if there is one. {"decode": {"max_new_tokens": 64, "seed": 3}} changes settings for one line.

Each line of --output has id, text, tokens (in reading order, up to the end of text; for a template also the given
ones), commit_order (positions of all decoded tokens in the order of commitment, also those after the end of text),
forwards, rounds and finish_reason (eos, length or stop). Without --output the lines go to stdout, each as soon as those
before it are done; for a single --prompt at a terminal only the text is shown, its slots as they fill (`| cat` prints
the line).
--watch=PAGE.html also writes a page that plays the decodings of up to 16 prompts in a browser, forward pass by forward
pass; answers that were kept are decoded again for it. --compare=DECODER shows another decoder of the model next to
them, --compare=runs/other the default decoder of another model.

Finished answers are kept in OUTPUT.partial. After a kill or a full disk, the same command decodes only what is missing.
At the end OUTPUT is written as a whole, in the order of the prompts, and OUTPUT.partial is deleted.

Several processes, on one machine or on several that share a disk, can each answer a part of the prompts; after a kill,
the command of that part resumes it. The last to finish writes OUTPUT, the same as one process would write (but
`forwards` may differ, because a batch shares its budget):

  for i in 1 2 3 4; do python -m refusion_jax.generate ... --output=answers.jsonl --part=$i/4 & done; wait

Compiled programs are kept in $XDG_CACHE_HOME/refusion_jax/compiled (~/.cache by default), which is used only if nobody
else can write to it, or in $JAX_COMPILATION_CACHE_DIR: the second call with the same sizes starts in seconds.

Besides the weights, memory is mostly taken by the cache: 2 x layers x key/value heads x head size x bytes of --dtype
for each token of each of --decode.batch_size rows. For an 8B model in bfloat16 that is 147,456 bytes per token, 4.5 GiB
for 64 rows of 512. What cannot fit is refused before anything is compiled. --decode.weights=int8 and
--decode.cache=int8 halve the bytes of bfloat16, by rounding (benchmarks/results/int8.md).
"""

import dataclasses
import os
import re
import sys
from collections.abc import Iterator, Sequence

from absl import flags
from etils import epath

from refusion_jax.checkpoints import contents
from refusion_jax.checkpoints.load import load_for
from refusion_jax.cli import command, flag_values
from refusion_jax.cli.errors import UserError, naming
from refusion_jax.cli.progress import track
from refusion_jax.cli.settings import declared
from refusion_jax.data.interface import Tokenizer
from refusion_jax.decoding.decoder import Decoder
from refusion_jax.decoding.output import is_on_disk, open_output, to_line
from refusion_jax.decoding.player import BEGINNING, MOST, Decodings, page
from refusion_jax.decoding.prompts import asked_prompts, to_record
from refusion_jax.decoding.requests import Answer, Request, prepare
from refusion_jax.decoding.settings import Settings
from refusion_jax.decoding.stops import Stops
from refusion_jax.distributed.compiled_code import keep_for_user
from refusion_jax.distributed.sharding import local_mesh
from refusion_jax.distributed.storage import write_file
from refusion_jax.model.interface import LanguageModel
from refusion_jax.serving.terminal import Screen, printable
from refusion_jax.systems.api import DecodeSettings, all_settings, decoder_for, play, stream
from refusion_jax.systems.registry import decoders, default_decoder, find_decoder

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, command.CHECKPOINT)
_INPUT = flags.DEFINE_string("input", None, "JSONL file of prompts", allow_overwrite=False)
_PROMPT = flags.DEFINE_string("prompt", None, "One prompt, instead of --input", allow_overwrite=False)
_OUTPUT = flags.DEFINE_string("output", None, "JSONL file of answers; stdout by default")
_PART = flags.DEFINE_string(
    "part", None, "Answer only part I of N of the prompts, such as 2/4; the process that finishes last writes --output"
)
_WATCH = flags.DEFINE_string("watch", None, "HTML file that plays the decodings of up to 16 prompts in a browser")
_COMPARE = flags.DEFINE_string(
    "compare", None, "With --watch: a decoder, or a checkpoint, whose decodings are shown next to them"
)
_STOP = flags.DEFINE_multi_string("stop", [], "Cut answers where this text begins; may be given several times")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of weights, cache and computation")
_DATA = flags.DEFINE_integer("mesh.data", 1, "Split the batch over this many devices", lower_bound=1)
_TENSOR = flags.DEFINE_integer("mesh.tensor", 1, "Split heads and weights over this many devices", lower_bound=1)
command.define_settings(all_settings())


def useless_flags() -> list[str]:
    """Flags of settings that the chosen decoder does not have; the help of the others becomes that decoder's."""
    method = command.given().get("method")
    if _CHECKPOINT.value:
        method = contents.choose_method(epath.Path(_CHECKPOINT.value), method)
    own = declared(find_decoder(method or default_decoder(None)).settings)
    for name in own:
        flags.FLAGS[f"decode.{name}"].help = command.help_text(own[name])
    return [f"decode.{name}" for name in all_settings() if name not in own]


@dataclasses.dataclass(frozen=True)
class Asked:
    """A model, its decode settings and its prompts."""

    checkpoint: epath.Path
    tokenizer: Tokenizer | None
    settings: Settings
    ids: Sequence[object]
    requests: Sequence[Request]
    decoder: Decoder

    @classmethod
    def read(cls, checkpoint: epath.Path, settings: Settings) -> "Asked":
        """Reads the prompts of --prompt or --input for a model; UserError if the decoder cannot serve them."""
        tokenizer = contents.find_tokenizer(checkpoint)
        ids, requests = asked_prompts(_PROMPT.value, _INPUT.value, tokenizer, settings)
        config = contents.read_model_config(checkpoint)
        requests = prepare(requests, settings, config)
        return cls(checkpoint, tokenizer, settings, ids, requests, decoder_for(requests, config))

    @property
    def name(self) -> str:
        """The name shown on a page."""
        is_other = _COMPARE.value not in (None, *decoders())
        return f"{self.settings.method}, {self.checkpoint.name}" if is_other else self.settings.method


def other(compare: str, checkpoint: epath.Path, given: dict[str, object]) -> Asked:
    """What --compare names: another decoder of the model, or another model with its default decoder; or UserError."""
    method = compare if compare in decoders() else None
    checkpoint = checkpoint if method else epath.Path(compare)
    if not method and not checkpoint.exists():
        raise UserError(f"--compare={compare}: is neither a directory nor a decoder; known: {', '.join(decoders())}")
    with naming(f"--compare={compare}"):
        return Asked.read(checkpoint, DecodeSettings(**given | {"method": contents.choose_method(checkpoint, method)}))


def part_of(text: str, output: epath.Path | None) -> tuple[int, int]:
    """(number, count) of a part I/N.

    Raises UserError if this is not a part, or if the output, in which parts are merged, is not a file on a disk.
    """
    found = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", text)
    number, count = map(int, found.groups()) if found else (1, 0)
    if number > count:
        raise UserError(f"--part={text}: give I/N, such as 2/4, with I from 1 to N")
    if output is None or not is_on_disk(output) or _WATCH.value:
        raise UserError(f"--part={text}: needs an --output that is a file on a disk, and makes no --watch page")
    return number, count


def show(record: dict) -> None:
    """Prints one answer: a line of JSON, or at a terminal the text of a single prompt."""
    if is_for_people():
        print(printable(record["text"]), flush=True)
    else:
        print(to_line(record), end="", flush=True)


def is_for_people() -> bool:
    """Whether the text of a single prompt, and nothing else, goes to a terminal."""
    return _PROMPT.value is not None and not _OUTPUT.value and sys.stdout.isatty()


def check_places(output: epath.Path | None, watch: epath.Path | None) -> None:
    """Raises UserError if a requested file cannot be written, or has other content."""
    answers, page_of_ours = (b'{"id": ', "does not hold answers"), (BEGINNING, "is not a page of ours")
    for flag, path, kind in (("output", output, answers), ("watch", watch, page_of_ours)):
        if not path:
            continue
        flag_values.check_apart(path, [_INPUT.value] if _INPUT.value else [], flag)
        flag_values.check_file(flag, path, *kind)
    if watch and output and os.path.realpath(watch) in map(os.path.realpath, (output, f"{output}.partial")):
        raise UserError(f"--watch={watch}: is also the --output or its OUTPUT.partial; name another place")
    if _COMPARE.value and not watch:
        raise UserError(f"--compare={_COMPARE.value}: needs --watch=PAGE.html, which shows it")


def check_uses(asked: Asked, stops: Stops) -> None:
    """Raises UserError if a flag has no effect on these prompts."""
    if stops.texts and asked.tokenizer is None:
        why = "has no tokenizer, so its answers have no text to search"
        raise UserError(f"--stop={stops.texts[0]}: {asked.checkpoint} {why}")
    if _WATCH.value and (count := len(asked.requests)) > MOST:
        raise UserError(f"--watch={_WATCH.value}: a page plays {MOST} prompts at most; {_INPUT.value} holds {count}")


def answers_to(
    asked: Asked, indices: Sequence[int], model: LanguageModel, recording: Decodings | None
) -> Iterator[tuple[int, Answer]]:
    """(index, answer) for some of the prompts: at a terminal a single one is shown as it fills, others with a bar."""
    screen = Screen(asked.requests[0], asked.tokenizer, asked.decoder.ids.eos_id) if is_for_people() else None
    answers = stream(
        model,
        [asked.requests[i] for i in indices],
        asked.decoder,
        watch=(lambda _, answer: screen.show(answer)) if screen else None,
        every=1,
        record=recording.record if recording else None,
    )
    if screen:
        with screen:
            answers = list(answers)
    for at, answer in track(answers, "decoding", len(indices)) if _INPUT.value else answers:
        yield indices[at], answer


def main() -> None:
    # 1. Check everything that is asked for.
    if _CHECKPOINT.value is None or (_INPUT.value is None) == (_PROMPT.value is None):
        raise UserError("--checkpoint=DIR and one of --input=FILE and --prompt=TEXT are needed; --help explains")
    checkpoint = epath.Path(_CHECKPOINT.value)
    output, watch = (epath.Path(flag.value) if flag.value else None for flag in (_OUTPUT, _WATCH))
    check_places(output, watch)
    part = part_of(_PART.value, output) if _PART.value is not None else None
    stops = Stops(tuple(_STOP.value))
    given = command.given()
    settings = contents.chosen_settings(checkpoint, given)
    mesh = local_mesh(data=_DATA.value, tensor=_TENSOR.value)
    asked = Asked.read(checkpoint, settings)
    check_uses(asked, stops)
    rival = other(_COMPARE.value, checkpoint, given) if _COMPARE.value else None
    keep_for_user()

    # 2. Decode what is not answered yet; for a page, everything.
    ids, requests = asked.ids, asked.requests
    call = contents.describe_call(_CHECKPOINT.value, ids, requests, _STOP.value, _DTYPE.value)
    with open_output(output, show, len(ids), call, part) as answers:
        recording = Decodings(asked.name, asked.tokenizer) if watch else None
        if todo := range(len(ids)) if watch else answers.left:
            model = load_for(checkpoint, asked.settings, _DTYPE.value, mesh)
            for i, answer in answers_to(asked, todo, model, recording):
                record = to_record(ids[i], answer, asked.tokenizer, stops)
                answers.add(i, record)
                if recording:
                    recording.add(i, requests[i], answer, len(record["tokens"]))

        # 3. Write the finished files, in the order of the prompts.
        if recording:
            recordings = [recording]
            if rival:
                model = load_for(rival.checkpoint, rival.settings, _DTYPE.value, mesh)
                recordings.append(play(model, rival.requests, rival.tokenizer, rival.name, stops))
            write_file(watch, page([(id, [of.scenes[i] for of in recordings]) for i, id in enumerate(ids)]))


if __name__ == "__main__":
    command.run(main, hidden=useless_flags)

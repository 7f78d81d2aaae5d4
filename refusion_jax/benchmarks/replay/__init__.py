"""How the speed of decoding depends on the size of the model: a trained run's answers, at the price of larger ones.

  python -m refusion_jax.bench replay --checkpoint=runs/quickstart
  python -m refusion_jax.bench replay --checkpoint=runs/quickstart --checkpoint=runs/ar --shapes=640x12 \
      --batch_sizes=1 --way='refusion slot_size=4' --way=sequential --way=ar

Large models are dear to train, but their time for a forward needs no training. So the trained run decides what is
written, and every forward that its decoder takes is taken by random weights of another size as well, on the same
tokens and with a cache of their own (replay/beside.py): the same feeds, whatever the size. What the small model takes
itself is in all times, and so is the decoder's own work.

Each --way is the name of a decoder, and settings of its own behind it; it decodes the first --checkpoint whose system
it serves. By default these are the decoders of the default system. Held-out problems of the quickstart are decoded in
turns, so many in each, every way after the other, and `speedup` is the median over the turns of the tokens a second
over those of the last way. `speedup_cpu` is the same by the CPU time of this process, which other work on the machine
disturbs less; it means nothing where a GPU or TPU computes. Only tokens of the answers count.

--shapes lists hidden sizes, multiples of 128, and numbers of layers: 640x12 has 59 M parameters. The trained run alone
is measured in front of them.
"""

import contextlib
import dataclasses
import functools
import json
import time
from typing import Any

import jax
import numpy as np
from absl import flags
from etils import epath
from flax import nnx
from rich.console import Console
from rich.table import Table

from refusion_jax.benchmarks._problems import MAX_NEW_TOKENS, checkpoints_of, held_out
from refusion_jax.benchmarks.decode import read_way
from refusion_jax.benchmarks.replay.beside import Beside, beside, read_shape
from refusion_jax.checkpoints.load import choose_method, load_model, load_tokenizer
from refusion_jax.cli import flag_values
from refusion_jax.cli.errors import SettingError
from refusion_jax.data import tasks
from refusion_jax.data.interface import Tokenizer
from refusion_jax.decoding.requests import prepare
from refusion_jax.decoding.settings import Settings
from refusion_jax.model.transformer import Transformer
from refusion_jax.systems.api import decoder_for, stream
from refusion_jax.systems.registry import default_system


def define_flags(own: flags.FlagValues) -> None:
    """The flags of this benchmark."""
    number = functools.partial(flags.DEFINE_integer, lower_bound=1, flag_values=own)
    flags.DEFINE_multi_string("checkpoint", None, "A run on the built-in problems; may be given again", flag_values=own)
    flags.DEFINE_list("shapes", ["384x8", "640x12", "896x18", "1280x15"], "WIDTHxLAYERS, each", flag_values=own)
    flags.DEFINE_list("batch_sizes", ["1", "16"], "Prompts decoded at once, each measured", flag_values=own)
    flags.DEFINE_multi_string("way", None, "A decoder and settings of its own", flag_values=own)
    number("prompts_per_row", 2, "Problems of a turn for every row of the batch")
    number("repeats", 3, "Turns")


def main(own: flags.FlagValues) -> None:
    """Prints one JSON object a shape, batch size and way, then a table."""
    checkpoints = checkpoints_of(own)
    shapes = [None, *(read_shape("shapes", text) for text in own.shapes)]
    batch_sizes = flag_values.read_counts("batch_sizes", own.batch_sizes)
    ways = {way: read_way(way, {"max_new_tokens": MAX_NEW_TOKENS}) for way in own.way or default_system().decoders}
    place_of = {way: find_checkpoint(checkpoints, settings.method) for way, settings in ways.items()}
    loaded = {place: load_model(place) for place in dict.fromkeys(place_of.values())}
    tokenizers = {place: load_tokenizer(place) for place in loaded}
    table = Table("parameters", "batch", "way", "right", "tokens/forward", "tokens/s", "speedup", "by CPU time")
    for shape in shapes:
        models = loaded if shape is None else beside(loaded, *shape)
        for size in batch_sizes:
            subjects = {
                way: Subject(
                    models[place_of[way]], tokenizers[place_of[way]], dataclasses.replace(settings, batch_size=size)
                )
                for way, settings in ways.items()
            }
            for record in measure(subjects, own.prompts_per_row * size, own.repeats):
                print(json.dumps(record), flush=True)
                cells = (record["parameters"], record["batch_size"], record["way"])
                table.add_row(
                    *map(str, cells),
                    f"{record['accuracy']:.1%}",
                    f"{record['tokens_per_forward']:.2f}",
                    f"{record['tokens_per_second']:,.1f}",
                    f"{record['speedup']:.2f}",
                    f"{record['speedup_cpu']:.2f}",
                )
            jax.clear_caches()  # each program takes memory mappings, of which a process has 65,530
    Console().print(table)


@dataclasses.dataclass(frozen=True)
class Subject:
    """What a way decodes with."""

    model: Transformer
    tokenizer: Tokenizer
    settings: Settings


def find_checkpoint(places: list[str], method: str) -> str:
    """The first of these runs whose models a decoder serves.

    Raises:
      SettingError: where it is none of them; about the last one.
    """
    *others, last = places
    for place in others:
        with contextlib.suppress(SettingError):
            choose_method(epath.Path(place), method)
            return place
    choose_method(epath.Path(last), method)
    return last


def measure(subjects: dict[str, Subject], count: int, turns: int) -> list[dict[str, Any]]:
    """All ways on the same problems, `count` in each turn, one way after the other.

    Returns:
      A record of each way: its accuracy, tokens a forward, and speed.
    """
    problems = held_out(count * turns)
    runs = {way: Run(subject, [problem.query for problem in problems]) for way, subject in subjects.items()}
    for run in runs.values():
        run.decode(range(min(count, run.settings.batch_size)))  # compiles
        run.forget()
    for turn in range(turns):
        for run in runs.values():
            run.decode(range(turn * count, (turn + 1) * count))
    *_, last = runs.values()
    return [
        {
            "benchmark": "replay",
            "parameters": run.parameters,
            "batch_size": run.settings.batch_size,
            "way": way,
            "problems": len(problems),
            "accuracy": sum(tasks.is_correct(*pair) for pair in zip(problems, run.texts, strict=True)) / len(problems),
            "tokens": sum(run.tokens),
            "tokens_per_forward": sum(run.tokens) / run.forwards,
            "tokens_per_second": sum(run.tokens) / sum(run.seconds),
            "cpu_seconds_per_token": sum(run.cpu_seconds) / sum(run.tokens),
            "speedup": float(np.median(run.speed(run.seconds) / last.speed(last.seconds))),
            "speedup_cpu": float(np.median(run.speed(run.cpu_seconds) / last.speed(last.cpu_seconds))),
            "device": jax.devices()[0].device_kind,
        }
        for way, run in runs.items()
    ]


class Run:
    """A way of decoding, and what it has taken in each turn."""

    def __init__(self, subject: Subject, queries: list[str]):
        self._model, self._tokenizer, self.settings = subject.model, subject.tokenizer, subject.settings
        config = self._model.config
        self._requests = prepare(self._tokenizer.encode_prompts(queries), self.settings, config)
        self._decoder = decoder_for(self._requests, config)
        self.forget()

    def forget(self) -> None:
        """Nothing has been taken yet."""
        self.seconds, self.cpu_seconds, self.tokens, self.texts, self.forwards = [], [], [], [], 0

    def decode(self, which: range) -> None:
        """One turn: these of the problems, as a queue."""
        requests = [self._requests[i] for i in which]
        began, cpu_began = time.perf_counter(), time.process_time()
        answers = dict(stream(self._model, requests, self._decoder))
        self.seconds.append(time.perf_counter() - began)
        self.cpu_seconds.append(time.process_time() - cpu_began)
        self.tokens.append(sum(len(answer.tokens) for answer in answers.values()))
        self.forwards += sum(answer.forwards for answer in answers.values())
        self.texts += [self._tokenizer.decode(answers[i].tokens) for i in range(len(requests))]

    def speed(self, seconds: list[float]) -> np.ndarray:
        """Tokens a second in each turn [turns]."""
        return np.array(self.tokens) / np.array(seconds)

    @property
    def parameters(self) -> int:
        """Of the model whose size is measured."""
        model = self._model
        return model.parameters if isinstance(model, Beside) else sum(x.size for x in jax.tree.leaves(nnx.state(model)))

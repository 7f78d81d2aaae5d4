"""The sources of text: built-in problems, the source code of the standard library, or the user's files.

Whatever the source, it becomes a stream of `Example`s. A bad one (malformed line, missing field, empty answer) is an
error that names file and line, or with on_error="skip" it is counted and left out.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import ml_collections

from refusion_jax.cli.errors import UserError
from refusion_jax.data import families, input_splits, tasks
from refusion_jax.data.examples import Bad, Example, Fields
from refusion_jax.data.problems import Problem

GENERATED = {"tasks": lambda data: tasks.MIXTURE, "families": lambda data: families.mixture(data.difficulty)}
HELD_OUT = "held_out"  # as in families:held_out
_PART = 1 << 20  # bytes of a text tokenized at a time; other files are read as a whole
_MOST = 1 << 30  # characters
_FEWER = 100  # there are so many times fewer held-out problems than training problems


def held_out_problems(data: ml_collections.ConfigDict) -> Iterator[Problem]:
    """The held-out problems of a generated source, on which the losses of all its runs can be compared."""
    return GENERATED[data.path.partition(":")[0]](data).problems("test", -(-data.examples // _FEWER), seed=0)


def read_examples(
    data: ml_collections.ConfigDict, seed: int, path_flag: str = "--config.data.path", fields_flag: str = Fields.flag
) -> Iterator[Example | Bad]:
    """All examples of `config.data`, in a fixed order; held-out problems are the same for every seed."""
    name, _, split = data.path.partition(":")
    if name in GENERATED and split in ("", HELD_OUT):
        problems = held_out_problems(data) if split else GENERATED[name](data).problems("train", data.examples, seed)
        for index, problem in enumerate(problems):
            yield Example(problem.query, problem.response, f"{data.path}:{index}")
        return
    if not (files := input_splits.find_files(input_splits.pinned(data.path, path_flag))):
        missing = f"does not exist (built in: {', '.join(GENERATED)}, stdlib)"
        why = "holds no file" if Path(data.path).is_dir() else missing
        raise UserError(f"{path_flag}: {data.path} {why}")
    fields = Fields(data.query_field, data.response_field, data.text_field, fields_flag, data.turns)
    characters, example = 0, None
    for part in (part for path in files for part in input_splits.splits_of(path, _PART, of_records=sys.maxsize)):
        for example in input_splits.read(part, fields):
            if isinstance(example, Example):
                characters += example.characters
            if characters > _MOST:
                raise UserError(
                    f"{path_flag}: {data.path} holds more than {_MOST:,} characters, all of which would be kept "
                    f"in memory: give a part of it, or `train` on the directory that `prepare` makes of it"
                )
            yield example
    if example is None:
        raise UserError(f"{path_flag}: {data.path} holds no example")

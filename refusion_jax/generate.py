"""Decodes prompts with a trained model.

  python -m refusion_jax.generate --checkpoint=runs/quickstart --prompt='Sort 7 3 9 1.'
  python -m refusion_jax.generate --checkpoint=runs/quickstart --input=prompts.jsonl --output=answers.jsonl

Each line of --input is {"prompt": "text"} or {"prompt_ids": [ids]}, with an "id" if you like. Each line of --output has
id, text, tokens (reading order, through the end of text), commit_order (positions in the order in which tokens were
written), forwards, rounds and finish_reason (eos or length). Without --output the lines go to the terminal.
"""

import dataclasses
import json
from pathlib import Path

from absl import flags

from refusion_jax import cli
from refusion_jax.checkpoints import find_step
from refusion_jax.data.fast_tokenizer import FastTokenizer
from refusion_jax.data.tokenizer import Tokenizer
from refusion_jax.decoding.api import decode
from refusion_jax.decoding.settings import METHODS, DecodeSettings
from refusion_jax.errors import UserError
from refusion_jax.huggingface import is_huggingface
from refusion_jax.pretrained import find_tokenizer, load_model
from refusion_jax.workdir import check_output, read_config, write_file

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "A training run's directory, or one step in its checkpoints/")
_INPUT = flags.DEFINE_string("input", None, "JSONL file of prompts")
_PROMPT = flags.DEFINE_string("prompt", None, "One prompt, instead of --input")
_OUTPUT = flags.DEFINE_string("output", None, "JSONL file of answers; the terminal by default")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of weights and computation")
_METHOD = flags.DEFINE_enum("decode.method", None, METHODS, "How; by default what the model was trained for")
_DEFINE = {int: flags.DEFINE_integer, float: flags.DEFINE_float}
_MEANING = cli.declared_settings(DecodeSettings)
_SETTINGS = {
    field.name: _DEFINE[field.type](f"decode.{field.name}", field.default, _MEANING[field.name][1])
    for field in dataclasses.fields(DecodeSettings)
    if field.name != "method"
}


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One line of the input."""

    id: object
    ids: list[int]
    where: str  # for messages


def generate(
    checkpoint: Path,
    tokenizer: Tokenizer | FastTokenizer | None,
    prompts: list[Prompt],
    settings: DecodeSettings,
    dtype: str,
) -> list[dict]:
    """Answers to prompts, as the records that --output holds.

    Raises:
      UserError: where a prompt does not fit, or the model cannot decode with the method.
    """
    out = decode(load_model(checkpoint, dtype), [p.ids for p in prompts], settings, [p.where for p in prompts])
    return [
        {
            "id": prompt.id,
            "text": tokenizer.decode(out.tokens[i]) if tokenizer else None,
            "tokens": out.tokens[i],
            "commit_order": out.commit_order[i],
            "forwards": out.forwards[i],
            "rounds": out.rounds[i],
            "finish_reason": out.finish_reason[i],
        }
        for i, prompt in enumerate(prompts)
    ]


def read_prompts(path: Path, tokenizer: Tokenizer | FastTokenizer | None) -> list[Prompt]:
    """The prompts of a JSONL file; UserError names the file and line at fault."""
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--input={path} cannot be read: {error}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            item = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where}: not JSON: {error}") from error
        if isinstance(item, dict) and isinstance(item.get("prompt"), str):
            ids = encode(item["prompt"], tokenizer, where)
        elif isinstance(item, dict) and _is_id_list(item.get("prompt_ids")):
            ids = item["prompt_ids"]
        else:
            raise UserError(f'{where}: must be {{"prompt": "text"}} or {{"prompt_ids": [ids]}}')
        prompts.append(Prompt(item.get("id", number - 1), ids, where))
    if not prompts:
        raise UserError(f"--input={path} holds no prompt")
    return prompts


def encode(text: str, tokenizer: Tokenizer | FastTokenizer | None, where: str) -> list[int]:
    """Token ids of a prompt; UserError where the model came without a tokenizer."""
    if tokenizer is None:
        raise UserError(f"{where}: this model came without a tokenizer; give prompt_ids")
    return tokenizer.encode_prompts([text])[0]


def _is_id_list(value: object) -> bool:
    return isinstance(value, list) and all(type(x) is int for x in value)


def choose_method(checkpoint: Path, method: str | None) -> str:
    """The decoding method: the one asked for, else the one the model was trained for.

    Raises:
      UserError: where the model was not trained for the method.
    """
    if is_huggingface(checkpoint) or not (run := find_step(checkpoint)[0] / "config.json").exists():
        return method or "refusion"  # nobody says what it was trained for
    objective = read_config(run.parent).objective
    fitting = ("ar",) if objective == "ar" else ("refusion", "sequential")
    if method and method not in fitting:
        raise UserError(
            f"--decode.method={method}: {checkpoint} was trained with objective={objective}, which decodes with "
            f"{' or '.join(fitting)}"
        )
    return method or fitting[0]


def main() -> None:
    if _CHECKPOINT.value is None or (_INPUT.value is None) == (_PROMPT.value is None):
        raise UserError("--checkpoint=DIR and one of --input=FILE and --prompt=TEXT are needed; --help explains")
    checkpoint = Path(_CHECKPOINT.value)
    output = _OUTPUT.value and Path(_OUTPUT.value)
    if output:
        check_output("output", output)
    method = choose_method(checkpoint, _METHOD.value)
    settings = DecodeSettings(method, **{name: flag.value for name, flag in _SETTINGS.items()})

    tokenizer = find_tokenizer(checkpoint)
    if _INPUT.value is None:
        prompts = [Prompt(0, encode(_PROMPT.value, tokenizer, "--prompt"), "--prompt")]
    else:
        prompts = read_prompts(Path(_INPUT.value), tokenizer)
    lines = [
        json.dumps(answer, ensure_ascii=False)
        for answer in generate(checkpoint, tokenizer, prompts, settings, _DTYPE.value)
    ]
    if output:
        write_file(output, "".join(line + "\n" for line in lines))
        print(f"{output}: {len(lines)} answers")
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    cli.run(main)

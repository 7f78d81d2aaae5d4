"""Decodes prompts with a trained model.

  python -m refusion_jax.generate --checkpoint=runs/quickstart --prompt='Sort 7 3 9 1.'
  python -m refusion_jax.generate --checkpoint=runs/quickstart --input=prompts.jsonl --output=answers.jsonl

Each line of --input is {"prompt": "text"} or {"prompt_ids": [ids]}, with an "id" if you like. A template,
{"template": ["text", 40, "more text", 24]}, gives some of the text and the lengths, in tokens, of the gaps to fill; it
follows the prompt, if there is one. {"decode": {"max_new_tokens": 64, "seed": 3}} changes settings for one line.

Each line of --output has id, text, tokens (reading order, through the end of text; of a template the given ones too),
commit_order (positions in the order in which tokens were written), forwards, rounds and finish_reason (eos, length or
stop). Without --output the lines go to the terminal.

Memory beside the weights: mostly the cache, which takes 2 x layers x key/value heads x head size x bytes of --dtype for
each token of each of --decode.batch_size rows. An 8B model in bfloat16: 147,456 bytes a token, 4.5 GiB for 64 rows of
512. What cannot fit is refused before anything is compiled.
"""

import json
import sys
from pathlib import Path

import jax
from absl import flags
from etils import epath
from rich.console import Console
from rich.progress import track

from refusion_jax.decoding.prompts import encode_prompt, read_prompts, to_record
from refusion_jax.decoding.requests import Request, prepare
from refusion_jax.runtime import cli
from refusion_jax.runtime.errors import UserError
from refusion_jax.runtime.settings import declared
from refusion_jax.runtime.sharding import MESH_AXES, make_mesh
from refusion_jax.runtime.storage import write_file
from refusion_jax.systems.api import DecodeSettings, all_settings, check_settings, stream
from refusion_jax.systems.registry import decoders_for, default_system, find_decoder
from refusion_jax.training.pretrained import choose_method, find_tokenizer, load_model

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "A training run's directory, or one step in its checkpoints/")
_INPUT = flags.DEFINE_string("input", None, "JSONL file of prompts")
_PROMPT = flags.DEFINE_string("prompt", None, "One prompt, instead of --input")
_OUTPUT = flags.DEFINE_string("output", None, "JSONL file of answers; the terminal by default")
_STOP = flags.DEFINE_multi_string("stop", [], "Cut answers where this text begins; may be given several times")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of weights, cache and computation")
_DATA = flags.DEFINE_integer("mesh.data", 1, "Split the batch over this many devices", lower_bound=1)
_TENSOR = flags.DEFINE_integer("mesh.tensor", 1, "Split heads and weights over this many devices", lower_bound=1)
_SETTINGS = cli.define_settings(all_settings(), "decode")


def useless_flags() -> list[str]:
    """Flags of settings that the chosen decoder does not have."""
    method = cli.given(_SETTINGS).get("method")
    if _CHECKPOINT.value:
        method = choose_method(epath.Path(_CHECKPOINT.value), method)
    own = declared(find_decoder(method or decoders_for(default_system().name)[0]).settings)
    return [f"decode.{name}" for name in _SETTINGS if name not in own]


def main() -> None:
    if _CHECKPOINT.value is None or (_INPUT.value is None) == (_PROMPT.value is None):
        raise UserError("--checkpoint=DIR and one of --input=FILE and --prompt=TEXT are needed; --help explains")
    checkpoint = epath.Path(_CHECKPOINT.value)
    output = _OUTPUT.value and Path(_OUTPUT.value)
    if output:
        cli.check_output("output", output)
    given = cli.given(_SETTINGS)
    given["method"] = choose_method(checkpoint, given.get("method"))
    check_settings(given["method"], given)
    settings = DecodeSettings(**given)
    split = {"data": _DATA.value, "tensor": _TENSOR.value}
    mesh = make_mesh(dict.fromkeys(MESH_AXES, 1) | split, jax.devices()[: _DATA.value * _TENSOR.value])

    tokenizer = find_tokenizer(checkpoint)
    if _INPUT.value is None:
        prompts = [(0, Request(encode_prompt(_PROMPT.value, tokenizer, "--prompt"), name="--prompt"))]
    else:
        prompts = read_prompts(Path(_INPUT.value), tokenizer, settings)
    ids, requests = zip(*prompts, strict=True)
    model = load_model(checkpoint, _DTYPE.value, mesh)
    requests = prepare(requests, settings, model.config)

    answers = track(
        stream(model, requests),
        total=len(requests),
        description="decoding",
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
    records = {i: to_record(ids[i], answer, tokenizer, _STOP.value) for i, answer in answers}
    lines = [json.dumps(records[i], ensure_ascii=False) for i in range(len(requests))]
    if output:
        write_file(output, "".join(line + "\n" for line in lines))
        print(f"{output}: {len(lines)} answers")
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    cli.run(main, hidden=useless_flags)

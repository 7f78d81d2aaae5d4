"""Converts Hugging Face directories into our checkpoints, and our models into directories that transformers loads.

  python -m refusion_jax.convert --format=orbax --from=Qwen3-0.6B --to=gs://bucket/models/qwen3-0.6b
  python -m refusion_jax.convert --format=huggingface --from=gs://bucket/runs/mine --to=export --dtype=bfloat16

Directories are local or in an object store. Families that can be read: Gemma 3 (its text models), Llama, SmolLM2,
SmolLM3, Mistral, OLMo 2, Qwen2, Qwen3, Qwen3-MoE; and what the authors of other systems released (systems/README.md).
Weights are spread over all devices of this machine, or kept in its memory with JAX_PLATFORMS=cpu. Tokenizer files are
copied. `generate` reads both kinds of directory as they are, and adapters that `peft` wrote; --format=peft writes the
adapters of a run. An exported run has a model card, README.md, which says how transformers decodes it.
"""

import contextlib
import functools
import math
import os
from collections.abc import Iterator

import jax
from absl import flags
from etils import epath

from refusion_jax.checkpoints import contents
from refusion_jax.checkpoints.load import load_model, read_trained
from refusion_jax.checkpoints.run_directory import write_model_config
from refusion_jax.checkpoints.weights import save_params
from refusion_jax.cli import command, flag_values
from refusion_jax.cli.errors import UserError
from refusion_jax.cli.paths import is_remote
from refusion_jax.cli.progress import track
from refusion_jax.config.model_card import model_card
from refusion_jax.distributed import sharding
from refusion_jax.distributed.storage import absolute, read_file, remove, try_lock, write_file
from refusion_jax.model import huggingface, huggingface_config, peft
from refusion_jax.model.transformer import abstract_transformer
from refusion_jax.systems.interface import SHARED_CODE
from refusion_jax.systems.registry import releases, systems

_FROM = flags.DEFINE_string("from", None, "Directory to read, local or gs://")
_TO = flags.DEFINE_string("to", None, "Directory to create, local or gs://")
_FORMAT = flags.DEFINE_enum(
    "format",
    None,
    ["orbax", "huggingface", "peft"],
    "What to write: orbax (ours), huggingface, or peft (only the adapters of a run with lora.rank)",
)
_DTYPE = flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "Type of the weights written; by default their own")
_MASK = flags.DEFINE_integer(
    "mask_token_id", None, "Id of the mask token; by default config.json's, or the tokenizer's (format=orbax)"
)
_OBJECTIVE = flags.DEFINE_string(
    "objective", None, "System that trained the model, such as d2f; by default as its files say"
)

_TOKENIZER_FILES = (
    *("tokenizer.model", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "generation_config.json"),
)


def mesh_over_all(hidden_size: int) -> jax.sharding.Mesh:
    """A mesh of the most devices that can split the weights evenly."""
    return sharding.local_mesh(fsdp=math.gcd(jax.device_count(), hidden_size))


def to_orbax(
    source: epath.Path, target: epath.Path, dtype: str, objective: str | None, mask_token_id: int | None
) -> None:
    """Reads a Hugging Face directory, spread over all devices here, and writes checkpoints/0/ and model.json."""
    tokenizer = contents.find_tokenizer(source, mask_token_id)
    config = huggingface_config.read_model_config(source, tokenizer, mask_token_id, releases())
    if config.mask_token_id < 0:
        raise UserError(f"{source}/config.json has no mask_token_id; name one with --mask_token_id")
    _, params = abstract_transformer(config, dtype, mesh_over_all(config.hidden_size))
    params = huggingface.load_params(source, params, releases(), functools.partial(track, what="reading"))
    save_params(target, params)
    write_model_config(target, config, objective or contents.find_objective(source))


def to_huggingface(source: epath.Path, target: epath.Path, dtype: str, objective: str | None) -> None:
    """Reads a model, spread over all devices here, and writes a Hugging Face directory.

    If the system has such a decoder, it includes custom_generate/, with which transformers decodes as the system does.
    """
    mesh = mesh_over_all(contents.read_model_config(source).hidden_size)
    objective = objective or contents.find_objective(source)
    if objective in systems() and (code := systems()[objective].custom_generate):
        for file in (code / "generate.py", SHARED_CODE):
            write_file(target / "custom_generate" / file.name, read_file(file))
    huggingface.save(load_model(source, dtype, mesh), target, objective)


@contextlib.contextmanager
def created(target: epath.Path) -> Iterator[epath.Path]:
    """A directory that becomes the target once everything is written to it; after an error nothing is left.

    What a killed call has left there is deleted first. In an object store it is the target: there the file written
    last, config.json or model.json, marks a whole one.
    """
    partial = target
    with contextlib.ExitStack() as stack:
        if not is_remote(target):
            partial = next(path for path in target.parents if path.exists()) / f".{target.name}.partial"
            partial.mkdir(exist_ok=True)
            opened = os.open(partial, os.O_RDONLY)
            stack.callback(os.close, opened)
            if not try_lock(opened, partial):
                raise UserError(f"--to={target}: another `convert` is writing {partial}")
            for left in partial.iterdir():
                left.rmtree() if left.is_dir() else left.unlink()
        try:
            yield partial
            if partial != target:
                target.parent.mkdir(parents=True, exist_ok=True)
                partial.rename(target)
        except BaseException:
            remove(partial)
            raise


def main() -> None:
    if None in (_FROM.value, _TO.value, _FORMAT.value):
        raise UserError("--from=DIR, --to=DIR and --format=orbax|huggingface|peft are needed; --help explains")
    written = ("orbax", "huggingface")
    for flag, formats in ((_MASK, ("orbax",)), (_DTYPE, written), (_OBJECTIVE, written)):
        if flag.value is not None and _FORMAT.value not in formats:
            raise UserError(f"--{flag.name}={flag.value}: has no effect with --format={_FORMAT.value}")
    if _OBJECTIVE.value not in {None, *systems()}:
        raise UserError(f"--objective={_OBJECTIVE.value}: must be one of {', '.join(systems())}")
    source, target = epath.Path(_FROM.value), epath.Path(_TO.value)
    flag_values.check_output("to", target, directory=True)
    if _FORMAT.value == "orbax" and is_remote(target) and not _TO.value.startswith("gs://"):
        raise UserError(f"--to={target}: Orbax writes only to a disk or gs://; name a place there")
    if target.exists():
        raise UserError(f"--to={target} exists; name a new directory")
    if not source.is_dir():
        raise UserError(f"--from={source} is not a directory")
    if _FORMAT.value == "orbax" and not huggingface_config.is_huggingface(source):
        raise UserError(f"--from={source} holds no model of Hugging Face; --format=huggingface merges adapters")
    place = contents.locate(source)
    source, own = place.path, place.tokenizer
    carried = {name: read_file(own / name) for name in _TOKENIZER_FILES if (own / name).exists()}
    dtype = _DTYPE.value or contents.read_dtype(source)
    with created(target) as partial:
        for name, content in carried.items():
            write_file(partial / name, content)
        if place.run:
            card = model_card(place.run, int(source.name), target.name, _FORMAT.value)
            write_file(partial / "README.md", card)
        if _FORMAT.value == "orbax":
            to_orbax(source, partial, dtype, _OBJECTIVE.value, _MASK.value)
        elif _FORMAT.value == "peft":
            lora, trained, base = read_trained(source)
            if not huggingface_config.is_huggingface(base) or huggingface_config.read_config(base, releases()).names:
                why = "not a directory in the form of transformers, which `peft` needs: use huggingface"
                raise UserError(f"--format=peft: what the run adapts, {base}, is {why}")
            # PEFT takes other names for names on the Hub.
            peft.write(partial, lora, trained, absolute(base), contents.find_objective(source))
        else:
            to_huggingface(source, partial, dtype, _OBJECTIVE.value)
    print(f"{target}: written")


if __name__ == "__main__":
    command.run(main)

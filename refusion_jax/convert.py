"""Turns a Hugging Face directory of the Qwen3 family into a checkpoint of ours, or a model of ours into a directory.

  python -m refusion_jax.convert --format=orbax --from=Qwen3-0.6B --to=models/qwen3-0.6b
  python -m refusion_jax.convert --format=huggingface --from=runs/mine --to=export --dtype=bfloat16

Tokenizer files are carried along. `generate` reads both kinds of directory as they are.
"""

import math
import shutil
from pathlib import Path

import jax
from absl import flags
from rich.progress import Progress

from refusion_jax.checkpoints.directory import find_step
from refusion_jax.checkpoints.load import find_objective, find_tokenizer, load_model
from refusion_jax.checkpoints.run_directory import write_model_config
from refusion_jax.checkpoints.weights import save_params
from refusion_jax.cli import command, flag_values
from refusion_jax.cli.errors import UserError
from refusion_jax.distributed import sharding
from refusion_jax.distributed.storage import LARGEST_FILE, check_file
from refusion_jax.model import huggingface
from refusion_jax.model.abstract import abstract_transformer

_FROM = flags.DEFINE_string("from", None, "Directory to read")
_TO = flags.DEFINE_string("to", None, "Directory to make")
_FORMAT = flags.DEFINE_enum("format", None, ["orbax", "huggingface"], "What to make: orbax (ours) or huggingface")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of the weights written")
_MASK = flags.DEFINE_integer(
    "mask_token_id", None, "Id of the mask token; by default config.json's, or the tokenizer's (format=orbax)"
)

_TOKENIZER_FILES = (
    *("tokenizer.model", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "generation_config.json"),
)


def to_orbax(source: Path, target: Path, dtype: str, mask_token_id: int | None) -> None:
    """Reads a Hugging Face directory, spread over all devices here, and writes model.json and checkpoints/0/.

    Raises:
      UserError: where the directory cannot be read, or nobody names a mask token.
    """
    config = huggingface.read_model_config(source, find_tokenizer(source, mask_token_id), mask_token_id)
    if config.mask_token_id < 0:
        raise UserError(f"{source}/config.json has no mask_token_id; name one with --mask_token_id")
    parts = math.gcd(jax.device_count(), config.hidden_size)
    mesh = sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1) | {"fsdp": parts}, jax.devices()[:parts])
    _, params = abstract_transformer(config, dtype, mesh)
    with Progress() as progress:
        task = progress.add_task("reading", total=huggingface.count_tensors(config))
        params = huggingface.load_params(source, params, lambda: progress.advance(task))
    save_params(target, params)
    write_model_config(target, config, find_objective(source))


def main() -> None:
    if None in (_FROM.value, _TO.value, _FORMAT.value):
        raise UserError("--from=DIR, --to=DIR and --format=orbax|huggingface are needed; --help explains")
    source, target = Path(_FROM.value), Path(_TO.value)
    flag_values.check_output("to", target, directory=True)
    if target.exists():
        raise UserError(f"--to={target} exists; name a new directory")
    if not source.is_dir():
        raise UserError(f"--from={source} is no directory")
    directory = source if huggingface.is_huggingface(source) else find_step(source)[0]
    carried = [directory / name for name in _TOKENIZER_FILES if (directory / name).exists()]
    for path in carried:
        check_file(path, LARGEST_FILE)
    partial = target.with_name(f".{target.name}.partial")  # so that what is there under its own name is whole
    if partial.is_symlink() or partial.exists() and not partial.is_dir():
        raise UserError(f"--to={target}: {partial} is in the way; delete it, or name another directory")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        if _FORMAT.value == "orbax":
            to_orbax(source, partial, _DTYPE.value, _MASK.value)
        else:
            model = load_model(source, _DTYPE.value)
            partial.mkdir(parents=True)
            huggingface.save(model, partial, find_objective(source))
        for path in carried:
            shutil.copy(path, partial / path.name)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"{target}: written")


if __name__ == "__main__":
    command.run(main)

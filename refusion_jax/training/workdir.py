"""The directory of a run: its config, its tokenizer, and the shape of its model.

DIR/config.json         the config the run was last started with
DIR/model.json          the shape of the model, and what its token ids mean; of a converted one, which system trained it
DIR/tokenizer.model     the sentencepiece model, or the files of a Hugging Face tokenizer (tokenizer.json ...)
DIR/checkpoints/STEP/   see checkpoints.py
DIR/metrics.jsonl, DIR/tensorboard/, DIR/events.jsonl (where the time went), DIR/compilation_cache/
"""

import dataclasses
import json

import jax
import ml_collections
from etils import epath

from refusion_jax.cli.errors import UserError, first_line
from refusion_jax.cli.flag_values import check_output
from refusion_jax.cli.paths import is_remote
from refusion_jax.config import RESUMABLE, default_config, differing_keys
from refusion_jax.data.interface import Tokenizer
from refusion_jax.data.manifest import is_prepared
from refusion_jax.distributed.json_input import read_object
from refusion_jax.distributed.storage import check_file, write_file
from refusion_jax.model.shape import to_model_config
from refusion_jax.model.transformer import ModelConfig

_FILES = ("config.json", "model.json", "metrics.jsonl", "events.jsonl", "left_out.json")
_FILES += ("tokenizer.model", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_DIRECTORIES = ("checkpoints", "tensorboard", "compilation_cache")


def check_same_run(workdir: epath.Path, config: ml_collections.ConfigDict) -> None:
    """Refuses a directory that holds another run, or what a run could not write to.

    Raises:
      UserError: naming the keys that differ, or what is in the way.
    """
    check_output("workdir", workdir, directory=True)
    if is_prepared(str(workdir)):
        raise UserError(f"--workdir={workdir}: holds prepared data; name another directory")
    if not is_remote(workdir):
        for path in (workdir / name for name in _FILES):
            if path.exists():
                check_file(path)
        for path in (workdir / name for name in _DIRECTORIES):
            if path.exists() and not path.is_dir():
                raise UserError(f"--workdir={workdir}: {path.name} in it is no directory")
    if not (workdir / "config.json").exists():
        return
    there, here = (json.loads(c.to_json()) for c in (read_config(workdir), config))
    other = [key for key in differing_keys(there, here) if key.split(".")[0] not in RESUMABLE]
    if other:
        raise UserError(
            f"--workdir={workdir} holds a run with another config (differs in {', '.join(other)}): "
            f"give the flags it was started with, or another --workdir"
        )


def claim(workdir: epath.Path, config: ml_collections.ConfigDict, model: ModelConfig, tokenizer: Tokenizer) -> None:
    """Writes tokenizer, model and then config of a run into its directory."""
    if jax.process_index() == 0:
        for name, content in tokenizer.files.items():
            write_file(workdir / name, content)
        write_model_config(workdir, model)
        write_file(workdir / "config.json", config.to_json(indent=2) + "\n")


def read_config(workdir: epath.Path) -> ml_collections.ConfigDict:
    """The config of a run, with defaults for keys that are newer than the run.

    Raises:
      UserError: where the file cannot be read.
    """
    path, config = workdir / "config.json", default_config()
    content = read_object(path)
    try:
        with config.unlocked():
            config.update(content)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:  # what ml_collections says
        raise UserError(f"{path} cannot be read: {first_line(error)}") from error
    return config


def write_model_config(workdir: epath.Path, model: ModelConfig, objective: str | None = None) -> None:
    """Writes the shape of a model; and the system that trained it, where no config of a run says so."""
    content = dataclasses.asdict(model) | ({"objective": objective} if objective else {})
    write_file(workdir / "model.json", json.dumps(content, indent=2) + "\n")


def read_model_config(workdir: epath.Path) -> ModelConfig:
    """The shape of a run's model.

    Raises:
      UserError: where the file cannot be read.
    """
    path = workdir / "model.json"
    content = read_object(path)
    content.pop("objective", None)
    return to_model_config(path, content)


def read_objective(workdir: epath.Path) -> str | None:
    """The system that trained the model of a run, or one that was converted, where that is known.

    Raises:
      UserError: where a file cannot be read.
    """
    if (workdir / "config.json").exists():
        return read_config(workdir).objective
    given = read_object(workdir / "model.json").get("objective")
    return given if isinstance(given, str) else None

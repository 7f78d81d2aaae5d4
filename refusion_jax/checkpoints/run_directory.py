"""The directory of a run: its tokenizer, the shape of its model, and the system that trained it.

DIR/config.json         the config the run was last started with
DIR/model.json          the shape of the model, and what its token ids mean; of a converted one, which system trained it
DIR/tokenizer.model     the sentencepiece model, or the files of a Hugging Face tokenizer (tokenizer.json ...)
DIR/checkpoints/STEP/   see manager.py
DIR/metrics.jsonl, DIR/tensorboard/, DIR/events.jsonl (where the time went), DIR/compilation_cache/
"""

import dataclasses
import json

from etils import epath

from refusion_jax.cli.errors import UserError
from refusion_jax.distributed.json_files import read_json
from refusion_jax.distributed.storage import write_file
from refusion_jax.model.lora import Lora, read_lora
from refusion_jax.model.shape import ModelConfig, to_model_config
from refusion_jax.systems.registry import default_system


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
    content = read_json(path)
    content.pop("objective", None)
    return to_model_config(path, content)


def read_adapters(workdir: epath.Path) -> tuple[Lora, epath.Path] | None:
    """The adapters of a run that trained nothing else, and where the weights are that they adapt.

    Raises:
      UserError: where the file cannot be read.
    """
    path = workdir / "config.json"
    config = read_json(path) if path.exists() else {}
    try:
        lora = read_lora(config.get("lora", {"rank": 0}))
        return (lora, epath.Path(config["init_from"])) if lora else None
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read: lora or init_from is wrong") from error


def read_objective(workdir: epath.Path) -> str | None:
    """The system that trained the model of a run, or one that was converted, where that is known.

    Raises:
      UserError: where a file cannot be read.
    """
    if (path := workdir / "config.json").exists():
        return read_json(path).get("objective", default_system().name)
    given = read_json(workdir / "model.json").get("objective")
    return given if isinstance(given, str) else None

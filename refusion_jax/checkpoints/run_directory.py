"""The directory of a run: its tokenizer, the shape of its model, and the system that trained it.

DIR/config.json         the config the run was last started with
DIR/model.json          the shape of the model, and what its token ids mean; if converted, which system trained it
DIR/tokenizer.model     the sentencepiece model, or the files of a Hugging Face tokenizer (tokenizer.json ...)
DIR/checkpoints/STEP/   see manager.py
DIR/metrics.jsonl, DIR/tensorboard/, DIR/events.jsonl (where the time went), DIR/compilation_cache/
"""

import dataclasses
import json
import re

import pydantic
from etils import epath

from refusion_jax.distributed.json_files import read_json
from refusion_jax.distributed.storage import write_file
from refusion_jax.model.lora import Lora
from refusion_jax.model.shape import ModelConfig, to_model_config
from refusion_jax.systems.registry import default_system


class _Adapters(pydantic.BaseModel):
    """The section `lora` of a run's config."""

    rank: pydantic.NonNegativeInt
    alpha: pydantic.FiniteFloat
    targets: re.Pattern[str]
    full: re.Pattern[str]


class _Config(pydantic.BaseModel):
    """The keys of a run's config that loading its model needs."""

    objective: str | None = None
    lora: _Adapters | None = None
    init_from: str = ""


def write_model_config(workdir: epath.Path, model: ModelConfig, objective: str | None = None) -> None:
    """Writes the shape of a model and, if no config of a run says it, the system that trained it."""
    content = dataclasses.asdict(model) | ({"objective": objective} if objective else {})
    write_file(workdir / "model.json", json.dumps(content, indent=2) + "\n")


def read_model_config(workdir: epath.Path) -> ModelConfig:
    """The shape of a run's model; UserError if the file cannot be read."""
    path = workdir / "model.json"
    content = read_json(path)
    content.pop("objective", None)
    return to_model_config(path, content)


def read_adapters(workdir: epath.Path) -> tuple[Lora, epath.Path] | None:
    """(adapters, path of the weights that they adapt) of a run that trained adapters; None for other runs."""
    path = workdir / "config.json"
    config = read_json(path, _Config, extra="ignore") if path.exists() else _Config()
    if not (config.lora and config.lora.rank):
        return None
    lora = config.lora
    return Lora(lora.rank, lora.alpha, lora.targets.pattern, lora.full.pattern), epath.Path(config.init_from)


def read_objective(workdir: epath.Path) -> str | None:
    """The system that trained the model of a run, or a converted model, if known."""
    if (path := workdir / "config.json").exists():
        return read_json(path, _Config, extra="ignore").objective or default_system().name
    return read_json(workdir / "model.json", _Config, extra="ignore").objective

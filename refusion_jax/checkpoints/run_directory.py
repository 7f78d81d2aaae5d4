"""The directory of a run: its files, the steps that its checkpoints hold, whether each is whole, and how to remove one.

DIR/config.json         the config the run was last started with, and the versions of JAX and its compilers
DIR/model.json          the shape of the model, and what its token ids mean; if converted, which system trained it
DIR/tokenizer.model     the sentencepiece model, or the files of a Hugging Face tokenizer (tokenizer.json ...)
DIR/checkpoints/STEP/   see manager.py
DIR/metrics.jsonl, DIR/tensorboard/, DIR/events.jsonl (where the time went), DIR/compilation_cache/

A checkpoint counts as finished once Orbax has given its directory the name of its step. A finished one may be damaged:
files may have been lost or changed since, which `check_whole` detects by the checksums.
"""

import dataclasses
import errno
import json

import orbax.checkpoint as ocp
import pydantic
from etils import epath

from refusion_jax.checkpoints import checksums
from refusion_jax.cli.errors import Failure, UserError, first_line
from refusion_jax.cli.paths import is_remote
from refusion_jax.distributed.json_files import read_json
from refusion_jax.distributed.storage import ABSENT, absolute, reading, write_file
from refusion_jax.model.lora import Lora
from refusion_jax.model.shape import ModelConfig, to_model_config
from refusion_jax.systems.registry import default_system

ITEMS = ("params", "optimizer", "data")
TEMPORARY = ".orbax-checkpoint-tmp"  # part of the name of whatever Orbax is still writing
_REMOVED = ".removed-"  # prefix of a checkpoint that is being removed
_COMMITTED = "commit_success.txt"  # in an object store, Orbax writes this file last


class _Config(pydantic.BaseModel):
    """The keys of a run's config that loading its model needs."""

    objective: str | None = None
    lora: Lora | None = None
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
    return (config.lora, epath.Path(config.init_from)) if config.lora and config.lora.rank else None


def read_objective(workdir: epath.Path) -> str | None:
    """The system that trained the model of a run, or a converted model, if known."""
    if (path := workdir / "config.json").exists():
        return read_json(path, _Config, extra="ignore").objective or default_system().name
    return read_json(workdir / "model.json", _Config, extra="ignore").objective


def saved_steps(workdir: epath.Path, items: tuple[str, ...] = ITEMS) -> list[int]:
    """Steps of a run's finished checkpoints that have these items, ascending. Their content is not read.

    Failure if they cannot be listed now.
    """
    directory = workdir / "checkpoints"
    return [step for step in finished_steps(directory) if not _missing(directory / str(step), items)]


def finished_steps(directory: epath.Path) -> list[int]:
    """Steps of all finished, non-empty checkpoints in this directory, ascending, whether whole or not.

    UserError if permissions forbid reading it, or its name is too long; Failure if it cannot be read now: if it were
    taken for empty, the run would start again at step 0.
    """
    try:
        names = [path.name for path in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except Exception as error:  # stores raise errors of many kinds, none of which means that nothing is there
        is_users = isinstance(error, PermissionError) or getattr(error, "errno", None) == errno.ENAMETOOLONG
        raise (UserError if is_users else Failure)(f"{directory} cannot be read: {first_line(error)}") from error
    steps = sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)
    return [step for step in steps if _is_finished(directory / str(step))]


def find_step(path: epath.Path) -> tuple[epath.Path, epath.Path]:
    """(run directory, directory of a step): the step named by the path, or the newest of a run or checkpoints/."""
    path = absolute(path)
    if path.parent.name == "checkpoints" and path.name.isascii() and path.name.isdecimal():
        workdir, steps = path.parent.parent, [int(path.name)]
    else:
        workdir = path.parent if path.name == "checkpoints" else path
        steps = saved_steps(workdir, ("params",))
    if not steps or not (step := workdir / "checkpoints" / str(steps[-1])).is_dir():
        raise UserError(f"{path} holds no checkpoint; give the --workdir of a training run, or one of its steps")
    return workdir, step


def is_complete(workdir: epath.Path, steps: int) -> bool:
    """Whether the last step of a run exists, whole and with matching checksums."""
    there = saved_steps(workdir)
    if not there or there[-1] < steps:
        return False
    directory = workdir / "checkpoints" / str(there[-1])
    try:
        check_whole(directory)
    except Exception:  # noqa: BLE001  restoring it will report the reason
        return False
    return bool(checksums.listed(directory))


def check_whole(directory: epath.Path, items: tuple[str, ...] = ITEMS) -> None:
    """ValueError, naming the file, if one of these items is missing or has changed; hosts share the reading.

    Failure if a file cannot be read now.
    """
    parts = [""] if items == ITEMS else [f"{item}/" for item in items]
    for damage in (checksums.find_damage(directory, part) for part in parts):
        if damage:
            raise ValueError(damage)
    if missing := _missing(directory, items):
        raise ValueError(f"{directory} has no {' and no '.join(missing)}")


def remove_step(directory: epath.Path) -> None:
    """Removes a checkpoint so that, even if interrupted, no half-removed one keeps the name of its step."""
    if not directory.exists():
        return
    if is_remote(directory):
        (directory / _COMMITTED).unlink(missing_ok=True)
    else:
        directory = directory.rename(directory.with_name(f"{_REMOVED}{directory.name}"))
    directory.rmtree()


def remove_unfinished(directory: epath.Path) -> None:
    """Removes what interrupted saves and removals have left in `DIR/checkpoints`."""
    for path in directory.iterdir() if directory.is_dir() else ():
        is_left = TEMPORARY in path.name or path.name.startswith(_REMOVED)
        # In an object store a checkpoint is written under its final name.
        may_be_unfinished = path.name.isdecimal() and is_remote(path)
        if path.is_dir() and (is_left or (may_be_unfinished and not ocp.utils.is_checkpoint_finalized(path))):
            path.rmtree()


def _is_finished(directory: epath.Path) -> bool:
    """Whether Orbax has finished it, which its name says on a file system, and a file in a store. False if empty."""
    try:
        return any(directory.iterdir()) and ocp.utils.is_checkpoint_finalized(directory)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except Exception:  # noqa: BLE001  stores raise errors of many kinds
        return True  # unreadable now, which is told when it is read


def _missing(directory: epath.Path, items: tuple[str, ...]) -> list[str]:
    return [item for item in items if not _holds_files(directory / item)]


def _holds_files(directory: epath.Path) -> bool:
    try:
        with reading(directory):
            return any(directory.iterdir())
    except ABSENT:
        return False

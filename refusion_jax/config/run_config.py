"""The config in a run's directory: written when the run starts, compared when it is started again."""

import json
from collections.abc import Collection, Sequence

import jax
import ml_collections
from etils import epath

from refusion_jax.checkpoints.run_directory import write_model_config
from refusion_jax.cli.errors import UserError, refusing
from refusion_jax.config import default_config, flatten, lacking
from refusion_jax.config.keys import keys
from refusion_jax.data.interface import Tokenizer
from refusion_jax.data.manifest import is_prepared
from refusion_jax.distributed import xla_options
from refusion_jax.distributed.json_files import read_json
from refusion_jax.distributed.storage import absolute, write_file
from refusion_jax.model.shape import ModelConfig
from refusion_jax.systems.registry import find_system, systems

# May differ when a run is resumed: how it runs, and for how long (`steps` also stretches the rest of the schedule).
RESUMABLE = (
    *("accumulation", "remat", "log_every", "tracker", "profile_steps", "mesh", "checkpoint", "steps", "epochs"),
    *("guard", "debug_nans", "compilation_cache", "eval"),
)
# May differ as well if --allow_change names them: they change what the rest of the run learns.
CHANGEABLE = (
    *("learning_rate", "schedule", "warmup_steps", "decay_steps", "final_lr_ratio", "weight_decay", "clip_norm"),
    "data",
)


def check_same_run(
    workdir: epath.Path,
    config: ml_collections.ConfigDict,
    allowed: Sequence[str] = (),
    resumable: Collection[str] = RESUMABLE,
) -> list[str]:
    """Refuses a directory that holds another run, or prepared data.

    The values of `resumable` and `allowed` keys, or sections, may differ from those that the run was started with.
    Returns the changes of the latter, each as "KEY: OLD -> NEW".
    """
    if is_prepared(str(workdir)):
        raise UserError(f"--workdir={workdir}: holds prepared data; name another directory")
    if not (workdir / "config.json").exists():
        return []
    there, here = (flatten(json.loads(_as_written(c))) for c in (read_config(workdir), config))
    own = find_system(config.objective)
    for key in sorted(there.keys() - here.keys()):
        section, _, name = key.rpartition(".")
        if section == own.section and (name not in own.former or own.former[name] != there[key]):
            raise UserError(
                f"--workdir={workdir} holds a run of another version, with {key}={there[key]}, which this one does "
                f"not have: continue with that version"
            )
    different = [key for key in sorted(here) if there[key] != here[key] and key.split(".")[0] not in resumable]
    different = [key for key in different if not lacking(config, key)]  # what has no effect may be left out
    changed = [key for key in different if key in allowed or key.split(".")[0] in allowed]
    if other := [key for key in different if key not in changed]:
        is_allowable = resumable is RESUMABLE and all(key.split(".")[0] in CHANGEABLE for key in other)
        more = f", or --allow_change={','.join(other)}" if is_allowable else ""
        raise UserError(
            f"--workdir={workdir} holds a run with another config (differs in {', '.join(other)}): "
            f"give the flags it was started with, or another --workdir{more}"
        )
    return [f"{key}: {there[key]} -> {here[key]}" for key in changed]


def claim(workdir: epath.Path, config: ml_collections.ConfigDict, model: ModelConfig, tokenizer: Tokenizer) -> None:
    """Writes tokenizer, model and then config, with the versions of this start, of a run into its directory."""
    if jax.process_index() == 0:
        for name, content in tokenizer.files.items():
            write_file(workdir / name, content)
        write_model_config(workdir, model)
        content = json.loads(_as_written(config)) | {"versions": xla_options.versions()}
        write_file(workdir / "config.json", json.dumps(content, indent=2) + "\n")


def _as_written(config: ml_collections.ConfigDict) -> str:
    """The config as JSON, with absolute paths of other models, so that a run is the same from any directory."""
    config = config.copy_and_resolve_references()
    reading = [(config[own.section], "reads") for own in systems().values() if "reads" in own.keys]
    for section, key in [(config, "init_from"), *reading]:
        section[key] = section[key] and str(absolute(section[key]))
    return config.to_json(indent=2)


def read_config(workdir: epath.Path) -> ml_collections.ConfigDict:
    """The config of a run, with defaults for keys that are newer than the run."""
    path, config = workdir / "config.json", default_config()
    content = read_json(path)
    content.pop("versions", None)
    with refusing(f"{path} cannot be read"), config.unlocked():
        config.update(content)
    read = flatten(config.to_dict())
    if null := next((key for key in keys() if read.get(key) is None), None):
        raise UserError(f"{path} cannot be read: {null} is null")  # ml_collections accepts it
    return config

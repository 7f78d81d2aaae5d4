"""The configuration of a run, and the checks made when it is parsed.

A file in configs/ starts from `default_config()` and changes what it needs; flags change the rest
(`--config.learning_rate=1e-3`). `check` refuses impossible values before anything is built or written. The keys are
declared in `keys.py`.
"""

import functools
import operator
import re
from typing import Any, NoReturn

import jax
import ml_collections
from absl import flags
from flax.traverse_util import flatten_dict

from refusion_jax.cli import command
from refusion_jax.cli.errors import SettingError, UserError, first_line, naming
from refusion_jax.cli.flag_values import check_reachable
from refusion_jax.cli.paths import is_remote
from refusion_jax.config.keys import keys, keys_of
from refusion_jax.data.manifest import is_prepared
from refusion_jax.data.sources import GENERATED
from refusion_jax.distributed import sharding
from refusion_jax.model.lora import INPUTS, read_lora
from refusion_jax.model.shape import family_fault, shape_fault
from refusion_jax.systems.api import own_settings, read_settings
from refusion_jax.systems.interface import Objective
from refusion_jax.systems.registry import decoders_for, find_decoder, find_system, systems


def default_config() -> ml_collections.ConfigDict:
    """All keys, those of every system included, with their defaults."""
    config = ml_collections.ConfigDict()
    for name, key in keys().items():
        section, _, own = name.rpartition(".")
        if section and section not in config:
            config[section] = ml_collections.ConfigDict()
        (config[section] if section else config)[own] = key.default
    return config


def help_texts(config: ml_collections.ConfigDict | None) -> dict[str, str]:
    """Help text by flag, for the keys of a config's system, by default of the default system."""
    chosen = (config or default_config()).objective
    return {f"config.{name}": command.help_text(key) for name, key in keys_of(chosen).items()}


def make_objective(config: ml_collections.ConfigDict, mask_id: int, eos_id: int = -1) -> Objective:
    """The objective that a config names, with its own keys."""
    system = find_system(config.objective)
    values = {name: config[system.section][name] for name in system.keys}
    own = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    try:
        return system.objective(mask_id=mask_id, eos_id=eos_id, **own)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  a system's own check may raise anything
        raise UserError(f"--config.{system.section}: {type(error).__name__}: {first_line(error)}") from error


flatten = functools.partial(flatten_dict, sep=".")  # {dotted key: value} of a nested dict

# Keys that have an effect only with another one: the condition in words, and whether a config fulfils it.
_NEEDS = (
    ("decay_steps", "schedule=wsd", lambda c: c.schedule == "wsd"),
    ("final_lr_ratio", "schedule=cosine or wsd", lambda c: c.schedule != "constant"),
    ("beta1 beta2 moment_dtype", "optimizer=adamw or muon", lambda c: c.optimizer != "adafactor"),
    ("lora.alpha lora.targets lora.full", "lora.rank", lambda c: c.lora.rank),
    ("data.difficulty", "data.path=families", lambda c: "families" in c.data.path + c.eval.path),
    (
        "data.turns data.query_field data.response_field data.text_field",
        "data.path=FILES (`prepare` has a flag of this name)",
        lambda c: _is_files(c.data.path) or _is_files(c.eval.path),
    ),
    (
        "eval.tasks_every eval.limit eval.include_path eval.task_data eval.decode eval.allow_code_execution",
        "eval.tasks",
        lambda c: c.eval.tasks,
    ),
)


def _is_files(path: str) -> bool:
    """Whether a data.path or eval.path names files, neither built-in nor prepared data."""
    is_built_in = path.partition(":")[0] in ("", *GENERATED, "stdlib")
    return not is_built_in and not is_prepared(path.partition(",")[0].strip())


def lacking(c: ml_collections.ConfigDict, name: str) -> str:
    """What a key has no effect without, if a config lacks it; "" if the key has an effect."""
    return next((other for names, other, has_effect in _NEEDS if name in names.split() and not has_effect(c)), "")


def check(c: ml_collections.ConfigDict) -> None:
    """Refuses impossible values."""
    refuse = functools.partial(_refuse, c)
    _check_keys(c)
    for name, key in keys_of(c.objective).items():
        key.check("config", name, _get(c, name))
    make_objective(c, mask_id=0)
    others = [other for name, other in systems().items() if name != c.objective]
    needed = {f"{system.section}.{key}": f"objective={system.name}" for system in others for key in system.keys}
    for name, key in keys().items():  # a config file may set keys that flags then make useless
        is_given = f"config.{name}" in flags.FLAGS and _get(c, name) != key.default
        if is_given and (other := needed.get(name) or lacking(c, name)):
            refuse(name, f"has no effect without --config.{other}")
    if c.batch_size % c.accumulation:
        refuse("batch_size", f"must be a multiple of accumulation={c.accumulation}")
    if c.eval.tasks or c.eval.decode:
        read_decode(c)

    is_span = len(c.profile_steps) == 2 and all(type(step) is int for step in c.profile_steps)
    if c.profile_steps and not (is_span and 1 <= c.profile_steps[0] <= c.profile_steps[1]):
        refuse("profile_steps", "must be a first and a last step, counted from 1, such as (10,12)")
    if not c.epochs:  # otherwise the number of rows determines the steps
        check_steps(c)

    m = c.model
    if fault := shape_fault(m) or (not c.init_from and family_fault(m)):
        raise UserError(f"--config.model.{fault}")
    if m.head_dim % 2:
        refuse("model.head_dim", "must be even (RoPE rotates pairs)")

    if c.lora.rank and not c.init_from:
        refuse("lora.rank", "adapters need weights to adapt: name them with --config.init_from")
    for key in ("lora.targets", "lora.full"):
        try:
            re.compile(_get(c, key))
        except re.error as error:
            refuse(key, f"is not a regular expression: {error}")
    if c.lora.rank and not read_lora(c.lora).names:
        refuse("lora.targets", f"names none of {', '.join(INPUTS)}")

    if len(rest := [axis for axis, size in c.mesh.items() if size == -1]) > 1:
        refuse(f"mesh.{rest[-1]}", f"at most one axis can be -1, and mesh.{rest[0]} is")
    for axis, size in c.mesh.items():
        if size < 1 and size != -1:
            refuse(f"mesh.{axis}", "must be at least 1, or -1 to take all devices that are left")


def check_steps(c: ml_collections.ConfigDict) -> None:
    """Refuses a schedule, or profiled steps, that do not fit into the steps of a run."""
    refuse = functools.partial(_refuse, c)
    if c.warmup_steps > c.steps:
        refuse("warmup_steps", f"must not exceed steps={c.steps}")
    if c.schedule == "wsd" and c.warmup_steps >= c.steps:
        refuse("warmup_steps", f"must be below steps={c.steps} for schedule=wsd")
    if c.schedule == "wsd" and not 0 < c.decay_steps <= c.steps - c.warmup_steps:
        refuse("decay_steps", f"must be 1 to {c.steps - c.warmup_steps} for schedule=wsd (steps without warm-up)")
    if c.profile_steps and c.profile_steps[0] > c.steps:
        refuse("profile_steps", f"must begin within steps={c.steps}")


def read_decode(c: ml_collections.ConfigDict) -> tuple[str, dict[str, Any]]:
    """(decoder, its settings) for the tasks that are scored during training, from eval.decode."""
    flag = f"--config.eval.decode={c.eval.decode!r}"
    settings = read_settings(c.eval.decode.split(), flag)
    fitting = [name for name in decoders_for(c.objective) if not find_decoder(name).settings.auxiliary_models]
    method = settings.pop("method", next(iter(fitting), ""))
    if method not in fitting:
        raise UserError(f"{flag}: models of objective={c.objective} are decoded by {' or '.join(fitting) or 'nothing'}")
    with naming(flag):
        own_settings(method, settings)
    return method, settings


def _check_keys(c: ml_collections.ConfigDict) -> None:
    """Refuses a config file that adds or removes keys (ml_collections itself refuses other types)."""
    known, given = keys().keys(), flatten(c.to_dict()).keys()
    for found, what in ((given - known, "is not a config key"), (known - given, "is missing")):
        if found:
            raise UserError(
                f"--config: {min(found)} {what}; config files start from refusion_jax.config.default_config()"
            )


def check_stores(c: ml_collections.ConfigDict) -> None:
    """Refuses paths in stores that cannot be reached."""
    for name, value in flatten(c.to_dict()).items():
        for path in value.split(",") if isinstance(value, str) else ():
            if is_remote(path):
                check_reachable(f"config.{name}", path.strip())


def check_mesh(c: ml_collections.ConfigDict, mesh: jax.sharding.Mesh) -> None:
    """Refuses sizes that the mesh cannot split evenly."""
    for key, axis, each in (
        ("batch_size", "batch", c.accumulation),
        ("row_length", "length", 1),
        ("model.vocab_size", "vocab", 1),
        ("model.hidden_size", "embed", 1),
        ("model.num_attention_heads", "heads", 1),
        ("model.num_key_value_heads", "kv_heads", 1),
        ("model.intermediate_size", "mlp", 1),
        ("model.moe_intermediate_size", "mlp", 1),
        ("model.num_experts", "experts", 1),
    ):
        size, parts = _get(c, key), sharding.shard_count(mesh, axis) * each
        if size % parts:
            names = " x ".join(f"mesh.{name}" for name in sharding.RULES[axis])
            names += " x accumulation" if each > 1 else ""
            fewer, larger = max(n for n in range(1, parts) if size % n == 0), -(-size // parts) * parts
            why = f"does not divide into {parts} parts ({names}); the next size that does is {larger}"
            _refuse(c, key, f"{why}, and the nearest mesh has {fewer} parts there")
    length, parts = make_objective(c, mask_id=0).input_length(c.row_length), sharding.shard_count(mesh, "length")
    if length % parts:
        why = f"objective={c.objective} makes inputs of {length} tokens of it, not divisible by mesh.sequence={parts}"
        _refuse(c, "row_length", why)


def _get(c: ml_collections.ConfigDict, key: str) -> Any:
    return operator.attrgetter(key)(c)


def _refuse(c: ml_collections.ConfigDict, key: str, why: str) -> NoReturn:
    raise SettingError("config", key, _get(c, key), why)

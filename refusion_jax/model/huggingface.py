"""Hugging Face directories of the families in families.py: their weights into ours, and ours into theirs."""

import functools
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from safetensors.numpy import save_file

from refusion_jax.cli.errors import UserError
from refusion_jax.cli.progress import track
from refusion_jax.distributed.storage import replacing, write_file
from refusion_jax.model.huggingface_config import NONE, Releases, describe, read_config
from refusion_jax.model.shape import ModelConfig
from refusion_jax.model.tensor_files import INDEX, Tensors
from refusion_jax.model.tensor_layout import Part, layout, tensor_names
from refusion_jax.model.transformer import Transformer

SHARD_BYTES = 4 << 30  # of the shards we write


def load_params(
    path: epath.Path,
    target: dict[str, Any],
    releases: Releases = NONE,
    listed: Callable[[list], Iterable] = iter,
) -> dict[str, Any]:
    """Reads all weights, tensor by tensor, straight into (sharded) arrays: the host holds one tensor besides them.

    The target has shapes, dtypes and shardings of our weights; rows that their embedding lacks become zeros. `listed`
    is handed the list of all parts of weights, and gives one after the other. UserError as of `Tensors`, where a tensor
    would be left over, and where a weight is infinite or not a number, in the file or in the target's dtype.
    """
    tensors, weights = _open(path, target, releases)

    def read(part: Part, goal: jax.ShapeDtypeStruct) -> jax.Array:
        axes = len(part.index)
        place = jax.NamedSharding(goal.sharding.mesh, jax.sharding.PartitionSpec(*goal.sharding.spec[axes:]))
        own = jax.ShapeDtypeStruct(goal.shape[axes:], goal.dtype, sharding=place)
        placed = _place(part.ours(tensors.read(part.tensor, part.whole)), own)
        if not is_finite(placed):
            where = tensors.place_of(part.tensor)
            raise UserError(f"{where}: {part.tensor} holds values that are not finite as {goal.dtype}")
        return placed

    params: dict[str, Any] = {}
    for (*stack, name), part in listed([(weight, part) for weight, parts in weights.items() for part in parts]):
        goals, own = (target[stack[0]], params.setdefault(stack[0], {})) if stack else (target, params)
        if not stack:
            own[name] = read(part, goals[name])
            continue
        if name not in own:
            zeros = functools.partial(jnp.zeros, goals[name].shape, goals[name].dtype)
            own[name] = jax.jit(zeros, out_shardings=goals[name].sharding)()
        own[name] = _put(own[name], read(part, goals[name]), part.index)
    return params


def open_params(
    path: epath.Path, target: dict[str, Any], releases: Releases = NONE
) -> Callable[[tuple[str, ...], slice], np.ndarray]:
    """Reads a part of one weight at a time: (its path in the tree, entries of its first axis) -> these entries.

    The target is anything that has the shapes of our weights; the rest is as for `load_params`, on reading, too.
    """
    tensors, weights = _open(path, target, releases)

    def read(name: tuple[str, ...], part: slice) -> np.ndarray:
        *stack, last = name
        shape = (target[stack[0]] if stack else target)[last].shape
        wanted = range(*part.indices(shape[0]))
        found = []
        for each in weights[name]:
            if not stack or each.index[0] in wanted:
                found.append(each.ours(tensors.read(each.tensor, each.whole)))
                if not np.isfinite(found[-1]).all():
                    raise UserError(f"{tensors.place_of(each.tensor)}: {each.tensor} holds values that are not finite")
        if stack:
            return np.stack(found).reshape(len(wanted), *shape[1:])
        missing = shape[0] - len(found[0])
        return np.pad(found[0], [(0, missing)] + [(0, 0)] * (len(shape) - 1))[part] if missing else found[0][part]

    return read


def _open(path: epath.Path, target: dict[str, Any], releases: Releases) -> tuple[Tensors, dict[tuple, list[Part]]]:
    """The tensors of a directory, and the parts of each weight; none may be left over, or it would be another model."""
    tensors, config = Tensors(path), read_config(path, releases)
    weights = dict(layout(target, config.model_type, config.names, config.vocab_size))
    names = tensor_names(config.model_type, config.names)
    for name in sorted(tensors.names - {part.tensor for parts in weights.values() for part in parts}):
        if name == names["lm_head"]:  # of tied weights, which some save twice
            shape = (config.vocab_size, config.hidden_size)
            if np.array_equal(tensors.read(name, shape), tensors.read(names["embed_tokens"], shape)):
                continue
        if not name.endswith(".rotary_emb.inv_freq"):  # which follows from rope_theta
            raise UserError(f"{tensors.place_of(name)}: {name} has no place in the model that config.json describes")
    return tensors, weights


def _place(tensor: np.ndarray, target: jax.ShapeDtypeStruct) -> jax.Array:
    """The tensor on the devices, in the target's dtype; rows that are missing at the end become zeros."""
    if tensor.shape != target.shape:
        tensor = np.pad(tensor, ((0, target.shape[0] - tensor.shape[0]), (0, 0)))
    placed = jax.device_put(tensor, target.sharding).astype(target.dtype)
    return placed.block_until_ready()  # or the next tensor would be read while this one is still held


@jax.jit
def is_finite(tensor: jax.Array) -> jax.Array:
    """Whether all values are. On a CPU a maximum misses NaNs, and all(isfinite) holds a fourth of the tensor more."""
    return jnp.isfinite(jnp.sum(tensor * 0))


@functools.partial(jax.jit, donate_argnums=0)
def _put(stacked: jax.Array, layer: jax.Array, index: tuple[int, ...]) -> jax.Array:
    layer = layer.reshape((1,) * len(index) + layer.shape)
    return jax.lax.dynamic_update_slice(stacked, layer, (*index, *(0,) * (layer.ndim - len(index))))


def read_dtype(path: epath.Path) -> str:
    """The dtype in which no weight of a directory is rounded: "bfloat16", or "float32" for any other."""
    return "bfloat16" if Tensors(path).dtype == jnp.bfloat16 else "float32"


def save(model: Transformer, path: epath.PathLike, objective: str | None = None) -> None:
    """Writes a directory that `transformers` loads: safetensors shards, their index, and last config.json.

    The model has the dtype that shall be written; `path` is empty or made; `objective` is the system that trained it.
    """
    path = epath.Path(path)
    tensors = _their_tensors(nnx.to_pure_dict(nnx.state(model)), model.config)
    shards: list[list[str]] = [[]]
    left = SHARD_BYTES
    for name, (size, _) in tensors.items():
        if shards[-1] and size > left:
            shards.append([])
            left = SHARD_BYTES
        shards[-1].append(name)
        left -= size
    weight_map = {}
    for number, names in enumerate(track(shards, "writing"), 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        with replacing(path / file) as temporary:
            temporary.touch()
            mode = temporary.stat().st_mode  # by the umask; safetensors would make it the user's alone
            save_file({name: tensors[name][1]() for name in names}, temporary, metadata={"format": "pt"})
            temporary.chmod(mode)
        weight_map |= dict.fromkeys(names, file)
    total = sum(size for size, _ in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_file(path / INDEX, json.dumps(index, indent=2) + "\n")
    described = describe(model.config, str(jax.tree.leaves(nnx.state(model))[0].dtype), objective)
    write_file(path / "config.json", json.dumps(described, indent=2) + "\n")


def _their_tensors(params: dict[str, Any], config: ModelConfig) -> dict[str, tuple[int, Callable[[], np.ndarray]]]:
    """Every tensor by its Hugging Face name: (bytes, what brings it to the host)."""
    found: dict[str, list[tuple[Part, jax.Array]]] = {}
    for (*stack, name), parts in layout(params, config.family, {}, config.vocab_size):
        weight = (params[stack[0]] if stack else params)[name]
        for part in parts:
            found.setdefault(part.tensor, []).append((part, weight))
    return {
        name: (math.prod(parts[0][0].whole) * parts[0][1].dtype.itemsize, functools.partial(_on_host, parts))
        for name, parts in found.items()
    }


def _on_host(parts: list[tuple[Part, jax.Array]]) -> np.ndarray:
    """The tensor that some parts of our weights are together."""
    parts = sorted(parts, key=lambda item: item[0].rows.start)
    rows = [part.theirs(jax.device_get(weight[part.index])) for part, weight in parts]
    return np.concatenate(rows) if len(rows) > 1 else rows[0]

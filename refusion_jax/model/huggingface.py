"""Hugging Face directories of the families in families.py: converts their weights to ours, and ours to theirs.

Their weights are [out, in], one tensor per layer; ours are [in, out] with separate head axes, all layers stacked.
A tensor may hold several of our weights, one after the other along `out`. `layout` has what corresponds to what.
"""

import collections
import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError
from safetensors.numpy import save_file

from refusion_jax.cli.errors import Failure, UserError, first_line
from refusion_jax.cli.progress import track
from refusion_jax.distributed.storage import replacing, write_file
from refusion_jax.model.families import FAMILIES, NAMES
from refusion_jax.model.huggingface_config import NONE, Releases, describe, is_huggingface, read_config
from refusion_jax.model.lora import INPUTS
from refusion_jax.model.tensor_files import INDEX, Tensors
from refusion_jax.model.transformer import Transformer

SHARD_BYTES = 4 << 30  # size of the shards that we write
# Axes of those that are transposed.
_INPUTS = INPUTS | dict.fromkeys(("router", "shared_gate_proj", "shared_up_proj", "shared_down_proj"), 1)
_STACKS = ("dense_layers", "layers")  # of a model, in order


class Part(NamedTuple):
    """A weight outside the layers, or that of one layer or expert, as rows of a tensor."""

    tensor: str  # its name
    whole: tuple[int, ...]  # shape of the tensor
    rows: slice
    shape: tuple[int, ...]  # of the weight
    index: tuple[int, ...]  # in the weight of all layers: (layer,) or (layer, expert)
    inputs: int  # axes of the weight that form the tensor's last one; 0: it is not transposed

    def ours(self, tensor: np.ndarray) -> np.ndarray:
        """The weight, from the tensor."""
        rows = tensor[self.rows]
        return (rows.T if self.inputs else rows).reshape(self.shape)

    def theirs(self, weight: np.ndarray) -> np.ndarray:
        """The rows of the tensor, from the weight."""
        rows = (self.rows.stop - self.rows.start, *self.whole[1:])
        return np.ascontiguousarray(weight.reshape(rows[::-1]).T if self.inputs else weight.reshape(rows))


def tensor_names(family: str, renamed: Mapping[str, str], experts: bool = False) -> dict[str, str]:
    """Ours -> theirs, for layers with experts or without; `renamed` is where a release differs from its family."""
    own = FAMILIES[family]
    return NAMES | dict(own.names) | (dict(own.experts) if experts else {}) | dict(renamed)


def layout(
    weights: dict[str, Any], family: str, renamed: Mapping[str, str], vocab_size: int
) -> Iterator[tuple[tuple[str, ...], list[Part]]]:
    """(path, parts) of every weight, from a tree of anything with the weights' shapes.

    `vocab_size` is the number of rows of the embedding in the directory; ours may have more.
    """
    names = tensor_names(family, renamed)
    for name in [name for name in weights if name not in _STACKS]:
        shape = weights[name].shape
        shape = (vocab_size, *shape[1:]) if len(shape) > 1 else shape
        yield (name,), [Part(names[name], shape, slice(0, shape[0]), shape, (), 0)]
    first = 0
    for stack in [stack for stack in _STACKS if stack in weights]:
        shapes = {name: w.shape for name, w in weights[stack].items()}
        names = tensor_names(family, renamed, experts="router" in shapes)
        ends: dict[str, int] = {}  # number of rows of each tensor that are assigned so far
        rows = {}
        for name in [name for name in names if name in shapes]:
            height = _tensor_shape(shapes[name][names[name].count("{}") :], _INPUTS.get(name, 0))[0]
            begin = ends.get(names[name], 0)
            rows[name], ends[names[name]] = slice(begin, begin + height), begin + height
        for name, shape in shapes.items():
            inputs, stacked = _INPUTS.get(name, 0), names[name].count("{}")
            own = shape[stacked:]
            whole = (ends[names[name]], *_tensor_shape(own, inputs)[1:])
            parts = [
                Part(names[name].format(first + layer, *expert), whole, rows[name], own, (layer, *expert), inputs)
                for layer, *expert in np.ndindex(shape[:stacked])
            ]
            yield (stack, name), parts
        first += next(iter(shapes.values()))[0]


def _tensor_shape(shape: tuple[int, ...], inputs: int) -> tuple[int, ...]:
    """[out, in] from [*in, *out]; a bias or norm is flat."""
    return (math.prod(shape[inputs:]), math.prod(shape[:inputs])) if inputs else (math.prod(shape),)


def load_params(
    path: epath.Path,
    target: dict[str, Any],
    releases: Releases = NONE,
    listed: Callable[[list], Iterable] = iter,
) -> dict[str, Any]:
    """Reads all weights, tensor by tensor, straight into (sharded) arrays: the host holds one further tensor.

    The target has shapes, dtypes and shardings of our weights; rows that their embedding lacks become zeros. `listed`
    wraps the list of all parts of weights, such as in a progress bar. UserError as in `Tensors`, if a tensor would be
    left over, and if a weight is infinite or not a number, in the file or in the target's dtype.
    """
    tensors, weights = _open(path, target, releases)

    def read(part: Part, goal: jax.ShapeDtypeStruct) -> jax.Array:
        axes = len(part.index)
        place = jax.NamedSharding(goal.sharding.mesh, jax.sharding.PartitionSpec(*goal.sharding.spec[axes:]))
        tensor = part.ours(tensors.read(part.tensor, part.whole))
        if tensor.shape != goal.shape[axes:]:
            tensor = np.pad(tensor, ((0, goal.shape[0] - len(tensor)), (0, 0)))
        # Otherwise the next tensor would be read while this one is still held.
        placed = jax.device_put(tensor, place).astype(goal.dtype).block_until_ready()
        if not is_finite(placed):
            where = tensors.place_of(part.tensor)
            raise UserError(f"{where}: {part.tensor} holds values that are not finite as {goal.dtype}")
        return placed

    goals, params = flatten_dict(target), {}
    for name, part in listed([(name, part) for name, parts in weights.items() for part in parts]):
        goal = goals[name]
        if not part.index:
            params[name] = read(part, goal)
            continue
        if name not in params:
            zeros = functools.partial(jnp.zeros, goal.shape, goal.dtype)
            params[name] = jax.jit(zeros, out_shardings=goal.sharding)()
        params[name] = _put(params[name], read(part, goal), part.index)
    return unflatten_dict(params)


def open_params(
    path: epath.Path, target: dict[str, Any], releases: Releases = NONE
) -> Callable[[tuple[str, ...], slice], np.ndarray]:
    """Returns a function that reads parts of weights: (path in the tree, slice of the first axis) -> these entries.

    The target is anything that has the shapes of our weights. Errors are as in `load_params`, also while reading.
    """
    (tensors, weights), shapes = _open(path, target, releases), flatten_dict(target)

    def read(name: tuple[str, ...], part: slice) -> np.ndarray:
        shape = shapes[name].shape
        wanted = range(*part.indices(shape[0]))
        found = []
        for each in weights[name]:
            if not each.index or each.index[0] in wanted:
                found.append(each.ours(tensors.read(each.tensor, each.whole)))
                if not np.isfinite(found[-1]).all():
                    raise UserError(f"{tensors.place_of(each.tensor)}: {each.tensor} holds values that are not finite")
        if each.index:
            return np.stack(found).reshape(len(wanted), *shape[1:])
        missing = shape[0] - len(found[0])
        return np.pad(found[0], [(0, missing)] + [(0, 0)] * (len(shape) - 1))[part] if missing else found[0][part]

    return read


def _open(path: epath.Path, target: dict[str, Any], releases: Releases) -> tuple[Tensors, dict[tuple, list[Part]]]:
    """(the tensors of a directory, the parts of each weight); UserError if a tensor is left over: another model."""
    tensors, config = Tensors(path), read_config(path, releases)
    weights = dict(layout(target, config.model_type, config.names, config.vocab_size))
    names = tensor_names(config.model_type, config.names)
    for name in sorted(tensors.names - {part.tensor for parts in weights.values() for part in parts}):
        if name == names["lm_head"]:  # tied weights, which some save twice
            shape = (config.vocab_size, config.hidden_size)
            if np.array_equal(tensors.read(name, shape), tensors.read(names["embed_tokens"], shape)):
                continue
        if not name.endswith(".rotary_emb.inv_freq"):  # follows from rope_theta
            raise UserError(f"{tensors.place_of(name)}: {name} has no place in the model that config.json describes")
    return tensors, weights


def names_of(path: epath.Path, releases: Releases) -> dict[str, str]:
    """The names of tensors in a directory, by ours; of a run, those that most families have."""
    if not is_huggingface(path):
        return NAMES
    config = read_config(path, releases)
    return tensor_names(config.model_type, config.names)


@jax.jit
def is_finite(tensor: jax.Array) -> jax.Array:
    """Whether all values are finite. On a CPU, max can miss NaNs, and all(isfinite) needs a quarter more memory."""
    return jnp.isfinite(jnp.sum(tensor * 0))


@functools.partial(jax.jit, donate_argnums=0)
def _put(stacked: jax.Array, layer: jax.Array, index: tuple[int, ...]) -> jax.Array:
    layer = layer.reshape((1,) * len(index) + layer.shape)
    return jax.lax.dynamic_update_slice(stacked, layer, (*index, *(0,) * (layer.ndim - len(index))))


def read_dtype(path: epath.Path) -> str:
    """The dtype that holds a directory's weights without rounding: "bfloat16" if all are in it, else "float32"."""
    return "bfloat16" if Tensors(path).dtypes == {"BF16"} else "float32"


def save(model: Transformer, path: epath.PathLike, objective: str | None = None) -> None:
    """Writes a directory that `transformers` loads: safetensors shards, their index, and last config.json.

    The model's dtype is the one written; `path` must be empty or is created; `objective` is the system that trained it.
    """
    path, params = epath.Path(path), nnx.to_pure_dict(nnx.state(model))
    weights = flatten_dict(params)
    # Of each tensor the parts, each with the weight that it is a part of.
    tensors: dict[str, list[tuple[Part, jax.Array]]] = collections.defaultdict(list)
    for name, parts in layout(params, model.config.family, {}, model.config.vocab_size):
        for part in parts:
            tensors[part.tensor].append((part, weights[name]))
    sizes = {name: math.prod(part.whole) * weight.dtype.itemsize for name, [(part, weight), *_] in tensors.items()}
    shards: list[list[str]] = []
    left = 0
    for name, size in sizes.items():
        if size > left:
            shards.append([])
            left = SHARD_BYTES
        shards[-1].append(name)
        left -= size
    weight_map = {}
    for number, names in enumerate(track(shards, "writing"), 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        with replacing(path / file) as temporary:
            temporary.touch()
            mode = temporary.stat().st_mode  # the umask's; safetensors would let only the user read it
            try:
                save_file({name: _on_host(tensors[name]) for name in names}, temporary, metadata={"format": "pt"})
            except SafetensorError as error:  # of a full disk
                raise Failure(f"{path / file}: {first_line(error)}") from error
            temporary.chmod(mode)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
    write_file(path / INDEX, json.dumps(index, indent=2) + "\n")
    described = describe(model.config, str(jax.tree.leaves(params)[0].dtype), objective)
    write_file(path / "config.json", json.dumps(described, indent=2) + "\n")


def _on_host(parts: list[tuple[Part, jax.Array]]) -> np.ndarray:
    """The tensor that consists of these parts of our weights."""
    parts = sorted(parts, key=lambda item: item[0].rows.start)
    rows = [part.theirs(jax.device_get(weight[part.index])) for part, weight in parts]
    return np.concatenate(rows) if len(rows) > 1 else rows[0]

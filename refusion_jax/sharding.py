"""Where arrays live: the device mesh, and one table from logical axes to mesh axes.

Weights and activations name their axes logically ("embed", "heads", "batch" ...); RULES says which mesh axes split
them. Everything is `jax.sharding.NamedSharding` under automatic partitioning, so the same program runs on one device
or on a pod.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from refusion_jax.errors import UserError

# replica: copies over the data-centre network; data: copies inside a slice; fsdp: weights split over the batch's
# chips; tensor: heads, mlp and vocabulary split; sequence: rows split.
MESH_AXES = ("replica", "data", "fsdp", "tensor", "sequence")

RULES: dict[str | None, str | tuple[str, ...] | None] = {
    None: None,
    "batch": ("replica", "data", "fsdp"),
    "length": "sequence",
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "head_dim": None,
    "layers": None,
    "norm": None,
}


def make_mesh(shape: Mapping[str, int], devices: list[jax.Device] | None = None) -> Mesh:
    """Arranges the devices in a mesh.

    Args:
      shape: size of each of MESH_AXES; at most one is -1 and takes what the others leave.
      devices: all of jax.devices() by default.

    Raises:
      UserError: where the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {axis: shape[axis] for axis in MESH_AXES}
    known = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values():
        sizes = {axis: len(devices) // known if size == -1 else size for axis, size in sizes.items()}
    if math.prod(sizes.values()) != len(devices):
        asked = ", ".join(f"mesh.{axis}={shape[axis]}" for axis in MESH_AXES if shape[axis] != 1)
        raise UserError(
            f"{asked or 'a mesh of one device'} does not multiply to the {len(devices)} devices here; "
            f"set one axis to -1 to let it take the rest"
        )
    return jax.make_mesh(
        tuple(sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=devices
    )


def describe(mesh: Mesh) -> str:
    """For people: "8 TPU v5 lite (data=2, fsdp=4)"."""
    split = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
    return f"{mesh.size} {mesh.devices.flat[0].device_kind}{f' ({split})' if split else ''}"


def spec(*axes: str | None) -> PartitionSpec:
    """PartitionSpec of an array with these logical axes."""
    return PartitionSpec(*(RULES[axis] for axis in axes))


def sharding(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """NamedSharding of an array with these logical axes."""
    return NamedSharding(mesh, spec(*axes))


def mesh_axes(axis: str | None) -> tuple[str, ...]:
    """The mesh axes that split a logical axis."""
    names = RULES[axis]
    return (names,) if isinstance(names, str) else names or ()


def ways(mesh: Mesh, axis: str) -> int:
    """Into how many parts the mesh splits a logical axis."""
    return math.prod(mesh.shape[name] for name in mesh_axes(axis))


def on_each_chip(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """The function run by every chip of the mesh on its own shards; the function itself outside `jax.set_mesh`."""
    if jax.sharding.get_abstract_mesh().empty:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


# For functions run by `on_each_chip`: all of them name logical axes, and do nothing outside `jax.set_mesh`.


def _names(*axes: str, but: str | None = None) -> tuple[str, ...]:
    if jax.sharding.get_abstract_mesh().empty:
        return ()
    return tuple(name for axis in axes for name in mesh_axes(axis) if name not in mesh_axes(but))


def all_gather(x: jax.Array, logical: str, axis: int) -> jax.Array:
    """Puts the shards of a logical axis together along an array axis."""
    names = _names(logical)
    return jax.lax.all_gather(x, names, axis=axis, tiled=True) if names else x


def scatter_sum(x: jax.Array, logical: str, axis: int) -> jax.Array:
    """Sums over the chips that share a logical axis; each keeps its own shard."""
    names = _names(logical)
    return jax.lax.psum_scatter(x, names, scatter_dimension=axis, tiled=True) if names else x


def all_sum(x: Any, *logical: str, but: str | None = None) -> Any:
    """Sums over the chips that split these logical axes, but not over those that split another one."""
    names = _names(*logical, but=but)
    return jax.lax.psum(x, names) if names else x


def all_max(x: jax.Array, logical: str) -> jax.Array:
    """The maximum over the chips that split a logical axis."""
    names = _names(logical)
    return jax.lax.pmax(x, names) if names else x


def shard_index(logical: str) -> jax.Array | int:
    """Which shard of a logical axis this chip has."""
    names = _names(logical)
    return jax.lax.axis_index(names) if names else 0


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Tells the partitioner how an activation is laid out; does nothing outside `jax.set_mesh`."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(*axes))

"""Where arrays live: the device mesh, and one table from logical axes to mesh axes.

Weights and activations name their axes logically ("embed", "heads", "batch" ...); RULES says which mesh axes split
them. Everything is `jax.sharding.NamedSharding` under automatic partitioning, so the same program runs on one device
or on a pod.
"""

import math
from collections.abc import Mapping

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


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Tells the partitioner how an activation is laid out; does nothing outside `jax.set_mesh`."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(*axes))

"""Where arrays live: the device mesh, and one table from logical axes to mesh axes.

Weights and activations name their axes logically ("embed", "heads", "batch" ...); RULES says which mesh axes split
them. Everything is `jax.sharding.NamedSharding` under automatic partitioning, so the same program runs on one device
or on a pod.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from refusion_jax.cli.errors import UserError

# replica: copies over the data-centre network; data: copies inside a slice; fsdp: weights split over the batch's
# chips; expert: the same, but layers with experts are split by whole experts; tensor: heads, mlp and vocabulary split;
# sequence: rows split.
MESH_AXES = ("replica", "data", "fsdp", "expert", "tensor", "sequence")

RULES: dict[str | None, tuple[str, ...]] = {
    None: (),
    "batch": ("replica", "data", "fsdp", "expert"),
    "length": ("sequence",),
    "vocab": ("tensor",),
    "embed": ("fsdp", "expert"),
    "experts": ("expert",),
    "expert_embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "head_dim": (),
    "layers": (),
    "norm": (),
    "bias": (),
    "rank": (),
}


def local_mesh(**shape: int) -> Mesh:
    """A mesh of this process's first devices, as many as the sizes multiply to; of one where none is given."""
    return make_mesh(shape, jax.local_devices()[: math.prod(shape.values())])


def make_mesh(shape: Mapping[str, int], devices: list[jax.Device] | None = None) -> Mesh:
    """Arranges the devices in a mesh: neighbours on the network inside a slice, copies across slices.

    Refuses sizes that do not multiply to the number of devices, and slices that do not hold whole copies. The shape
    has sizes of MESH_AXES, 1 where not given; at most one is -1 and takes what the others leave.
    """
    devices = jax.devices() if devices is None else devices
    shape = dict.fromkeys(MESH_AXES, 1) | dict(shape)
    known = math.prod(size for size in shape.values() if size != -1)
    sizes = {axis: len(devices) // known if size == -1 else size for axis, size in shape.items()}
    if math.prod(sizes.values()) != len(devices):
        asked = ", ".join(f"mesh.{axis}={size}" for axis, size in shape.items() if size != 1)
        can_grow = known < len(devices) and -1 not in shape.values()
        fix = "; one axis may be -1, which takes what the others leave" if can_grow else ""
        raise UserError(f"{asked or 'a mesh of one device'} does not multiply to the {len(devices)} devices here{fix}")
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if sizes["replica"] % slices:
        raise UserError(
            f"mesh.replica={sizes['replica']}: the network between the {slices} slices is too slow to split weights "
            f"over them; mesh.replica={slices} puts a copy on each"
        )
    if slices > 1:
        within = [sizes[axis] // (slices if axis == "replica" else 1) for axis in MESH_AXES]
        across = [slices if axis == "replica" else 1 for axis in MESH_AXES]
        grid = mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)
    else:
        grid = mesh_utils.create_device_mesh(list(sizes.values()), devices, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def describe(mesh: Mesh) -> str:
    """A text for people, such as "8 TPU v5 lite (data=2, fsdp=4)"."""
    split = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
    return f"{mesh.size} {mesh.devices.flat[0].device_kind}{f' ({split})' if split else ''}"


def spec(*axes: str | None) -> PartitionSpec:
    """PartitionSpec of an array with these logical axes."""
    return PartitionSpec(*(RULES[axis] for axis in axes))


def sharding(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """NamedSharding of an array with these logical axes."""
    return NamedSharding(mesh, spec(*axes))


def placed(shapes: Any, shardings: Any) -> Any:
    """A tree of arrays, or their shapes, as `jax.ShapeDtypeStruct`s with these shardings."""
    if isinstance(shardings, NamedSharding):
        shardings = jax.tree.map(lambda _: shardings, shapes)
    return jax.tree.map(lambda x, own: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own), shapes, shardings)


def shard_count(mesh: Mesh, axis: str) -> int:
    """The number of parts into which the mesh splits a logical axis."""
    return math.prod(mesh.shape[name] for name in RULES[axis])


def shard_count_here(axis: str) -> int:
    """`shard_count` on the mesh of `jax.set_mesh`; 1 outside it."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else shard_count(mesh, axis)


def device_kind_here() -> str:
    """The kind of device that a program is traced for: that of `jax.set_mesh`, or outside it the default device's."""
    return (jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]).device_kind


def on_each_chip(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """Makes every chip of the mesh run the function on its own shards; outside `jax.set_mesh`, the function itself."""
    if jax.sharding.get_abstract_mesh().empty:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


# For functions run by `on_each_chip`: all of them name logical axes, and do nothing outside `jax.set_mesh`.


def _names(*axes: str, but: str | None = None) -> tuple[str, ...]:
    if jax.sharding.get_abstract_mesh().empty:
        return ()
    return tuple(name for axis in axes for name in RULES[axis] if name not in RULES[but])


def all_gather(x: jax.Array, logical: str, axis: int) -> jax.Array:
    """Concatenates the shards of a logical axis along an array axis."""
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
    """The index of this chip's shard of a logical axis."""
    names = _names(logical)
    return jax.lax.axis_index(names) if names else 0


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Tells the partitioner how an activation is laid out; does nothing outside `jax.set_mesh`."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(*axes))


def split_batch(batch: Any, parts: int) -> Any:
    """Splits every [B, ...] array into [parts, B / parts, ...], by striding, so that each device keeps its own rows."""

    def split(x):
        x = x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
        return constrain(x, None, "batch", *(None,) * (x.ndim - 2))

    return jax.tree.map(split, batch)

"""The options of XLA that differ from its defaults, by TPU generation: the one place for compiler options.

Chosen by what they do to compiled programs (configs/refusion_8b.py, libtpu 0.0.51; `python -m refusion_jax.plan` shows
it), and not measured on a TPU. Google publishes training runs with them: on v4 the asynchronous gathers, on v5p
gathering, on TPU7x all that the SparseCores do here.

all             A gather never becomes an all-reduce in which every chip adds its part to zeros, which moves twice the
                bytes and blocks. By default it does if a shard's side is not a multiple of 128: 593 times in a step of
                the 14B model on v5p:4x4x4, whose shards of 5,120 columns are 80 wide.
v5e             All-gathers are fused with arithmetic by default ("async collective fusion"). The compiler refuses that
                on every other generation.
all but TPU7x   By default a product with a gathered weight becomes a loop over the parts of the weight that passes the
                parts from chip to chip. With weights split along the axis that the product sums over, every turn of the
                loop reads and writes the whole result: 3.1 TB of HBM traffic per step on v5p:2x4x4, versus 0.6 TB
                without the loop; the 1.7B model on v5e:4x4 takes 30 % less time without. Off.
v4              Gathers begin early and end late, during the arithmetic.
v5p, v6e        So that the weights arrive during the arithmetic, the SparseCores gather them. If a mesh axis lies along
                all three axes of the torus (v5p) the compiler does not do that; if it is made to, it needs twice the
                time, for 2 to 4 % of the step.
v5p, v6e        The SparseCores scatter the gradients, too, instead of an all-reduce of all of them on every chip, which
                moves twice the bytes and blocks: 31.8 GB per step of 8B, 3 % of its time on v5p:2x4x4, 6 % on v6e:4x8.
                They do so over several axes of the torus ("nd"), without which nothing is scattered on v5p, nor on
                square slices of v6e: 2 % of a step of Llama 3.1 8B on v6e:4x4, 10 % of 8B as shipped on v6e:16x16.
v6e             The SparseCores sum gradients over copies of the weights during the arithmetic, and what a barrier of
                recomputation separates may be fused: each 0.5 % of a step with two copies on v6e:8x8.
"""

import importlib.metadata

from jax.sharding import Mesh

# The TPU compiler that programs are planned and tested with, which pyproject.toml installs. jax[tpu] 0.10.2 asks for
# 0.0.42: there 31.1 GB of gathers block in a step of 8B on v5p:2x4x4, instead of 18.1.
LIBTPU = "0.0.51"
_PLANNED = {"libtpu": LIBTPU, "jax": "0.10.2", "jaxlib": "0.10.2"}

_Options = dict[str, bool | int | str]

_ALL: _Options = {"xla_tpu_prefer_async_allgather_to_allreduce": "true"}
_NO_LOOPS: _Options = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}  # no product is that large
_GATHER: _Options = {"xla_tpu_enable_sparse_core_collective_offload_all_gather": "true"}
_SCATTER: _Options = {
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
    "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": "true",
    "xla_tpu_enable_sparse_core_reduce_scatter_v2": "true",
}
_SUM: _Options = {"xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true"}
_NO_BARRIERS: _Options = {"xla_tpu_aggressive_opt_barrier_removal": "true"}
# By jax.Device.device_kind.
_OPTIONS = {
    "TPU v4": _ALL | _NO_LOOPS | {"xla_enable_async_all_gather": "true"},
    "TPU v5 lite": _ALL | _NO_LOOPS,
    "TPU v5": _ALL | _NO_LOOPS | _GATHER | _SCATTER,
    "TPU v6 lite": _ALL | _NO_LOOPS | _GATHER | _SCATTER | _SUM | _NO_BARRIERS,
    "TPU7x": _ALL,
}


def compiler_options(mesh: Mesh) -> dict[str, bool | int | str]:
    """The options with which a step is compiled for the devices of a mesh."""
    return _OPTIONS.get(mesh.devices.flat[0].device_kind, {})


def versions() -> dict[str, str]:
    """The versions of JAX and the compiler."""
    return {name: _version(name) for name in _PLANNED}


def version_mismatch() -> str:
    """One line if the versions differ from those that programs are planned and tested with; else empty."""
    others = [
        f"{name} {there} in place of {_PLANNED[name]}" for name, there in versions().items() if there != _PLANNED[name]
    ]
    return f"{', '.join(others)}, with which memory and speed are planned and tested" if others else ""


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "of no known version"

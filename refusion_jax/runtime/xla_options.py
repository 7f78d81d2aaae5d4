"""What we ask of XLA beyond its defaults, by TPU generation: the one place for compiler options.

Chosen by what they do to the compiled program of configs/refusion_8b.py (4,096 tokens, 2 rows a chip, libtpu 0.0.51;
`python -m refusion_jax.plan` shows it), and not measured on a TPU.

v5e        Defaults: all-gathers are already fused with arithmetic ("async collective fusion"). The compiler refuses
           that on every other generation.
v4         As v5p, but no gathering by SparseCores.
v5p, v6e   By default a product with a gathered weight becomes a loop over the parts of the weight that passes the parts
           from chip to chip. With weights split along the axis that the product sums over, every turn of the loop reads
           and writes the whole result: 3.1 TB of HBM traffic a step on v5p:2x4x4, against 0.6 TB without the loop.
           Off. So that the weights still arrive beside the arithmetic, the SparseCores gather them.
"""

from jax.sharding import Mesh

_NO_LOOPS: dict[str, bool | int | str] = {
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000,  # no product is that large
}
_ON_SPARSE_CORES = _NO_LOOPS | {"xla_tpu_enable_sparse_core_collective_offload_all_gather": "true"}
# By jax.Device.device_kind.
_OPTIONS = {"TPU v4": _NO_LOOPS, "TPU v5": _ON_SPARSE_CORES, "TPU v6 lite": _ON_SPARSE_CORES}


def compiler_options(mesh: Mesh) -> dict[str, bool | int | str]:
    """The options with which a step is compiled for the devices of a mesh."""
    return _OPTIONS.get(mesh.devices.flat[0].device_kind, {})

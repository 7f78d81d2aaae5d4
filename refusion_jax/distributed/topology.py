"""TPU slices by the names under which Google Cloud rents them: the accelerator type v5p-64 is the topology v5p:2x4x4.

v4-N, v5p-N and tpu7x-N count TensorCores, of which a chip has two; v5litepod-N and v6e-N count chips. Chips can be
arranged in several shapes; a name takes the default one, which is nearest to a cube
(docs.cloud.google.com/tpu/docs/types-topologies, /v4, /v5e, /v5p, /v6e, and default_topologies of
github.com/AI-Hypercomputer/xpk).
"""

import re

NAMES = "v4-N, v5p-N, tpu7x-N (N cores: 8, 16, 32, 64, k*128), v5litepod-N, v6e-N (N chips: 1, 4, 8, 16, ..., 256)"

_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_BELOW_A_CUBE = {8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4"}  # by TensorCores


def topology_of(name: str) -> str:
    """The topology, such as "v5p:2x4x4", of an accelerator type; any other name is returned unchanged."""
    found = re.fullmatch(r"(v4|v5p|tpu7x|v5litepod|v5e|v6e)-([1-9][0-9]{0,4})", name)
    if not found:
        return name
    generation, count = found[1].replace("litepod", "e"), int(found[2])
    if generation in ("v5e", "v6e"):
        shape = _FLAT.get(count)
    else:
        shape = _BELOW_A_CUBE.get(count) if count % 128 else _of_cubes(count // 128)
    return f"{generation}:{shape}" if shape else name


def _of_cubes(cubes: int) -> str:
    """The shape nearest to a cube, made of `cubes` blocks of 4x4x4 chips, with its shortest side first."""
    shapes = (
        (a, b, cubes // (a * b))
        for a in range(1, cubes + 1)
        for b in range(a, cubes // a + 1)
        if cubes % (a * b) == 0 and b <= cubes // (a * b)
    )
    return "x".join(str(4 * side) for side in min(shapes, key=sum))

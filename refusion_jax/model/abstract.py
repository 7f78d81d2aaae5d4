"""A transformer without arrays: its structure, and the shape and sharding of each weight."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from refusion_jax.cli.errors import SettingError
from refusion_jax.distributed.sharding import RULES, shard_count, sharding
from refusion_jax.model.int8 import Int8Array, is_int8
from refusion_jax.model.shape import ModelConfig
from refusion_jax.model.transformer import Transformer, logical_axes


def abstract_transformer(
    config: ModelConfig,
    dtype: str,
    mesh: Mesh,
    flags: str = "mesh",
    head_rows: int = 0,
    weights: str = "same",
    cache: str = "same",
) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """The structure of a model, and a `jax.ShapeDtypeStruct` of every weight with its sharding.

    SettingError, naming flags by the prefix `flags`, if the mesh cannot split a weight evenly; its devices may be
    abstract. `head_rows`, `weights` and `cache`: see `Transformer.with_head_rows` and `Transformer.rounded`.
    """
    model = nnx.eval_shape(
        lambda: Transformer(config, nnx.Rngs(0), dtype).rounded(weights, cache).with_head_rows(head_rows)
    )
    graphdef, params = nnx.split(model)

    def place(x: Any, axes: Sequence[str | None], dtype: DTypeLike = dtype) -> Any:
        if is_int8(x):
            of_scale = [axis if size > 1 else None for size, axis in zip(x.scale.shape, axes, strict=True)]
            return Int8Array(place(x.values, axes, jnp.int8), place(x.scale, of_scale, jnp.float32))
        for size, axis in zip(x.shape, axes, strict=True):
            if size % shard_count(mesh, axis):
                name = RULES[axis][0]
                raise SettingError(flags, name, mesh.shape[name], f"does not divide the model's {size} {axis}")
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding(mesh, *axes))

    return graphdef, jax.tree.map(place, nnx.to_pure_dict(params), logical_axes(model), is_leaf=is_int8)

import math

import jax
import pytest
from helpers import load_config

from refusion_jax.config.model import model_config
from refusion_jax.distributed import sharding
from refusion_jax.training.program import train_program

ONES = dict.fromkeys(sharding.MESH_AXES, 1)


@pytest.mark.parametrize("size", ["0.6b", "32b"])  # tied to the head, and not
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
def test_no_large_weight_or_moment_is_whole_on_a_chip(size, optimizer):
    """Adafactor's means over an axis (at most 6 MiB each here) are: the axis that was split may be the one averaged."""
    config = load_config("refusion_8b")(size)
    config.optimizer = optimizer
    mesh = sharding.make_mesh(ONES | {"fsdp": 8})
    state = train_program(config, model_config(config), mesh).target
    for path, x in jax.tree.leaves_with_path(state):
        is_mean = optimizer == "adafactor" and "v_" in jax.tree_util.keystr(path)
        if x.size > 1_000_000 and not is_mean:
            assert math.prod(x.sharding.shard_shape(x.shape)) == x.size // 8, jax.tree_util.keystr(path)

"""Packing the real tokens of rows of different lengths changes where they stand, and nothing else."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_config, tiny_model
from hypothesis import strategies as st

from refusion_jax import DecodeSettings
from refusion_jax.decoding.requests import Request, prepare
from refusion_jax.model.ragged import Ragged
from refusion_jax.model.transformer import KeyValues
from refusion_jax.runtime.sharding import MESH_AXES, make_mesh
from refusion_jax.systems.api import decoder_for
from refusion_jax.systems.refusion.decoder import shapes_of


@hypothesis.settings(derandomize=True, deadline=None)
@hypothesis.given(
    st.sampled_from([1, 2, 4]), st.lists(st.integers(0, 6), min_size=8, max_size=8), st.sampled_from([6, 7])
)
def test_real_tokens_stand_row_by_row_and_come_back(shards, lengths, width):
    most = np.reshape(lengths, (shards, -1)).sum(axis=1).max()
    size = min(most + 3 - most % 3, 8 // shards * width)  # few sizes are quicker
    ragged = Ragged.of(jnp.array(lengths, jnp.int32), width, size, shards)
    x = jnp.arange(8 * width * 2).reshape(8, width, 2)
    packed, spread = ragged.pack(x), ragged.spread(ragged.pack(x))
    assert packed.shape == (shards, size, 2)
    for row, length in enumerate(lengths):
        assert (spread[row, :length] == x[row, :length]).all()
    if size < 8 // shards * width:
        rows = np.arange(8).reshape(shards, -1)
        for shard in range(shards):
            real = np.concatenate([x[row, : lengths[row]] for row in rows[shard]])
            assert (packed[shard, : len(real)] == real).all()


@pytest.mark.parametrize("mesh", [(1, 1), (2, 2), (4, 2)])
def test_a_forward_of_packed_rows_is_that_of_padded_ones(mesh):
    model, rng, shards = tiny_model(), np.random.default_rng(0), mesh[0]
    c, B, T, S = model.config, 8, 6, 5
    lengths = np.array([6, 1, 0, 3, 2, 2, 0, 5])
    tokens = jnp.array(rng.integers(5, 30, (B, T)))
    positions = jnp.array(rng.integers(0, 40, (B, T)))
    cached = jnp.array(rng.normal(size=(2, c.num_hidden_layers, B, S, c.num_key_value_heads, c.head_dim)), jnp.float32)
    visible = jnp.array(rng.random((B, T, T)) < 0.7) | jnp.eye(T, dtype=bool)[None]
    visible &= jnp.tril(jnp.ones((1, T, T), bool))
    seen = jnp.array(rng.integers(0, S + 1, B))

    def extend(ragged=None):
        return model.extend(tokens, positions, KeyValues(*cached), seen, visible, ragged)

    logits, new = extend()

    @jax.jit
    def packed(lengths):
        ragged = Ragged.of(lengths, T, size={1: 20, 2: 12, 4: 8}[shards], shards=shards)
        packed_logits, new = extend(ragged)
        return ragged.spread(packed_logits), new

    axes = dict.fromkeys(MESH_AXES, 1) | {"data": mesh[0], "tensor": mesh[1]}
    with jax.set_mesh(make_mesh(axes, jax.devices()[: mesh[0] * mesh[1]])):
        again, packed_new = packed(jnp.array(lengths, jnp.int32))
    for row, length in enumerate(lengths):
        # The same sums, in products of another shape: not always to the last bit.
        np.testing.assert_allclose(again[row, :length], logits[row, :length], rtol=1e-5, atol=1e-5)
        for got, want in ((packed_new.keys, new.keys), (packed_new.values, new.values)):
            np.testing.assert_allclose(got[:, row, :length], want[:, row, :length], rtol=1e-5, atol=1e-5)


def test_some_compiled_shape_holds_any_rows_and_a_lone_row_packs_nothing():
    settings = DecodeSettings("refusion", max_new_tokens=64, slot_size=4, serial_blocks=2)
    widths = decoder_for(prepare([Request([1, 2])], settings, tiny_config()), tiny_config()).widths
    widest = widths[-1]
    assert shapes_of(1, widths) == [(width, width) for width in widths]
    for rows in (2, 3, 8, 64):
        shapes = shapes_of(rows, widths)
        assert shapes[-1] == (widest, rows * widest)
        assert len(shapes) <= 5
        assert all(width <= size <= rows * width for width, size in shapes)
        assert [size for _, size in shapes] == sorted(size for _, size in shapes)

"""Packing the real tokens of rows of different lengths changes where they stand, and nothing else."""

import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_model
from hypothesis import strategies as st

from refusion_jax.model.ragged import Ragged
from refusion_jax.model.transformer import KeyValues
from refusion_jax.runtime.sharding import MESH_AXES, make_mesh
from refusion_jax.systems.refusion.budget import choose, shapes_of


@hypothesis.settings(max_examples=30)
@hypothesis.given(
    st.sampled_from([(1, 6, 4), (2, 7, 2), (4, 7, 4)]), st.lists(st.integers(0, 6), min_size=8, max_size=8)
)
def test_real_tokens_stand_tile_by_tile_and_come_back(sizes, lengths):
    shards, width, tile = sizes
    tiles_of = -(-np.reshape(lengths, (shards, -1)) // tile)
    tiles = 8 // shards * -(-6 // tile) + 1
    ragged = Ragged.of(jnp.array(lengths, jnp.int32), width, tile, tiles, shards)
    x = jnp.arange(8 * width * 2).reshape(8, width, 2)
    packed = ragged.pack(x)
    assert packed.shape == (shards, tiles * tile, 2)
    for back in map(np.asarray, (ragged.spread(packed), ragged.spread(packed, 3))):
        for row, length in enumerate(lengths):
            assert (back[row, :length] == np.asarray(x)[row, :length][: back.shape[1]]).all()
    rows, keys = ragged.rows_of_tiles(jnp.arange(8)).reshape(shards, tiles), ragged.keys_of_tiles(packed)
    stands = ragged.tiles(packed).reshape(shards, tiles, tile, 2)
    x, rows, keys, stands = map(np.asarray, (x, rows, keys.reshape(shards, tiles, width, 2), stands))
    for shard, row in np.ndindex(tiles_of.shape):
        row_number = shard * tiles_of.shape[1] + row
        own = np.flatnonzero(rows[shard] == row_number)[: tiles_of[shard, row]]
        assert len(own) == tiles_of[shard, row]
        for number, at in enumerate(own):
            real = x[row_number, number * tile : lengths[row_number]][:tile]
            assert (stands[shard, at, : len(real)] == real).all()
            assert (keys[shard, at, : lengths[row_number]] == x[row_number, : lengths[row_number]]).all()


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

    logits, new = model.extend(tokens, positions, KeyValues(*cached), seen, visible)

    @jax.jit
    def packed(lengths):
        ragged = Ragged.of(lengths, T, tile=2, tiles={1: 12, 2: 6, 4: 5}[shards], shards=shards)
        x, new = model.extend_hidden(tokens, positions, KeyValues(*cached), seen, visible, ragged)
        return ragged.spread(model.logits(x)), jax.tree.map(jax.vmap(ragged.spread), new)

    axes = dict.fromkeys(MESH_AXES, 1) | {"data": mesh[0], "tensor": mesh[1]}
    with jax.set_mesh(make_mesh(axes, jax.devices()[: mesh[0] * mesh[1]])):
        again, packed_new = packed(jnp.array(lengths, jnp.int32))
    for row, length in enumerate(lengths):
        # The same sums, in products of another shape: not always to the last bit.
        np.testing.assert_allclose(again[row, :length], logits[row, :length], rtol=1e-5, atol=1e-5)
        for got, want in ((packed_new.keys, new.keys), (packed_new.values, new.values)):
            np.testing.assert_allclose(got[:, row, :length], want[:, row, :length], rtol=1e-5, atol=1e-5)


def test_some_compiled_shape_holds_any_rows_and_a_lone_row_is_one_tile():
    """Whatever the rows need; most of its places are real, where they feed whole slots."""
    for slot_size, (rows, blocks, budget) in itertools.product(
        (1, 3, 4, 8, 32), ((1, 1, 0), (1, 2, 99), (8, 2, 60), (33, 1, 0))
    ):
        needed = 6 * slot_size
        shapes = shapes_of(rows, needed * blocks, needed, budget, slot_size)
        assert len(shapes) <= 8
        assert [shape.places for shape in shapes] == sorted(shape.places for shape in shapes)
        assert shapes[-1].tiles >= rows * -(-needed // shapes[-1].tile)
        assert rows > 1 or all(shape.tiles == 1 for shape in shapes)
        assert all(a.places >= 0.5 * b.places for a, b in itertools.pairwise(shapes))


@hypothesis.settings(max_examples=40)
@hypothesis.given(st.lists(st.tuples(*[st.integers(0, 6)] * 2), min_size=8, max_size=8), st.integers(0, 400))
def test_what_is_needed_fits_and_a_budget_is_kept_unless_the_shape_has_room(rows, budget):
    """And the smallest wishes are granted first."""
    needed, asked = 4 * np.array(rows).T
    shapes = shapes_of(8, 48, 24, 400, 4)
    index, room = jax.device_get(choose(jnp.array(needed), jnp.array(asked), jnp.full(8, budget), shapes, 1))
    shape, room = shapes[index], np.minimum(room, asked)
    assert (room >= 0).all()
    assert sum(-(-(needed + room) // shape.tile)) <= shape.tiles

    def holds(s):
        everything = sum(needed + asked) <= budget
        wishes = s.tiles >= sum(-(-(needed + asked) // s.tile)) if everything else s.places >= budget * asked.any()
        return wishes and s.tiles >= sum(-(-needed // s.tile))

    assert shape == next(s for s in shapes if holds(s))
    assert sum(needed + asked) > budget or (room == asked).all()
    granted = room == asked
    assert not granted.any() or granted.all() or max(asked[granted]) <= min(asked[~granted]) + 2 * shape.tile

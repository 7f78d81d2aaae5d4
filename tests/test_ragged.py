"""Packing the real tokens of rows of different lengths changes where they stand, and nothing else."""

import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import extend, tiny_model
from hypothesis import strategies as st

from refusion_jax.distributed.sharding import make_mesh
from refusion_jax.model.key_values import KeyValues
from refusion_jax.model.ragged import Ragged
from refusion_jax.systems.refusion.budget import choose, shapes_of, worthwhile

pytestmark = pytest.mark.usefixtures("all_shapes")


@pytest.mark.parametrize("mesh", [(1, 1), (2, 2), (4, 2)])
def test_a_forward_of_packed_rows_is_that_of_padded_ones(mesh):
    model, rng, shards = tiny_model(), np.random.default_rng(0), mesh[0]
    c, B, T, S = model.config, 8, 6, 5
    lengths = np.array([6, 1, 0, 3, 2, 2, 0, 5])
    tokens = jnp.array(rng.integers(5, 30, (B, T)))
    positions = jnp.array(rng.integers(0, 40, (B, T)))
    cached = jnp.array(rng.normal(size=(2, c.num_hidden_layers, B, c.num_key_value_heads, S, c.head_dim)), jnp.float32)
    visible = jnp.array(rng.random((B, T, T)) < 0.7) | jnp.eye(T, dtype=bool)[None]
    visible &= jnp.tril(jnp.ones((1, T, T), bool))
    seen = jnp.array(rng.integers(0, S + 1, B))

    logits, new = extend(model, tokens, positions, KeyValues(*cached), seen, visible)

    @jax.jit
    def packed(lengths):
        ragged = Ragged.of(lengths, T, tile=2, tiles={1: 12, 2: 6, 4: 5}[shards], shards=shards)
        x, new = model.extend_hidden(tokens, positions, KeyValues(*cached), seen, visible, ragged)
        return ragged.spread(model.logits(x)), jax.tree.map(jax.vmap(ragged.spread), new)

    axes = {"data": mesh[0], "tensor": mesh[1]}
    with jax.set_mesh(make_mesh(axes, jax.devices()[: mesh[0] * mesh[1]])):
        again, packed_new = packed(jnp.array(lengths, jnp.int32))
    for row, length in enumerate(lengths):
        # The same sums, in products of another shape: not always to the last bit.
        np.testing.assert_allclose(again[row, :length], logits[row, :length], rtol=1e-5, atol=1e-5)
        for got, want in ((packed_new.keys, new.keys), (packed_new.values, new.values)):
            np.testing.assert_allclose(got[:, row, :length], want[:, row, :length], rtol=1e-5, atol=1e-5)


def test_some_compiled_shape_holds_any_rows_and_a_lone_row_is_one_tile():
    """Whatever the rows need; most of its places are real, where they have whole slots."""
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


TOKENS = st.integers(0, 6)
jitted_choose = jax.jit(choose, static_argnums=(4, 5))


@hypothesis.settings(max_examples=40)
@hypothesis.given(st.lists(st.tuples(*[TOKENS] * 3), min_size=8, max_size=8), st.integers(0, 400))
def test_what_is_needed_fits_and_the_shape_is_the_least_that_holds_what_pays(rows, budget):
    """A request pays within the budget, the smallest first, or where its row has shown that it does."""
    needed, asked, affordable = 4 * np.array(rows, np.int32).T
    shapes = shapes_of(8, 48, 24, 400, 4)
    given = (jnp.array(x) for x in (needed, asked, np.full(8, budget, np.int32), affordable))
    index, is_granted = jax.device_get(jitted_choose(*given, shapes, 1))
    shape = shapes[index]
    assert sum(-(-(needed + asked * is_granted) // shape.tile)) <= shape.tiles

    paying, left = (asked > 0) & (asked <= affordable), budget - sum(needed)
    for row in sorted(range(8), key=lambda row: asked[row]):
        before = sum(asked[other] for other in range(8) if (asked[other], other) < (asked[row], row))
        paying[row] |= 0 < asked[row] <= left - before
    goal = needed + np.where(paying, asked, 0)
    fitting = [s for s in shapes if s.tiles >= sum(-(-goal // s.tile))]
    assert shape == (fitting or [shapes[-1]])[0]
    if fitting:
        assert is_granted[paying].all()


def test_rows_whose_drafts_hold_speculate_more_and_share_what_that_saves():
    hits, misses = jnp.array([0, 7, 0, 3]), jnp.array([0, 1, 3, 0])
    active = jnp.array([True, True, True, False])
    affordable = jax.jit(worthwhile, static_argnums=(0, 4))
    assert affordable(48, hits, misses, active, 1).tolist() == [16, 64, 4, 64]  # of three rows
    assert affordable(48, hits, misses, active, 2).tolist() == [24, 96, 12, 192]  # of two, and of one
    assert affordable(0, hits, misses, active, 1).tolist() == [0] * 4

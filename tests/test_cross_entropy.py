import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.distributed import sharding
from refusion_jax.model import cross_entropy as ce
from refusion_jax.model.cross_entropy import linear_cross_entropy

B, T, D, V = 8, 12, 16, 100


def plain(x, head, labels, is_labelled):
    """The definition, with all logits."""
    logits = jnp.einsum("btd,vd->btv", x, head)
    label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.where(is_labelled, jax.nn.logsumexp(logits, axis=-1) - label_logits, 0)


def inputs(share: float = 0.6):
    keys = jax.random.split(jax.random.key(0), 4)
    x, head = jax.random.normal(keys[0], (B, T, D)), jax.random.normal(keys[1], (V, D))
    return x, head, jax.random.randint(keys[2], (B, T), 0, V), jax.random.uniform(keys[3], (B, T)) < share


@functools.partial(jax.jit, static_argnums=0)
def value_and_grads(function, x, head, labels, is_labelled):
    weight = jnp.linspace(0.5, 2, B * T).reshape(B, T)  # so that every token's gradient counts differently
    return jax.value_and_grad(lambda x, head: jnp.sum(weight * function(x, head, labels, is_labelled)), (0, 1))(x, head)


def assert_equal(got, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * np.abs(b).max()), got, expected)


@pytest.fixture(autouse=True, scope="module")
def _small_blocks():
    """Several blocks and chunks, the last of each with filler."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ce, "BLOCK", 17)
        patched.setattr(ce, "CHUNK", 30)
        yield


@pytest.mark.parametrize("share", [0.6, 0.0, 1.0], ids=["some labels", "no labels", "all labels"])
def test_chunks_are_the_definition(share):
    args = inputs(share)
    np.testing.assert_allclose(linear_cross_entropy(*args), plain(*args), rtol=1e-5, atol=1e-5)
    assert_equal(value_and_grads(linear_cross_entropy, *args), value_and_grads(plain, *args))


def test_large_logits_of_tokens_without_a_label_are_no_part_of_the_gradient():
    """exp of a logit above 88 is infinite in float32, and times zero it is no number."""
    x, head, labels, is_labelled = inputs()
    args = x, 30 * head, labels, is_labelled
    assert jnp.max(jnp.where(is_labelled, -jnp.inf, jnp.max(x @ (30 * head).T, axis=-1))) > 88
    assert_equal(value_and_grads(linear_cross_entropy, *args), value_and_grads(plain, *args))


@pytest.mark.parametrize(
    "mesh", [{"data": 8}, {"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "tensor": 2, "sequence": 2}]
)
def test_a_mesh_changes_nothing(mesh):
    expected = value_and_grads(plain, *inputs())
    mesh = sharding.make_mesh(mesh)
    with jax.set_mesh(mesh):
        tokens = sharding.sharding(mesh, "batch", "length")
        where = (sharding.sharding(mesh, "batch", "length", None), sharding.sharding(mesh, "vocab", "embed"))
        args = jax.device_put(inputs(), (*where, tokens, tokens))
        assert_equal(value_and_grads(linear_cross_entropy, *args), expected)


def test_no_array_holds_the_logits_of_all_tokens():
    def largest(function):
        program = str(jax.make_jaxpr(functools.partial(value_and_grads, function))(*inputs()))
        return max(math.prod(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", program))

    assert largest(linear_cross_entropy) < B * T * V / 2
    assert largest(plain) == B * T * V


def test_tokens_without_labels_cost_nothing_and_get_no_gradient():
    x, head, labels, is_labelled = inputs()
    poisoned = jnp.where(is_labelled[..., None], x, jnp.nan)
    cross_entropy = linear_cross_entropy(poisoned, head, labels, is_labelled & (jnp.arange(T) < 1)[None])
    assert not np.asarray(cross_entropy)[:, 1:].any()
    _, (dx, _) = value_and_grads(linear_cross_entropy, x, head, labels, is_labelled)
    assert not np.asarray(dx)[~np.asarray(is_labelled)].any()
    assert np.abs(np.asarray(dx)[np.asarray(is_labelled)]).min() > 0


def test_bfloat16_products_are_summed_in_float32():
    x, head, labels, is_labelled = inputs(1.0)
    rough = linear_cross_entropy(x.astype(jnp.bfloat16), head, labels, is_labelled)
    assert rough.dtype == jnp.float32
    exact = plain(
        x.astype(jnp.bfloat16).astype(jnp.float32), head.astype(jnp.bfloat16).astype(jnp.float32), labels, is_labelled
    )
    np.testing.assert_allclose(rough, exact, rtol=1e-5, atol=1e-5)

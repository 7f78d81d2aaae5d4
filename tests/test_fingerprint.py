"""Answers in a journal belong to one model: another weight, shape, auxiliary model or tokenizer has its own answers."""

import types

import jax
import jax.numpy as jnp
import pytest
from conftest import tiny_model
from flax import nnx

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from refusion_jax.decoding.auxiliary import with_auxiliaries
from refusion_jax.distributed import sharding
from refusion_jax.distributed.sharding import make_mesh
from refusion_jax.evaluation.harness import EvaluatedModel, fingerprint


def altered(model, change):
    """Copies of a model with one weight changed each, with the changed array's path."""
    graphdef, state = nnx.split(model)
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    for number, (path, _) in enumerate(leaves):
        values = [change(x) if at == number else x for at, (_, x) in enumerate(leaves)]
        yield jax.tree_util.keystr(path), nnx.merge(graphdef, jax.tree_util.tree_unflatten(tree, values))


def next_up(x):
    """The last element becomes the next number of its dtype."""
    last = x.ravel()[-1]
    return x.ravel().at[-1].set(last + 1 if x.dtype == jnp.int8 else jnp.nextafter(last, jnp.inf)).reshape(x.shape)


def turned(x):
    """The first element trades its place with the next one that differs."""
    flat = x.ravel()
    other = jnp.argmax(flat != flat[0])
    return flat.at[0].set(flat[other]).at[other].set(flat[0]).reshape(x.shape)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("change", [next_up, turned])
def test_every_weight_counts_to_its_last_bit_and_place(form, change):
    model = tiny_model().rounded("int8") if form == "int8" else tiny_model()
    if form == "bfloat16":
        graphdef, state = nnx.split(model)
        model = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state))
    whole = fingerprint(model)
    changed = 0
    for path, other in altered(model, change):
        arrays = zip(*(jax.tree.leaves(nnx.state(m)) for m in (model, other)), strict=True)
        if any((x != y).any() for x, y in arrays):  # a norm is all ones at first, and turning changes nothing
            changed += 1
            assert fingerprint(other) != whole, path
        else:
            assert fingerprint(other) == whole, path
    assert changed >= 8


def test_it_is_the_same_on_any_devices():
    model = tiny_model()
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4])
    for some in (model, model.rounded("int8")):
        graphdef, state = nnx.split(some)

        def split(x):
            axes = [name if size % 2 == 0 else None for name, size in zip(("embed", "mlp"), x.shape[-2:], strict=False)]
            return jax.device_put(x, sharding.sharding(mesh, *[None] * (x.ndim - len(axes)), *axes))

        placed = nnx.merge(graphdef, jax.tree.map(split, state))
        assert any(not x.is_fully_replicated for x in jax.tree.leaves(nnx.state(placed)))
        assert fingerprint(placed) == fingerprint(some)


def test_auxiliary_models_and_what_the_weights_mean_count():
    model, other = tiny_model(), tiny_model(rope_theta=5e5)
    assert fingerprint(other) != fingerprint(model)
    _, changed = next(altered(model, next_up))
    together = [fingerprint(with_auxiliaries(model, verifier=one)) for one in (model, changed)]
    assert len({*together, fingerprint(model)}) == 3


def test_answers_of_another_tokenizer_are_kept_apart():
    request = Instance("generate_until", {}, ("Add 1 and 2.", {"max_gen_toks": 8}), 0, metadata=("sums", 0, 1))
    keys = set()
    for content in (b"one", b"one", b"another"):
        tokenizer = types.SimpleNamespace(
            files={"tokenizer.json": content}, encode=lambda texts: [[5, 6]], bos_id=-1, thinking=None
        )
        lm = EvaluatedModel(tiny_model(), tokenizer, name="tiny", method="refusion", flags={})
        keys.add(lm.samples([request])[0].key)
    assert len(keys) == 2

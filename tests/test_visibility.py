"""Who sees whom: one definition, and everything that follows from it, in rows folded over chips, too."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MASK, causal
from helpers import drawn_matrix, packed
from jax.sharding import AbstractDevice, AbstractMesh

from refusion_jax.batch import visibility
from refusion_jax.batch.folding import Folded, fold, fold_visibility, unfold
from refusion_jax.batch.rows import noise_keys
from refusion_jax.batch.visibility import BIDIRECTIONAL, CAUSAL, BlockCausal, CausalStreams, Pattern, Visibility
from refusion_jax.distributed import sharding
from refusion_jax.model.attention import attention
from refusion_jax.model.packed_attention import backend_for, packed_attention, triton_attention
from refusion_jax.model.splash import splash_attention
from refusion_jax.systems import block_diffusion, card, idlm, wedlm
from refusion_jax.systems.dense import objective as dense

SEGMENTS = jnp.array([[1, 1, 1, 1, 2, 2, 2, 3, 0, 0], [1, 1, 2, 2, 2, 2, 2, 2, 2, 2]])


@dataclasses.dataclass(frozen=True)
class TwoStreams(Pattern):
    """[x_t; x_0] in blocks, as block diffusion trains."""

    size: int = 2

    def rank_and_group(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        block = (np.arange(length) % (length // 2)) // self.size
        is_clean = np.arange(length) >= length // 2
        return (2 * block + is_clean).astype(np.int32), np.where(is_clean, 0, block + 1).astype(np.int32)


PATTERNS = [CAUSAL, BIDIRECTIONAL, BlockCausal(3), CausalStreams(2), TwoStreams()]


def test_the_first_matrix_of_the_docstring_is_the_mask_of_two_documents():
    drawn = drawn_matrix(visibility.__doc__.partition("The mask of [x_t; x_0]")[0], 5)
    assert Visibility.of(CAUSAL, jnp.array([[1, 1, 2, 2, 2]])).mask()[0].tolist() == drawn


@pytest.mark.parametrize(
    ("module", "pattern", "length"),
    [
        (visibility, TwoStreams(), 8),
        (block_diffusion, block_diffusion.ComplementaryBlocks(2), 12),
        (card, card.SoftTail.pattern, 6),
        (idlm, idlm.AllMasked(MASK, 2, 0.2).pattern, 8),
        (wedlm, wedlm.ReorderedBlocks(MASK, 2).pattern, 8),
    ],
)
def test_the_matrix_of_a_docstring_is_the_mask_of_its_pattern(module, pattern, length):
    assert pattern.dense(length).tolist() == drawn_matrix(module.__doc__, length)


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_a_pattern_says_of_one_document_what_its_visibility_says_of_packed_ones(pattern):
    same = SEGMENTS[:, :, None] == SEGMENTS[:, None]
    seen = Visibility.of(pattern, SEGMENTS)
    np.testing.assert_array_equal(seen.mask(), same & pattern.dense(10)[None])
    np.testing.assert_array_equal(seen.mask(slice(2, 5), slice(1, 7)), seen.mask()[:, 2:5, 1:7])


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("length", [2, 12, 30])
def test_keys_are_counted_and_bounded_as_the_mask_has_them(pattern, length):
    dense = pattern.dense(length)
    assert pattern.keys_seen(length) == pytest.approx(dense.sum(axis=1).mean())
    for begin in range(0, length, 4):
        end = min(begin + 4, length)
        first, last = pattern.key_range(length, begin, end)
        outside = np.delete(dense[begin:end], np.s_[first:last], axis=1)
        assert not outside.any()


@pytest.mark.parametrize("copies", [0.3, 1.0])
def test_keys_of_dense_rows_are_counted_as_their_random_masks_have_them_on_average(copies):
    """FLOPs and MFU are counted by that number. A mask sees what precedes its slot, not all before it in the row."""
    objective = dense.DenseSlots(MASK, (2, 4), 0.5, copies, 1.0)
    rows = jax.tree.map(lambda x: jnp.tile(x, (64, 1)), packed([(0, 40)], 40))
    seen = jax.jit(objective.corrupt)(rows, noise_keys(0, 0, 64)).visibility
    counted = objective.pattern.keys_seen(objective.input_length(40))
    assert counted == pytest.approx(float(seen.mask().sum(axis=2).mean()), rel=0.03)


def test_the_folded_row_of_the_docstring():
    assert fold(jnp.arange(8)[None], 2)[0].tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert CAUSAL.dense(8).sum(axis=1).reshape(2, 4).sum(axis=1).tolist() == [10, 26]
    assert Folded(CAUSAL, 2).dense(8).sum(axis=1).reshape(2, 4).sum(axis=1).tolist() == [18, 18]


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_tokens_see_in_folded_rows_whom_they_see_in_others(pattern):
    rows = jnp.concatenate([SEGMENTS, 3 + SEGMENTS[:, :2]], axis=1)
    seen = Visibility.of(pattern, rows)
    folded = fold_visibility(seen, 3)
    back = np.asarray(unfold(jnp.arange(12)[None], 3)[0])  # where each token of the row stands in the folded one
    np.testing.assert_array_equal(folded.mask()[:, back][:, :, back], seen.mask())
    np.testing.assert_array_equal(Visibility.of(folded.pattern, folded.segment_ids).mask(), folded.mask())


@pytest.mark.parametrize("pattern", [CAUSAL, BIDIRECTIONAL, BlockCausal(4), CausalStreams(8)], ids=repr)
@pytest.mark.parametrize("parts", [2, 4])
def test_every_chip_has_as_many_keys_to_attend_to(pattern, parts):
    of_chips = Folded(pattern, parts).dense(128).reshape(parts, -1).sum(axis=1)
    assert of_chips.tolist() == [128 * pattern.keys_seen(128) / parts] * parts


B, T, N, K, H = 4, 256, 4, 2, 128


def inputs():
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (B, T, N, H))
    k, v = (jax.random.normal(key, (B, T, K, H)) for key in keys[1:3])
    starts = jnp.array([[0, 100, 130], [0, 1, 255], [0, 128, 200], [0, 64, 65]])  # documents, and padding in row 0
    segments = jnp.sum(jnp.arange(T)[None, None] >= starts[:, :, None], axis=1)
    return q, k, v, jnp.where((jnp.arange(T) >= 240)[None] & (jnp.arange(B) == 0)[:, None], 0, segments)


@functools.partial(jax.jit, static_argnums=(0, 1))
def outputs_and_grads(attend, see, q, k, v, segments):
    """Of attend(q, k, v, see(segments)), but for the outputs of padding."""
    weight = jnp.where(segments[..., None, None] > 0, jax.random.normal(jax.random.key(9), q.shape), 0)
    out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, see(segments)), q, k, v)
    return jnp.where(segments[..., None, None] > 0, out, 0), *pull(weight.astype(out.dtype))


def definition(q, k, v, visibility):
    return attention(q, k, v, visibility.mask())


xla, splash = (functools.partial(packed_attention, backend="xla"), functools.partial(splash_attention, interpret=True))


def seeing(pattern: Pattern):
    return functools.partial(Visibility.of, pattern)


def assert_close(got, expected):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


def assert_is_the_definition(attend, see, q, k, v, segments, **mesh: int):
    """Forward and backward; on a mesh, if one is given."""
    expected = outputs_and_grads(definition, see, q, k, v, segments)
    with jax.set_mesh(sharding.make_mesh(mesh)) if mesh else contextlib.nullcontext():
        got = outputs_and_grads(attend, see, q, k, v, segments)
    assert_close(got, expected)


@pytest.mark.parametrize(("rows", "tiles"), [(2, 3), (9, 1)], ids=["all gradients of a row at once", "many rows"])
def test_the_tpu_kernel_is_the_definition_forward_and_backward(rows, tiles):
    def longer(x):
        return jnp.concatenate([x, x, x])[:rows, np.arange(128 * tiles) % T]

    q, k, v, segments = map(longer, inputs())
    segments = jnp.where(segments > 0, segments + 4 * (jnp.arange(128 * tiles) // T)[None], 0)
    assert_is_the_definition(splash, causal, q, k, v, segments)


def test_the_tpu_kernel_split_over_rows_heads_and_tokens_is_the_definition():
    assert_is_the_definition(splash, causal, *inputs(), fsdp=2, tensor=2, sequence=2)


@pytest.mark.parametrize("pattern", [pytest.param(CAUSAL, marks=pytest.mark.slow), TwoStreams(32)], ids=repr)
def test_the_tpu_kernel_follows_folded_rows(pattern):
    """Two chips a row, of which each has a part from its beginning and one from its end."""

    def folded(q, k, v, visibility):
        q, k, v = (fold(x, 2) for x in (q, k, v))
        return unfold(splash(q, k, v, fold_visibility(visibility, 2)), 2)

    assert_is_the_definition(folded, seeing(pattern), *inputs(), fsdp=4, sequence=2)


@pytest.mark.parametrize("pattern", [CAUSAL, BIDIRECTIONAL], ids=repr)
def test_the_tpu_kernel_does_not_touch_tiles_without_a_common_document(pattern):
    """Rows of three tiles: the first document of each is nothing but NaN, which one product with it would spread."""
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 384, heads, H)) for key, heads in zip(keys, (2, 1, 1), strict=True))
    second = (jnp.arange(384)[None] >= jnp.array([[128], [256]]))[..., None, None]
    segments = 1 + second[..., 0, 0].astype(jnp.int32)

    def of_second(first: float, attend):
        fed = (jnp.where(second, x, first) for x in (q, k, v))
        return [jnp.where(second, x, 0) for x in outputs_and_grads(attend, seeing(pattern), *fed, segments)]

    assert_close(of_second(jnp.nan, splash), of_second(0, definition))


@dataclasses.dataclass(frozen=True)
class ByChance(Pattern):
    """Ranks and groups without any order."""

    def rank_and_group(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(length)
        return rng.integers(0, 9, length).astype(np.int32), rng.integers(0, 3, length).astype(np.int32)


@pytest.mark.parametrize("attend", [splash, xla], ids=["splash", "xla"])
@pytest.mark.parametrize("pattern", [BIDIRECTIONAL, TwoStreams(32)], ids=repr)  # causal: above, below
def test_both_kernels_follow_any_pattern_forward_and_backward(pattern, attend):
    assert_is_the_definition(attend, seeing(pattern), *inputs())


@pytest.mark.parametrize("backend", ["xla", "splash"])
def test_visibility_without_a_pattern_is_the_definition_and_never_a_whole_square(backend):
    def see(segments):
        return dataclasses.replace(Visibility.of(ByChance(), segments), pattern=None)

    attend = functools.partial(packed_attention, backend=backend)
    assert_is_the_definition(attend, see, *inputs())
    longer = [jnp.concatenate([x, x[:, :128]], axis=1) for x in inputs()]
    assert "384,384]" not in str(jax.make_jaxpr(functools.partial(outputs_and_grads, attend, see))(*longer))


@pytest.mark.parametrize("length", [100, 200])
def test_blocks_of_queries_are_the_definition_forward_and_backward(length):
    assert_is_the_definition(xla, causal, *(x[:, :length] for x in inputs()))


@pytest.mark.parametrize(
    ("pattern", "backward_tile"),
    [(CAUSAL, None), (CAUSAL, 128), pytest.param(BIDIRECTIONAL, None, marks=pytest.mark.slow)],
    ids=repr,
)
def test_the_gpu_kernel_is_the_definition_forward_and_backward(pattern, backward_tile):
    """Emulated; two query heads of one key head, and documents that begin and end inside of tiles."""
    q, k, v, segments = inputs()
    kernel = functools.partial(triton_attention, backward_tile=backward_tile, interpret=True)
    fed = q[:1, :, :2, :16], k[:1, :, :1, :16], v[:1, :, :1, :16]
    assert_is_the_definition(kernel, seeing(pattern), *fed, segments[:1])


def test_a_gpu_never_holds_a_whole_square():
    """The program as it is lowered for CUDA, which needs no GPU."""
    q, k, v, segments = inputs()
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    gpu = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu"))
    for backend, holds in (("triton", False), ("xla", True)):
        attend = functools.partial(packed_attention, backend=backend)
        with jax.sharding.use_abstract_mesh(gpu):
            traced = outputs_and_grads.trace(attend, causal, q, k, v, segments)
            lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert ("256x256x" in lowered or "128x256x" in lowered) == holds


def test_every_platform_gets_a_kernel_that_can_do_its_sizes():
    assert backend_for("tpu", 4096, 128, "bfloat16") == "splash"
    assert backend_for("tpu", 64, 128, "bfloat16") == "xla"  # shorter than the smallest tile
    assert backend_for("gpu", 4096, 128, "bfloat16") == "triton"
    assert backend_for("gpu", 4000, 128, "bfloat16") == "xla"  # no whole tiles
    assert backend_for("gpu", 4096, 128, "float32") == "xla"
    assert backend_for("gpu", 4096, 256, "bfloat16") == "xla"
    assert backend_for("cpu", 4096, 128, "bfloat16") == "xla"

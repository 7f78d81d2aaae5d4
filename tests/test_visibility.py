"""Who sees whom: one definition, and everything that follows from it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MASK
from helpers import drawn_matrix

from refusion_jax.batch import visibility
from refusion_jax.batch.visibility import BIDIRECTIONAL, CAUSAL, BlockCausal, CausalStreams, Pattern, Visibility
from refusion_jax.systems import block_diffusion, card, idlm, wedlm

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


def drawn_matrices() -> list[list[list[bool]]]:
    """The matrices of 1 and . in the module's docstring."""
    matrices, rows = [], []
    for line in [*visibility.__doc__.splitlines(), ""]:
        cells = line[28:].split() if len(line) > 28 else []
        if cells and set(cells) <= {"1", "."}:
            rows.append([cell == "1" for cell in cells])
        elif rows:
            matrices.append(rows)
            rows = []
    return matrices


def test_the_matrices_of_the_docstring_are_what_the_definition_gives():
    packed_causal, two_streams = drawn_matrices()
    assert Visibility.of(CAUSAL, jnp.array([[1, 1, 2, 2, 2]])).mask()[0].tolist() == packed_causal
    assert TwoStreams().dense(8).tolist() == two_streams


@pytest.mark.parametrize(
    ("system", "pattern", "length"),
    [
        (block_diffusion, block_diffusion.ComplementaryBlocks(2), 12),
        (card, card.SoftTail.pattern, 6),
        (idlm, idlm.AllMasked(MASK, 2, 0.2).pattern, 8),
        (wedlm, wedlm.ReorderedBlocks(MASK, 2).pattern, 8),
    ],
)
def test_the_matrix_of_a_systems_docstring_is_its_mask(system, pattern, length):
    assert pattern.dense(length).tolist() == drawn_matrix(system.__doc__, length)


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

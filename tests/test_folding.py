"""Rows that are split over chips: the order in which every chip has as many keys to attend to."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_visibility import PATTERNS, SEGMENTS

from refusion_jax.batch.folding import Folded, fold, fold_visibility, unfold
from refusion_jax.batch.visibility import BIDIRECTIONAL, CAUSAL, BlockCausal, CausalStreams, Visibility


def test_the_example_of_the_docstring():
    assert fold(jnp.arange(8)[None], 2)[0].tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert CAUSAL.dense(8).sum(axis=1).reshape(2, 4).sum(axis=1).tolist() == [10, 26]
    assert Folded(CAUSAL, 2).dense(8).sum(axis=1).reshape(2, 4).sum(axis=1).tolist() == [18, 18]


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_unfolded_a_folded_row_is_what_it_was(parts):
    x = jnp.arange(2 * 12 * 5).reshape(2, 12, 5)
    np.testing.assert_array_equal(unfold(fold(x, parts), parts), x)


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

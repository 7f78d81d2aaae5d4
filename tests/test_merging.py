"""Merged masks: which are fed, and that nothing changes where nothing is merged."""

import jax
import jax.numpy as jnp
import numpy as np
from conftest import BOS, PROMPTS, settings, sharp_models, tiny_config

from refusion_jax import decode
from refusion_jax.decoding.requests import Request, prepare
from refusion_jax.systems.api import decoder_for
from refusion_jax.systems.llada import fed_places
from refusion_jax.systems.masked import MaskedText


def fed(requests: list[Request], block_length: int, block: int, merge: int) -> list[str]:
    """The fed tokens of each row in a block: a letter for each place of the text."""
    s = settings("llada", new=7, block_length=block_length, merge=merge)
    requests = prepare(requests, s, tiny_config())
    decoder = decoder_for(requests, tiny_config())
    layout = jax.tree.map(jnp.asarray, decoder.lay_out(requests))
    keys = jax.random.split(jax.random.key(0), len(requests))
    state = MaskedText.start_text(layout, keys, decoder.new_tokens, decoder.ids.mask_id)
    is_fed = np.asarray(fed_places(state, jnp.full(len(requests), (block + 1) * block_length), merge))
    return ["".join(".x"[int(own[i])] for i in range(int(n))) for own, n in zip(is_fed, state.length, strict=True)]


def test_the_places_of_the_docstring():
    assert fed([[5, 6, 7]], 2, 0, 3) == ["xxxxx.x.x."]
    assert fed([[5, 6, 7]], 2, 1, 3) == ["xxxxxxx.x."]
    assert fed([[5, 6, 7]], 2, 3, 3) == ["x" * 10]


def test_masks_of_several_gaps_are_counted_through_and_what_is_given_is_fed():
    assert fed([Request([BOS], (4, [7, 8], 5))], 2, 0, 2) == ["xxx" + "x." + "xx" + "x.x.x"]


def test_one_mask_for_each_is_decoding_as_it_was_and_more_is_close_to_it():
    model = sharp_models()[0]
    plain = decode(model, PROMPTS, settings("llada", block_length=4))
    assert decode(model, PROMPTS, settings("llada", block_length=4, merge=1)) == plain
    assert decode(model, PROMPTS, settings("llada", block_length=16, merge=9)) == decode(
        model, PROMPTS, settings("llada")
    )  # nothing lies after a block that is all

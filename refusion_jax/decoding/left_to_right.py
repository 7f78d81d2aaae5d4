"""One token a forward, in text order: `sequential` for slot models, `ar` for left-to-right models.

`sequential` decodes a ReFusion model slot by slot: a slot's first token comes from a mask token at its place, each
further one from the token before it. It is the baseline for speed, and the check for the cache. A forward feeds the
last token, whose keys and values are still to be committed, and at the start of a slot a mask token behind it.

`ar` feeds the last token and reads the next from it.

Axes: B rows, P prompt length, G new tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp

from refusion_jax.decoding import cache as kv
from refusion_jax.decoding.sampling import Record, mask_logits, sample
from refusion_jax.decoding.settings import Dials, Static
from refusion_jax.model.transformer import Transformer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """All that the loop carries."""

    cache: kv.Cache
    record: Record
    last: jax.Array  # [B] int32, the last token, not in the cache yet
    done: jax.Array  # [B] bool
    forwards: jax.Array  # [B] int32


def decode(
    model: Transformer,
    prompts: jax.Array,
    lengths: jax.Array,
    active: jax.Array,
    keys: jax.Array,
    dials: Dials,
    static: Static,
) -> State:
    """Decodes a batch; the arguments are those of `refusion.decode`."""
    B, P = prompts.shape
    G = static.new_tokens
    in_cache = lengths - (static.method == "ar")  # ar feeds the last prompt token to read the first new one
    start = State(
        cache=kv.prefill(model, prompts, in_cache, P + G + 2),
        record=Record.empty(B, G + 1),
        last=jnp.take_along_axis(prompts, lengths[:, None] - 1, axis=1)[:, 0],
        done=~active,
        forwards=jnp.zeros((B,), jnp.int32),
    )
    return jax.lax.while_loop(lambda s: ~jnp.all(s.done), lambda s: step(model, s, lengths, keys, dials, static), start)


def step(model: Transformer, s: State, prompt_lengths, keys, dials: Dials, static: Static) -> State:
    """One forward, one token a row."""
    offset = s.record.count  # of the token to decode
    has_slots = static.method == "sequential"
    from_mask = has_slots & (offset % static.slot_size == 0)
    last_is_new = (offset > 0) | (not has_slots)  # else it is the prompt's, and in the cache already

    tokens = jnp.stack([s.last, jnp.full_like(s.last, static.mask_id)], axis=1)
    positions = (prompt_lengths + offset)[:, None] + jnp.array([[-1, 0]])
    sees_last = last_is_new[:, None, None] & jnp.array([[[True, False], [True, False]]])
    visible = sees_last | jnp.array([[[False, False], [False, True]]])
    logits, cache = kv.extend(model, s.cache, tokens, positions, visible)

    _, choosable = mask_logits(jnp.where(from_mask[:, None], logits[:, 1], logits[:, 0])[:, None], static)
    token = sample(choosable, jax.vmap(jax.random.fold_in)(keys, s.forwards), dials.temperature)[:, 0]
    count = 1 - s.done.astype(jnp.int32)
    return State(
        cache=kv.commit(cache, jnp.where(last_is_new, count, 0)),
        record=s.record.append(token[:, None], offset[:, None], count),
        last=jnp.where(s.done, s.last, token),
        done=s.done | (token == static.eos_id) | (offset + 1 == static.new_tokens),
        forwards=s.forwards + count,
    )

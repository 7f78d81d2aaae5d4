"""One token a forward, in text order: `sequential` for slot models, `ar` for left-to-right models.

`sequential` decodes a ReFusion model slot by slot: a slot's first token comes from a mask token at its place, each
further one from the token before it. It is the baseline for speed, and the check for the cache. A forward feeds the
last token, whose keys and values are still to be committed, and at the start of a slot a mask token behind it.

`ar` feeds the last token and reads the next from it.

Axes: B rows, C cache entries, K slot size.
"""

import dataclasses

import jax
import jax.numpy as jnp

from refusion_jax.decoding import cache as kv
from refusion_jax.decoding.requests import Canvas
from refusion_jax.decoding.sampling import Record, mask_logits, sample
from refusion_jax.decoding.settings import Dials, Static
from refusion_jax.model.transformer import Transformer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """All that the loop carries."""

    cache: kv.Cache
    record: Record
    canvas: Canvas
    keys: jax.Array  # [B] PRNG keys
    dials: Dials
    last: jax.Array  # [B] int32, the last token, not in the cache yet unless it was given
    slot: jax.Array  # [B] int32, the slot that the next token belongs to
    offset: jax.Array  # [B] int32, its place in the slot
    done: jax.Array  # [B] bool
    forwards: jax.Array  # [B] int32

    @property
    def rounds(self) -> jax.Array:
        """[B] int32; every forward plans one token."""
        return self.forwards


def begin(cache: kv.Cache, canvas: Canvas, given: jax.Array, keys: jax.Array, dials: Dials, static: Static) -> State:
    """Rows about to decode their first token; the arguments are those of `refusion.begin`."""
    zeros = jnp.zeros_like(cache.length)
    return State(
        # ar feeds the last given token to read the first new one
        cache=kv.commit(cache, zeros - 1) if static.method == "ar" else cache,
        record=Record.empty(len(zeros), static.slots * static.slot_size + static.widths[-1]),
        canvas=canvas,
        keys=keys,
        dials=dials,
        last=jnp.take_along_axis(given, cache.length[:, None] - 1, axis=1)[:, 0],
        slot=zeros,
        offset=zeros,
        done=zeros > 0,
        forwards=zeros,
    )


def stop(s: State) -> State:
    """The same rows, done."""
    return dataclasses.replace(s, done=jnp.ones_like(s.done))


def step(model: Transformer, s: State, static: Static) -> State:
    """One forward, one token a row."""
    start, size, may_end = (
        jnp.take_along_axis(x, s.slot[:, None], axis=1)[:, 0] for x in (s.canvas.start, s.canvas.size, s.canvas.may_end)
    )
    has_slots = static.method == "sequential"
    from_mask = has_slots & (s.offset == 0)
    last_is_new = (s.record.count > 0) | (not has_slots)  # else it was given, and is in the cache already
    behind = jnp.maximum(s.record.count - 1, 0)[:, None]
    last_position = jnp.take_along_axis(s.record.positions, behind, axis=1)[:, 0]
    place = start + s.offset

    tokens = jnp.stack([s.last, jnp.full_like(s.last, static.mask_id)], axis=1)
    positions = jnp.stack([jnp.where(s.record.count > 0, last_position, place - 1), place], axis=1)
    sees_last = last_is_new[:, None, None] & jnp.array([[[True, False], [True, False]]])
    visible = sees_last | jnp.array([[[False, False], [False, True]]])
    logits, cache = kv.extend(model, s.cache, tokens, positions, visible)

    chosen = jnp.where(from_mask[:, None], logits[:, 1], logits[:, 0])[:, None]  # [B, 1, V]
    _, choosable = mask_logits(chosen, may_end[:, None], static)
    own = jax.tree.map(lambda x: x[:, None], (jnp.ones_like(may_end), s.keys, place, s.dials))
    token = sample(choosable, *own)[:, 0]
    count = 1 - s.done.astype(jnp.int32)
    offset = s.offset + count
    slot = s.slot + (offset == size)
    sizes = jnp.take_along_axis(s.canvas.size, jnp.minimum(slot, static.slots - 1)[:, None], axis=1)[:, 0]
    is_last = (slot == static.slots) | (sizes == 0)
    return dataclasses.replace(
        s,
        cache=kv.commit(cache, jnp.where(last_is_new, count, 0)),
        record=s.record.append(token[:, None], place[:, None], count),
        last=jnp.where(s.done, s.last, token),
        slot=jnp.where(is_last, s.slot, slot),
        offset=jnp.where(offset == size, 0, offset),
        done=s.done | (token == static.eos_id) | is_last,
        forwards=s.forwards + count,
    )

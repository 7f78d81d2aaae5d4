"""Plan and infill (ReFusion, arXiv 2512.13586, section 3.3): one forward, four phases.

Each row of a batch is in a phase of its own, which decides what it feeds and what it makes of the logits, so no row
ever waits for another. Parts in brackets are fed ahead of time (`overlap_planning`, `overlap_infilling`): if all
drafts are committed the next plan is there already, and if drafts fail where guessed so is the next draft. What they
see is just what they would have seen in a forward of their own, so the text is the same and only forwards are saved.

    phase     drafts                  plan                 guesses
    plan                              remaining slots                           chooses the confident slots
    verify    chosen slots            (slots after them)   (a lone slot's rest)   commits the accepted whole slots
    propose   their accepted runs                          the rest of each      drafts the rest anew
    check     chosen slots, alone     (slots after them)   (the rest of each)    commits once all are accepted

Axes: B rows, M slots of a block, K slot size, W width of a forward.
"""

import dataclasses

import jax
import jax.numpy as jnp

from refusion_jax.decoding import cache as kv
from refusion_jax.decoding.requests import Canvas
from refusion_jax.decoding.sampling import Record, mask_logits, probability, sample
from refusion_jax.decoding.settings import Dials, Static
from refusion_jax.model.ragged import Ragged
from refusion_jax.model.transformer import Transformer
from refusion_jax.runtime.sharding import ways_here
from refusion_jax.systems.refusion.feeding import Block, Parts, Strip, block_of, build_strip
from refusion_jax.systems.refusion.phases import (
    CHECK,
    DONE,
    PLAN,
    PROPOSE,
    VERIFY,
    Reading,
    Work,
    follow,
    judge,
    select,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """All that the loop carries."""

    cache: kv.Cache
    record: Record
    canvas: Canvas
    keys: jax.Array  # [B] PRNG keys
    dials: Dials
    work: Work
    block: jax.Array  # [B] int32, the serial block being decoded
    remaining: jax.Array  # [B, M] bool, its slots that are still masked
    ended: jax.Array  # [B] bool, an EOS was committed: no further block
    forwards: jax.Array  # [B] int32
    rounds: jax.Array  # [B] int32, plans followed

    @property
    def done(self) -> jax.Array:
        """[B] bool."""
        return self.work.phase == DONE


def begin(cache: kv.Cache, canvas: Canvas, given: jax.Array, keys: jax.Array, dials: Dials, static: Static) -> State:
    """Rows about to make their first plan.

    Args:
      cache: with what is given already committed.
      canvas: where the slots are.
      given: [B, C] int32 tokens; not needed here.
      keys: [B] PRNG keys.
      dials: settings of the rows.
      static: sizes.
    """
    B, M, K = canvas.size.shape[0], static.block_slots, static.slot_size
    zeros = jnp.zeros((B,), jnp.int32)
    slots = jnp.zeros((B, M), jnp.int32)
    return State(
        cache=cache,
        record=Record.empty(B, static.slots * K + static.widths[-1]),
        canvas=canvas,
        keys=keys,
        dials=dials,
        work=Work(zeros + PLAN, slots > 0, jnp.zeros((B, M, K), jnp.int32), slots, slots),
        block=zeros,
        remaining=block_of(canvas, zeros, static).size > 0,
        ended=zeros > 0,
        forwards=zeros,
        rounds=zeros,
    )


def stop(s: State) -> State:
    """The same rows, done."""
    return dataclasses.replace(s, work=dataclasses.replace(s.work, phase=jnp.full_like(s.work.phase, DONE)))


def step(model: Transformer, s: State, static: Static) -> State:
    """One forward, and what each row makes of it."""
    here = block_of(s.canvas, s.block, static)
    parts = choose_parts(s, here, static)
    strip = build_strip(parts, here, s.work.drafts, static)
    reading, cache = forward(model, s, strip, static)

    work, committed = judge(s.work, here, parts, reading, s.dials, static)
    after = dataclasses.replace(s, cache=cache, work=work)
    after = settle(after, s.work.drafts, committed, strip, static)

    # The plan is ready if it was fed, and everything in front of it was committed.
    is_valid = jnp.sum(committed, axis=(1, 2)) == jnp.sum(parts.drafted, axis=1)
    ready = jnp.any(parts.planned, axis=1) & is_valid & ~after.done
    return dataclasses.replace(
        after,
        work=select(ready, follow(after.remaining, parts.plan_block, reading, s.dials), after.work),
        forwards=s.forwards + ~s.done,
        rounds=s.rounds + ready,
    )


def choose_parts(s: State, here: Block, static: Static) -> Parts:
    """What each row feeds: what its phase needs, and ahead of time what is likely to come next."""
    work = s.work
    phase = work.phase[:, None]
    plans, verifies, proposes, checks = (phase == p for p in (PLAN, VERIFY, PROPOSE, CHECK))
    chosen = work.chosen & (verifies | proposes | checks)
    drafted = jnp.where(chosen, jnp.where(proposes, work.accepted, here.size), 0)

    rest = s.remaining & ~chosen
    is_last = ~jnp.any(rest, axis=1)  # of its block: if all is accepted, the next block is planned
    following = block_of(s.canvas, s.block + 1, static)
    plan_block = select(is_last, following, here)
    ahead = s.dials.overlap_planning[:, None] & (verifies | checks)
    ahead_here, ahead_there = ahead & rest, ahead & (following.size > 0) & ~s.ended[:, None]
    planned = jnp.where(plans, s.remaining, jnp.where(is_last[:, None], ahead_there, ahead_here))

    # Guesses take what room the rest leaves. Only a slot that is verified without others sees what it would see alone.
    is_lone = jnp.sum(chosen, axis=1, keepdims=True) == 1
    length = jnp.where(chosen & (checks | (verifies & is_lone)), here.size - work.guess, 0)
    needed = jnp.sum(drafted, axis=1) + jnp.sum(jnp.where(planned, plan_block.size, 0), axis=1)
    room = s.canvas.widest - needed
    fits = (length > 0) & (jnp.cumsum(length, axis=1) <= room[:, None])
    return Parts(
        drafted=drafted,
        planned=planned,
        plan_block=plan_block,
        guessed=jnp.where(proposes, chosen, s.dials.overlap_infilling[:, None] & fits),
        cut=jnp.where(proposes, work.accepted, work.guess),
        alone=(proposes | checks)[:, 0],
    )


def forward(model: Transformer, s: State, strip: Strip, static: Static) -> tuple[Reading, kv.Cache]:
    """Runs the strip through the model, in the least shape that holds every row's."""
    B, shards = len(strip.length), ways_here("batch")
    keys, dials = jax.tree.map(
        lambda x: jnp.broadcast_to(x[:, None], strip.tokens.shape),
        (jax.vmap(jax.random.fold_in)(s.keys, s.rounds), s.dials),
    )

    def in_shape(width: int, size: int):
        W = static.widths[-1]
        ragged = Ragged.of(strip.length, width, size, shards)

        def pack(x):
            return ragged.pack(x[:, :width])

        def run():
            tokens, positions = strip.tokens[:, :width], strip.positions[:, :width]
            visible = strip.visible[:, :width, :width]
            logits, new = model.extend(tokens, positions, s.cache.entries, s.cache.length, visible, ragged)
            real, choosable = mask_logits(logits, pack(strip.may_end), static)
            own = jax.tree.map(pack, (strip.is_plan, keys, strip.positions, dials))
            chosen = sample(choosable, *own)
            weighed = jnp.where(pack(strip.is_draft), pack(jnp.roll(strip.tokens, -1, axis=1)), chosen)
            widen = lambda x, axis: jnp.pad(x, [(0, (W - width) * (i == axis)) for i in range(x.ndim)])  # noqa: E731
            chosen, chance = (widen(ragged.spread(x), 1) for x in (chosen, probability(real, weighed)))
            return chosen, chance, jax.tree.map(lambda x: widen(x, 2), new)

        return run

    shapes = shapes_of(B // shards, static)
    total = jnp.max(jnp.sum(strip.length.reshape(shards, -1), axis=1))
    holds = jnp.array([(jnp.max(strip.length) <= width) & (total <= size) for width, size in shapes])
    chosen, chance, new = jax.lax.switch(jnp.argmax(holds), [in_shape(*shape) for shape in shapes])
    _, plan, guesses = strip.to_grid(chosen, s.work.drafts)
    drafts_chance, plan_chance, guesses_chance = strip.to_grid(chance, s.work.drafts)
    trusted = jnp.roll(drafts_chance, 1, axis=2) > s.dials.token_threshold[:, None, None]
    return Reading(trusted, plan, plan_chance, guesses, guesses_chance), kv.write(s.cache, new)


def settle(s: State, drafts: jax.Array, committed: jax.Array, strip: Strip, static: Static) -> State:
    """Commits these drafts [B, M, K]; moves rows whose block is finished to the next, or ends them.

    A committed EOS (it is then the last token committed) drops the slots behind it and stops further blocks; slots of
    the block that lie before it go on being decoded.
    """
    slot = jnp.arange(drafts.shape[1])[None]
    count = jnp.sum(committed, axis=(1, 2), dtype=jnp.int32)
    is_in = jnp.any(committed, axis=2)
    eos = jnp.any(committed & (drafts == static.eos_id), axis=(1, 2))
    last = jnp.max(jnp.where(is_in, slot, -1), axis=1)
    remaining = s.remaining & ~is_in & ~(eos[:, None] & (slot > last[:, None]))
    ended = s.ended | eos

    finished = ~s.done & ~jnp.any(remaining, axis=1)
    following = block_of(s.canvas, s.block + 1, static).size > 0
    over = finished & (ended | ~jnp.any(following, axis=1))
    onward = finished & ~over
    return dataclasses.replace(
        s,
        cache=kv.commit(s.cache, count),
        record=s.record.append(strip.tokens, strip.positions, count),
        work=dataclasses.replace(s.work, phase=jnp.where(over, DONE, s.work.phase)),
        block=s.block + onward,
        remaining=select(onward, following, remaining),
        ended=ended,
    )


def shapes_of(rows: int, static: Static) -> list[tuple[int, int]]:
    """(tokens of a row, tokens of a shard's rows together) at most, of each forward that is compiled; least first.

    Rows are seldom wide all at once, so that most forwards need a half or a quarter of their places (0.2 to 0.5 were
    real in the authors' cases and in random models, at 8 rows). Compiled for eight v5e chips, an 8B model's forward of
    32 x 128 places is estimated at 77 ms, and where a half or a quarter of them is real at 46 and 31.
    """
    *narrow, widest = static.widths
    parts = [(width, 2) for width in narrow] + [(widest, part) for part in (4, 2, 1)]
    return sorted({(width, max(rows * width // part, width)) for width, part in parts}, key=lambda shape: shape[::-1])

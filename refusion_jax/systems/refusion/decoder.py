"""Plan and infill (ReFusion, arXiv 2512.13586, section 3.3): one forward, five phases.

Each row of a batch is in a phase of its own, which decides what it feeds and what it makes of the logits, so no row
ever waits for another. Parts in brackets are fed ahead of time (`overlap_planning`, `overlap_infilling`): if all
drafts are committed the next plan is there already, and if drafts fail where guessed so is the next draft. What they
see is just what they would have seen in a forward of their own, so the text is the same and only forwards are saved.

    phase      drafts                  plan                 guesses
    plan                               remaining slots                             chooses the confident slots
    verify     chosen slots            (slots after them)   (a lone slot's rest)   commits the accepted whole slots
    propose    their accepted runs                          the rest of each       drafts the rest anew
    check      chosen slots, alone     (slots after them)   (the rest of each)     commits once all are accepted
    recompute  chosen slots            (slots after them)                          commits them all (`recompute`)

With `infill=exact` a row knows plan and verify alone: it verifies until all chosen slots are committed, each time with
the model's own next tokens where its drafts were others (`phases.repair`).

Axes: B rows, M slots of a block, K slot size, W width of a forward.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Key

from refusion_jax.decoding import cache as kv
from refusion_jax.decoding.requests import Given, Request, prefill_chunk, text_capacity
from refusion_jax.decoding.sampling import Record, mask_logits, probability, sample
from refusion_jax.decoding.settings import TokenIds
from refusion_jax.model.ragged import Ragged
from refusion_jax.model.transformer import ModelConfig, Transformer
from refusion_jax.runtime.sharding import shard_count_here
from refusion_jax.systems.refusion.canvas import (
    EXACT,
    Canvas,
    RowSettings,
    SlotSettings,
    slots_a_block,
    slots_of,
    tokens_a_forward,
)
from refusion_jax.systems.refusion.feeding import Block, FeedPlan, PackedFeed, block_of, pack_feed
from refusion_jax.systems.refusion.phases import (
    CHECK,
    DONE,
    PLAN,
    PROPOSE,
    RECOMPUTE,
    VERIFY,
    Reading,
    Work,
    blend,
    follow,
    judge,
    select,
)

_WIDTHS = 3  # forwards of so many widths are compiled, each half as wide as the next


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layout:
    """Requests on their way to the device."""

    given: Given
    canvas: Canvas
    settings: RowSettings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """All that the loop carries."""

    cache: kv.Cache
    record: Record
    canvas: Canvas
    keys: Key[Array, "B"]
    settings: RowSettings
    work: Work
    block: Int32[Array, "B"]  # the serial block being decoded
    remaining: Bool[Array, "B M"]  # its slots that are still masked
    ended: Bool[Array, "B"]  # an EOS was committed: no further block
    forwards: Int32[Array, "B"]
    rounds: Int32[Array, "B"]  # plans followed

    @property
    def active(self) -> Bool[Array, "B"]:
        """Rows that are not done."""
        return self.work.phase != DONE


@dataclasses.dataclass(frozen=True)
class PlanAndInfill:
    """The decoder, with the sizes that are compiled in."""

    settings: ClassVar[type[SlotSettings]] = SlotSettings

    ids: TokenIds
    slot_size: int  # K
    slots: int  # of a row, at most
    block_slots: int  # M, of a serial block, at most
    widths: tuple[int, ...]  # tokens a row that one forward may feed, rising; each forward takes the least that serves
    cache_length: int
    chunk: int  # given tokens that one forward of the prefill takes

    @property
    def width(self) -> int:
        """W, tokens a row that the widest forward feeds."""
        return self.widths[-1]

    @classmethod
    def for_requests(cls, requests: Sequence[Request], model: ModelConfig) -> Self:
        """The least sizes that serve all of these requests; the cache holds what the widest forward writes, too."""
        K = requests[0].settings.slot_size
        widest = max(map(tokens_a_forward, requests))
        widths = tuple(sorted({max(-(-widest >> i), K) for i in range(_WIDTHS)}))
        return cls(
            ids=TokenIds.of(requests[0].settings, model),
            slot_size=K,
            slots=max(len(slots_of(request)[0]) for request in requests),
            block_slots=max(map(slots_a_block, requests)),
            widths=widths,
            cache_length=text_capacity(requests) + widths[-1],
            chunk=prefill_chunk(requests),
        )

    def lay_out(self, requests: Sequence[Request]) -> Layout:
        """Given tokens, slots and settings of some requests."""
        return Layout(
            Given.of(requests, self.cache_length),
            Canvas.of(requests, self.slots),
            RowSettings.of([request.settings for request in requests]),
        )

    def init(self, model: Transformer, layout: Layout, keys: Key[Array, "B"]) -> State:
        """Rows about to make their first plan."""
        canvas = layout.canvas
        B, M, K = canvas.size.shape[0], self.block_slots, self.slot_size
        zeros = jnp.zeros((B,), jnp.int32)
        slots, drafts = jnp.zeros((B, M), jnp.int32), jnp.zeros((B, M, K), jnp.int32)
        return State(
            cache=kv.prefill(model, layout.given, self.chunk),
            record=Record.empty(B, self.slots * K + self.width),
            canvas=canvas,
            keys=keys,
            settings=layout.settings,
            work=Work(zeros + PLAN, slots > 0, drafts, drafts, drafts * 0.0, slots, slots),
            block=zeros,
            remaining=block_of(canvas, zeros, M).size > 0,
            ended=zeros > 0,
            forwards=zeros,
            rounds=zeros,
        )

    def step(self, model: Transformer, state: State) -> State:
        """One forward, and what each row makes of it."""
        return step(model, state, self)


def step(model: Transformer, s: State, decoder: PlanAndInfill) -> State:
    """One forward, and what each row makes of it."""
    here = block_of(s.canvas, s.block, decoder.block_slots)
    plan = plan_feed(s, here, decoder)
    weighed = select(s.settings.infill == EXACT, s.work.planned, s.work.drafts)
    feed = pack_feed(plan, here, s.work.drafts, weighed, decoder.width, decoder.ids.mask_id)
    reading, cache = forward(model, s, feed, decoder)

    work, committed = judge(s.work, here, plan, reading, s.settings, decoder.ids.eos_id)
    after = dataclasses.replace(s, cache=cache, work=work)
    after = settle(after, s.work.drafts, committed, feed, decoder)

    # The plan is ready if it was fed, and everything in front of it was committed.
    is_valid = jnp.sum(committed, axis=(1, 2)) == jnp.sum(plan.drafted, axis=1)
    ready = jnp.any(plan.planned, axis=1) & is_valid & after.active
    return dataclasses.replace(
        after,
        work=select(ready, follow(after.remaining, plan.plan_block, reading, s.settings), after.work),
        forwards=s.forwards + s.active,
        rounds=s.rounds + ready,
    )


def plan_feed(s: State, here: Block, decoder: PlanAndInfill) -> FeedPlan:
    """What each row feeds: what its phase needs, and ahead of time what is likely to come next."""
    work = s.work
    phase = work.phase[:, None]
    plans, verifies, proposes, checks, recomputes = (phase == p for p in (PLAN, VERIFY, PROPOSE, CHECK, RECOMPUTE))
    chosen = work.chosen & (verifies | proposes | checks | recomputes)
    drafted = jnp.where(chosen, jnp.where(proposes, work.accepted, here.size), 0)

    rest = s.remaining & ~chosen
    is_last = ~jnp.any(rest, axis=1)  # of its block: if all is accepted, the next block is planned
    following = block_of(s.canvas, s.block + 1, decoder.block_slots)
    plan_block = select(is_last, following, here)
    ahead = s.settings.overlap_planning[:, None] & (verifies | checks | recomputes)
    ahead_here, ahead_there = ahead & rest, ahead & (following.size > 0) & ~s.ended[:, None]
    planned = jnp.where(plans, s.remaining, jnp.where(is_last[:, None], ahead_there, ahead_here))

    # Guesses take what room the rest leaves. Only a slot that is verified without others sees what it would see alone.
    is_lone = jnp.sum(chosen, axis=1, keepdims=True) == 1
    is_exact = (s.settings.infill == EXACT)[:, None]
    length = jnp.where(chosen & (checks | (verifies & is_lone & ~is_exact)), here.size - work.guess, 0)
    needed = jnp.sum(drafted, axis=1) + jnp.sum(jnp.where(planned, plan_block.size, 0), axis=1)
    room = s.canvas.widest - needed
    fits = (length > 0) & (jnp.cumsum(length, axis=1) <= room[:, None])
    return FeedPlan(
        drafted=drafted,
        planned=planned,
        plan_block=plan_block,
        guessed=jnp.where(proposes, chosen, s.settings.overlap_infilling[:, None] & fits),
        cut=jnp.where(proposes, work.accepted, work.guess),
        alone=(proposes | checks)[:, 0],
    )


def forward(model: Transformer, s: State, feed: PackedFeed, decoder: PlanAndInfill) -> tuple[Reading, kv.Cache]:
    """Runs the feed through the model, in the least shape that holds every row's."""
    B, shards = len(feed.length), shard_count_here("batch")
    fold_in = jax.vmap(jax.random.fold_in)
    keys, planned_keys, settings = jax.tree.map(
        lambda x: jnp.broadcast_to(x[:, None], feed.tokens.shape),
        (fold_in(s.keys, s.rounds), fold_in(s.keys, s.rounds - 1), s.settings),
    )
    # A draft's next token is drawn with the noise that the plan drew it with: so they are most likely the same.
    keys, places = jnp.where(feed.is_draft, planned_keys, keys), feed.positions + feed.is_draft
    drawn = feed.is_plan | (feed.is_draft & (settings.infill == EXACT))

    def in_shape(width: int, size: int):
        W = decoder.width
        ragged = Ragged.of(feed.length, width, size, shards)

        def pack(x):
            return ragged.pack(x[:, :width])

        def run():
            tokens, positions = feed.tokens[:, :width], feed.positions[:, :width]
            visible = feed.visible[:, :width, :width]
            logits, new = model.extend(tokens, positions, s.cache.entries, s.cache.length, visible, ragged)
            real, choosable = mask_logits(logits, pack(feed.may_end), decoder.ids)
            own = jax.tree.map(pack, (drawn, keys, places, settings))
            chosen = sample(choosable, *own)
            weighed = jnp.where(pack(feed.is_draft), pack(feed.weighed), chosen)
            chances = probability(real, weighed), probability(real, chosen)
            widen = lambda x, axis: jnp.pad(x, [(0, (W - width) * (i == axis)) for i in range(x.ndim)])  # noqa: E731
            chosen, *chances = (widen(ragged.spread(x), 1) for x in (chosen, *chances))
            return chosen, *chances, jax.tree.map(lambda x: widen(x, 2), new)

        return run

    shapes = shapes_of(B // shards, decoder.widths)
    total = jnp.max(jnp.sum(feed.length.reshape(shards, -1), axis=1))
    holds = jnp.array([(jnp.max(feed.length) <= width) & (total <= size) for width, size in shapes])
    chosen, chance, chosen_chance, new = jax.lax.switch(jnp.argmax(holds), [in_shape(*shape) for shape in shapes])
    chosen, chance, chosen_chance = (feed.to_grid(x, s.work.drafts) for x in (chosen, chance, chosen_chance))
    (following, plan, guesses), (draft_chance, plan_chance, guesses_chance) = chosen, chance
    draft_chance, following, following_chance = (
        jnp.roll(x, 1, axis=2) for x in (draft_chance, following, chosen_chance[0])
    )
    own = jax.tree.map(lambda x: x[:, None, None], s.settings)
    wanted = blend(s.work, draft_chance, following, following_chance, own)
    trusted = jnp.where(own.infill == EXACT, s.work.drafts == wanted, draft_chance > own.token_threshold)
    return Reading(trusted, wanted, plan, plan_chance, guesses, guesses_chance), kv.write(s.cache, new)


def settle(
    s: State,
    drafts: Int32[Array, "B M K"],
    committed: Bool[Array, "B M K"],
    feed: PackedFeed,
    decoder: PlanAndInfill,
) -> State:
    """Commits these drafts; moves rows whose block is finished to the next, or ends them.

    A committed EOS (it is then the last token committed) drops the slots behind it and stops further blocks; slots of
    the block that lie before it go on being decoded.
    """
    slot = jnp.arange(drafts.shape[1])[None]
    count = jnp.sum(committed, axis=(1, 2), dtype=jnp.int32)
    is_in = jnp.any(committed, axis=2)
    eos = jnp.any(committed & (drafts == decoder.ids.eos_id), axis=(1, 2))
    last = jnp.max(jnp.where(is_in, slot, -1), axis=1)
    remaining = s.remaining & ~is_in & ~(eos[:, None] & (slot > last[:, None]))
    ended = s.ended | eos

    finished = s.active & ~jnp.any(remaining, axis=1)
    following = block_of(s.canvas, s.block + 1, decoder.block_slots).size > 0
    over = finished & (ended | ~jnp.any(following, axis=1))
    onward = finished & ~over
    return dataclasses.replace(
        s,
        cache=kv.commit(s.cache, count),
        record=s.record.append(feed.tokens, feed.positions, count),
        work=dataclasses.replace(s.work, phase=jnp.where(over, DONE, s.work.phase)),
        block=s.block + onward,
        remaining=select(onward, following, remaining),
        ended=ended,
    )


def shapes_of(rows: int, widths: tuple[int, ...]) -> list[tuple[int, int]]:
    """(tokens of a row, tokens of a shard's rows together) at most, of each forward that is compiled; least first.

    Rows are seldom wide all at once, so that most forwards need a half or a quarter of their places (0.2 to 0.5 were
    real in the authors' cases and in random models, at 8 rows). Compiled for eight v5e chips, an 8B model's forward of
    32 x 128 places is estimated at 77 ms, and where a half or a quarter of them is real at 46 and 31.
    """
    *narrow, widest = widths
    parts = [(width, 2) for width in narrow] + [(widest, part) for part in (4, 2, 1)]
    return sorted({(width, max(rows * width // part, width)) for width, part in parts}, key=lambda shape: shape[::-1])

"""Plan and infill (ReFusion, arXiv 2512.13586, section 3.3): every row of a batch in one of five phases.

The phase of a row decides what the row feeds and how it uses the logits, so that no row waits for another. Parts in
brackets are speculative, within the budget (`speculate`): if all drafts are committed, the next plan is already there;
if drafts fail where guessed, the next draft is. These tokens attend to exactly what they would attend to in a forward
of their own, so the text is the same and only forwards are saved.

    phase      drafts                  plan                 guesses
    plan                               remaining slots                             chooses the confident slots
    verify     chosen slots            (slots after them)   (a lone slot's rest)   commits the accepted whole slots
    propose    their accepted runs                          the rest of each       drafts the rest again
    check      chosen slots, alone     (slots after them)   (the rest of each)     commits once all are accepted
    recompute  chosen slots            (slots after them)                          commits them all (`recompute`)

With `infill=exact` there are only the phases plan and verify: a row verifies until all chosen slots are committed, each
time replacing the drafts that differ from the model's own next tokens (`phases.repair`).

Axes: B rows, M slots of a block, K slot size, W width of a forward.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Key

from refusion_jax.decoding import cache as kv
from refusion_jax.decoding import settings as shared
from refusion_jax.decoding.requests import Given, Request, prefill_chunk, text_capacity
from refusion_jax.decoding.sampling import Record
from refusion_jax.decoding.settings import TokenIds
from refusion_jax.distributed.chips import free_tokens
from refusion_jax.distributed.sharding import device_kind_here, shard_count_here
from refusion_jax.model.ragged import Ragged
from refusion_jax.model.transformer import KeyValues, ModelConfig, Transformer
from refusion_jax.systems.refusion.budget import MOST_ODDS, Shape, choose, shapes_of, worthwhile
from refusion_jax.systems.refusion.canvas import Canvas, slots_a_block, slots_of, tokens_a_forward
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
from refusion_jax.systems.refusion.reading import Draws, Hidden, Tokens, read_tokens
from refusion_jax.systems.refusion.settings import EXACT, RowSettings, SlotSettings

_LEAST_PORTION = 16  # places whose logits are computed at once, at least; fewer cost as much on CPU


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layout:
    """Requests as arrays."""

    given: Given
    canvas: Canvas
    settings: shared.RowSettings

    @classmethod
    def of(cls, requests: Sequence[Request], capacity: int, slots: int, settings: type[shared.RowSettings]) -> Self:
        """Some requests, as numpy arrays with room for `capacity` given tokens and for `slots` slots a row."""
        of_rows = settings.of([request.settings for request in requests])
        return cls(Given.of(requests, capacity), Canvas.of(requests, slots), of_rows)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The state of the decoding loop."""

    cache: kv.Cache
    record: Record
    canvas: Canvas
    keys: Key[Array, "B"]
    settings: RowSettings
    work: Work
    block: Int32[Array, "B"]  # the serial block being decoded
    remaining: Bool[Array, "B M"]  # slots of the block that are still masked
    ended: Bool[Array, "B"]  # an EOS was committed: no further blocks
    forwards: Int32[Array, "B"]
    rounds: Int32[Array, "B"]  # plans that were followed
    held: Int32[Array, "B 2"]  # forwards after which a plan behind all drafts holds, and after which it does not

    @property
    def active(self) -> Bool[Array, "B"]:
        """Rows that are not finished."""
        return self.work.phase != DONE


@dataclasses.dataclass(frozen=True)
class PlanAndInfill:
    """The decoder with its compiled sizes."""

    settings: ClassVar[type[SlotSettings]] = SlotSettings

    ids: TokenIds
    slot_size: int  # K
    slots: int  # at most, in a row
    block_slots: int  # M, at most, in a serial block
    width: int  # W, tokens a row that one forward feeds, at most
    budget: int  # tokens up to which a forward of a shard may speculate, if requests set it
    cache_length: int
    chunk: int  # given tokens a forward of the prefill

    @property
    def block(self) -> int:
        """Tokens of a serial block, at most, which one forward may commit."""
        return self.block_slots * self.slot_size

    @classmethod
    def for_requests(cls, requests: Sequence[Request], model: ModelConfig) -> Self:
        """The smallest sizes that serve all of these requests; the cache has room for what a forward writes."""
        K, block_slots = requests[0].settings.slot_size, max(map(slots_a_block, requests))
        return cls(
            ids=TokenIds.of(requests[0].settings, model),
            slot_size=K,
            slots=max(len(slots_of(request)[0]) for request in requests),
            block_slots=block_slots,
            width=max(map(tokens_a_forward, requests)),
            budget=max(request.settings.budget for request in requests),
            cache_length=text_capacity(requests) + block_slots * K,
            chunk=prefill_chunk(requests),
        )

    def lay_out(self, requests: Sequence[Request]) -> Layout:
        """Given tokens, slots and settings of some requests."""
        return Layout.of(requests, self.cache_length, self.slots, RowSettings)

    def init(self, model: Transformer, layout: Layout, keys: Key[Array, "B"]) -> State:
        """The initial state: prompts are prefilled, and the first forward plans."""
        canvas = layout.canvas
        B, M, K = canvas.size.shape[0], self.block_slots, self.slot_size
        zeros = jnp.zeros((B,), jnp.int32)
        slots, drafts = jnp.zeros((B, M), jnp.int32), jnp.zeros((B, M, K), jnp.int32)
        return State(
            cache=kv.prefill(model, layout.given, self.chunk),
            record=Record.empty(B, self.slots * K + self.block),
            canvas=canvas,
            keys=keys,
            settings=layout.settings,
            work=Work(zeros + PLAN, slots > 0, drafts, drafts, drafts * 0.0, slots, slots),
            block=zeros,
            remaining=block_of(canvas, zeros, M).size > 0,
            ended=zeros > 0,
            forwards=zeros,
            rounds=zeros,
            held=jnp.zeros((B, 2), jnp.int32),
        )

    def step(self, model: Transformer, state: State) -> State:
        """One forward of the whole batch, and each row's next state."""
        return step(model, state, self)

    def scored(self, model: Transformer, rows: int) -> int:
        """Places of a shard whose logits exist at once, for a batch of this many rows."""
        return Sizes.of(model, rows, self).portion


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Compiled sizes that depend on the batch and the device."""

    shards: int  # of rows
    shapes: tuple[Shape, ...]  # of a forward
    free: int  # tokens that a forward of a shard can feed in the time that reading the weights takes
    portion: int  # places whose logits are computed at once

    @classmethod
    def of(cls, model: Transformer, rows: int, decoder: PlanAndInfill) -> Self:
        """The sizes for a batch of this many rows, on the mesh of `jax.set_mesh`."""
        shards, itemsize = shard_count_here("batch"), model.operand_dtype.itemsize
        free = free_tokens(model.weight_bytes, device_kind_here(), itemsize)
        most = max(decoder.budget, MOST_ODDS * free)
        shapes = shapes_of(rows // shards, decoder.width, decoder.block, most, decoder.slot_size)
        return cls(shards, shapes, free, min(max(free, _LEAST_PORTION), shapes[-1].places))


def step(model: Transformer, s: State, decoder: PlanAndInfill) -> State:
    """One forward of the whole batch, and each row's next state."""
    sizes = Sizes.of(model, len(s.block), decoder)
    here = block_of(s.canvas, s.block, decoder.block_slots)
    plan, shape = plan_feed(s, here, sizes, decoder)
    weighed = select(s.settings.infill == EXACT, s.work.planned, s.work.drafts)
    feed = pack_feed(plan, here, s.work.drafts, weighed, decoder.width, decoder.ids.mask_id)

    hidden, new = jax.lax.switch(shape, [forward_in(of, model, s, feed, sizes, decoder) for of in sizes.shapes])
    fold_in = jax.vmap(jax.random.fold_in)
    draws = Draws(fold_in(s.keys, s.rounds), fold_in(s.keys, s.rounds - 1), s.settings)
    tokens = read_tokens(model, hidden, feed, draws, decoder.ids, sizes.portion, sizes.shards)
    reading = read(tokens, s, feed)

    work, committed = judge(s.work, here, plan, reading, s.settings, decoder.ids.eos_id)
    after = dataclasses.replace(s, cache=kv.write(s.cache, new), work=work)
    after = settle(after, s.work.drafts, committed, feed, decoder)

    # The next plan is ready if it was fed and all drafts before it were committed.
    is_valid = jnp.sum(committed, axis=(1, 2)) == jnp.sum(plan.drafted, axis=1)
    ready = jnp.any(plan.planned, axis=1) & is_valid & after.active
    was_tried = s.active & (s.work.phase != PLAN) & (s.work.phase != PROPOSE)
    return dataclasses.replace(
        after,
        work=select(ready, follow(after.remaining, plan.plan_block, reading, s.settings), after.work),
        forwards=s.forwards + s.active,
        rounds=s.rounds + ready,
        held=s.held + (was_tried[:, None] & jnp.stack([is_valid, ~is_valid], axis=1)),
    )


def plan_feed(s: State, here: Block, sizes: Sizes, decoder: PlanAndInfill) -> tuple[FeedPlan, Int32[Array, ""]]:
    """(what each row feeds, index of the shape): what its phase needs, and speculative tokens for the next forward."""
    work, phase = s.work, s.work.phase[:, None]
    plans, verifies, proposes, checks, recomputes = (phase == p for p in (PLAN, VERIFY, PROPOSE, CHECK, RECOMPUTE))
    chosen = work.chosen & (verifies | proposes | checks | recomputes)
    drafted = jnp.where(chosen, jnp.where(proposes, work.accepted, here.size), 0)

    rest = s.remaining & ~chosen
    is_last = ~jnp.any(rest, axis=1)  # if all is accepted, the next block is to be planned
    following = block_of(s.canvas, s.block + 1, decoder.block_slots)
    plan_block = select(is_last, following, here)
    ahead_there = (following.size > 0) & ~s.ended[:, None]
    # Behind a draft with an EOS a plan is lost: either the EOS is rejected, or what is behind it is not committed.
    may_end = jnp.any(chosen[:, :, None] & (work.drafts == decoder.ids.eos_id), axis=(1, 2))[:, None]
    ahead = (verifies | checks | recomputes) & ~may_end & jnp.where(is_last[:, None], ahead_there, rest)
    # Only a slot that is verified without others attends to the same tokens as if it were alone.
    is_lone = jnp.sum(chosen, axis=1, keepdims=True) == 1
    is_exact = (s.settings.infill == EXACT)[:, None]
    guess = jnp.where(chosen & (checks | (verifies & is_lone & ~is_exact)), here.size - work.guess, 0)

    planned, infilled = plans & s.remaining, proposes & chosen
    masks = jnp.where(planned, here.size, 0) + jnp.where(infilled, here.size - work.accepted, 0)
    needed = jnp.sum(drafted + masks, axis=1)
    next_plan, guesses = jnp.sum(jnp.where(ahead, plan_block.size, 0), axis=1), jnp.sum(guess, axis=1)
    most = jnp.where(s.settings.budget != 0, decoder.width - needed, 0)[:, None]
    wishes = jnp.minimum(jnp.stack([next_plan + guesses, next_plan, guesses], axis=1), most)
    auto, worth = s.settings.budget < 0, worthwhile(sizes.free, s.held, s.active, sizes.shards)
    worth = jnp.where(auto, worth, 0)[:, None] * jnp.array([[0, 1, 0]])  # what guesses are worth is not known
    budget = jnp.where(auto, sizes.free, s.settings.budget)
    shape, room = choose(needed, wishes, budget, worth, sizes.shapes, sizes.shards)

    # The next plan comes first; guesses use the remaining room.
    ahead &= (next_plan <= room)[:, None]
    room -= jnp.sum(jnp.where(ahead, plan_block.size, 0), axis=1)
    fits = (guess > 0) & (jnp.cumsum(guess, axis=1) <= room[:, None])
    offset = jnp.arange(decoder.slot_size)[None, None]
    is_open = (offset >= work.accepted[:, :, None]) & (offset + 1 < here.size[:, :, None])
    plan = FeedPlan(
        drafted=drafted,
        planned=planned | ahead,
        plan_block=plan_block,
        guessed=infilled | fits,
        cut=jnp.where(proposes, work.accepted, work.guess),
        alone=(proposes | checks)[:, 0],
        read=is_open & (verifies | checks)[:, :, None],
    )
    return plan, shape


def forward_in(
    shape: Shape, model: Transformer, s: State, feed: PackedFeed, sizes: Sizes, decoder: PlanAndInfill
) -> Callable[[], tuple[Hidden, KeyValues]]:
    """The forward in one shape: input of the output head, and cache entries of each row's first tokens."""
    width, most = min(shape.width, decoder.width), sizes.shapes[-1].places

    def run():
        ragged = Ragged.of(feed.length, width, shape.tile, shape.tiles, sizes.shards)
        tokens, positions, visible = feed.tokens[:, :width], feed.positions[:, :width], feed.visible[:, :width, :width]
        x, new = model.extend_hidden(tokens, positions, s.cache.entries, s.cache.length, visible, ragged)
        drafts = min(width, decoder.block)  # only these can be committed
        new = jax.tree.map(lambda x: jax.vmap(lambda x: ragged.spread(x, drafts))(x), new)
        hidden = Hidden(_widen(x, most, 1), _widen(ragged.index(), decoder.width, 1))
        return hidden, jax.tree.map(lambda x: _widen(x, decoder.block, 2), new)

    return run


def _widen(x: jax.Array, size: int, axis: int) -> jax.Array:
    """Pads an axis with zeros to this size."""
    return jnp.pad(x, [(0, (size - n) * (i == axis)) for i, n in enumerate(x.shape)])


def read(tokens: Tokens, s: State, feed: PackedFeed) -> Reading:
    """Sorts what was read at each place of the feed into drafts, plan and guesses."""
    chosen, chance, weighed = (feed.to_grid(x, s.work.drafts) for x in (tokens.chosen, tokens.chance, tokens.weighed))
    (following, plan, guesses), (following_chance, plan_chance, guesses_chance) = chosen, chance
    draft_chance, following, following_chance = (
        jnp.roll(x, 1, axis=2) for x in (weighed[0], following, following_chance)
    )
    own = jax.tree.map(lambda x: x[:, None, None], s.settings)
    wanted = blend(s.work, draft_chance, following, following_chance, own)
    trusted = jnp.where(own.infill == EXACT, s.work.drafts == wanted, draft_chance > own.token_threshold)
    return Reading(trusted, wanted, plan, plan_chance, guesses, guesses_chance)


def settle(
    s: State,
    drafts: Int32[Array, "B M K"],
    committed: Bool[Array, "B M K"],
    feed: PackedFeed,
    decoder: PlanAndInfill,
) -> State:
    """Commits drafts, and moves rows with a finished block to the next one or ends them.

    A committed EOS, which is then the last committed token, drops the slots behind it and all further blocks; remaining
    slots of the block before it are still decoded.
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
        record=s.record.append(feed.tokens[:, : decoder.block], feed.positions[:, : decoder.block], count),
        work=dataclasses.replace(s.work, phase=jnp.where(over, DONE, s.work.phase)),
        block=s.block + onward,
        remaining=select(onward, following, remaining),
        ended=ended,
    )

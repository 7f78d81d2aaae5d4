"""Plan and infill (ReFusion, arXiv 2512.13586, section 3.3): what both kinds of infilling have in common.

Every row of a batch is in a phase of its own, so that no row waits for another; the phase says which of its tokens are
fed and how their logits are used. In the phase PLAN, mask tokens of the remaining slots of its serial block are fed,
and the confident slots are chosen. The next phases turn the drafts of these slots into text, by exact infilling
(decoder.py) or by the paper's thresholds (authors.py). If speculation (budget.py) has room, the next plan is fed along
with the drafts. Its tokens attend to exactly what they would attend to in a forward pass of their own, so the text is
the same: if all drafts are committed, the plan is already there, and one forward pass is saved.

Axes: B rows, M slots of a block, K slot size, W width of a forward pass.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int32, Key

from refusion_jax.decoding import cache as kv
from refusion_jax.decoding.decoder import SLOT_MASK, Decoder, RowState
from refusion_jax.decoding.requests import Layout, Request, text_capacity
from refusion_jax.decoding.sampling import select
from refusion_jax.decoding.settings import TracedSettings
from refusion_jax.decoding.trajectory import tell
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.shape import ModelConfig
from refusion_jax.systems.refusion.budget import Sizes, choose, worthwhile
from refusion_jax.systems.refusion.canvas import Block, Canvas, slots_a_block, slots_of
from refusion_jax.systems.refusion.feed import Feed, Part, Reading, pack, read, run
from refusion_jax.systems.refusion.phases import PLAN, Needs, Work, choose_slots, needs_of
from refusion_jax.systems.refusion.settings import SlotSettings


@struct.dataclass
class SlotState(RowState):
    """The current block of each row, its work, and the cache."""

    places: Canvas
    cache: kv.Cache
    work: Work
    block: Int32[Array, "B"]  # the serial block being decoded
    remaining: Bool[Array, "B M"]  # slots of the block that are still masked
    ended: Bool[Array, "B"]  # an EOS was committed: no further blocks
    plans: Int32[Array, "B"]  # number of plans followed
    plan_hits: Int32[Array, "B"]  # forward passes whose drafts were all committed: a plan fed along could be used
    plan_misses: Int32[Array, "B"]  # other forward passes along with which a plan may be fed

    @property
    def rounds(self) -> Int32[Array, "B"]:
        return self.plans


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotDecoder(Decoder):
    """The base of both kinds of infilling, which implement the methods that raise NotImplementedError here."""

    settings: ClassVar[type[SlotSettings]] = SlotSettings
    copies_prefix: ClassVar[bool] = True
    next_token: ClassVar[str] = SLOT_MASK
    typical: ClassVar[dict[float, float]] = {16.0: 3.7, 8.0: 2.71}

    slot_size: int  # K
    slots: int  # at most, in a row
    block_slots: int  # M, at most, in a serial block
    budget: int  # tokens up to which a forward pass of a shard may speculate, if requests set it

    @classmethod
    def settings_for(cls, fed: float, new_tokens: int, slot_size: int = 8) -> dict[str, Any]:
        """As many serial blocks, of whole slots, as make a plan about `fed` tokens long."""
        slots, most = new_tokens // slot_size, max(1, round(new_tokens / fed))
        return {"serial_blocks": next(blocks for blocks in range(most, 0, -1) if slots % blocks == 0)}

    @property
    def block_tokens(self) -> int:
        """The most tokens of a serial block, all of which one forward pass may commit."""
        return self.block_slots * self.slot_size

    @classmethod
    def for_requests(cls, requests: Sequence[Request], model: ModelConfig) -> Self:
        K, block_slots = requests[0].settings.slot_size, max(map(slots_a_block, requests))
        return cls.sized(
            requests,
            model,
            slots=max(len(slots_of(request)) for request in requests),
            block_slots=block_slots,
            width=K * max(map(cls.slots_of_a_forward, requests)),
            budget=max(0, *(request.settings.budget for request in requests)),  # "auto" is -1
            cache_length=text_capacity(requests) + block_slots * K,
        )

    @classmethod
    def slots_of_a_forward(cls, request: Request) -> int:
        """Slots of the widest forward pass of a request: those of a block and, with speculation, of the next."""
        per_block = slots_a_block(request)
        return per_block * (2 if request.settings.budget and len(slots_of(request)) > per_block else 1)

    def lay_out(self, requests: Sequence[Request]) -> Layout:
        return Layout.of(requests, self.cache_length, Canvas.of(requests, self.slots))

    def init(self, model: LanguageModel, layout: Layout, keys: Key[Array, "B"]) -> SlotState:
        zeros = jnp.zeros(keys.shape, jnp.int32)
        first_block = layout.places.block(zeros, self.block_slots)
        drafts = jnp.zeros((*first_block.size.shape, self.slot_size), jnp.int32)
        nothing = Reading(drafts, drafts * 0.0, drafts * 0.0)
        work = Work.of(drafts[:, :, 0] > 0, nothing)
        return self.start(
            SlotState,
            layout,
            keys,
            self.block_tokens,
            cache=kv.prefill(model, layout.given, self.chunk),
            work=work.replace(phase=zeros + PLAN),
            block=zeros,
            remaining=first_block.size > 0,
            ended=zeros > 0,
            plans=zeros,
            plan_hits=zeros,
            plan_misses=zeros,
        )

    def sizes(self, model: LanguageModel, rows: int) -> Sizes:
        return Sizes.of(model, rows, self.width, self.block_tokens, self.budget, self.slot_size)

    def scored(self, model: LanguageModel, rows: int) -> int:
        return self.sizes(model, rows).portion

    def step(self, model: LanguageModel, s: SlotState) -> SlotState:
        """One forward pass over drafts and masks, whose results are used as each row's phase says."""
        sizes = self.sizes(model, len(s.block))
        here, following = (s.places.block(s.block + i, self.block_slots) for i in (0, 1))
        needs = needs_of(s.work, here)
        plan_block, planned, shape = self.choose_plan(s, needs, here, following, sizes)

        offset, always = jnp.arange(self.slot_size)[None, None], jnp.ones((1, 1, 1), bool)
        drafts = Part(here, s.work.drafts, offset < needs.drafted[:, :, None], needs.is_read, always)
        is_plan = offset < jnp.where(planned, plan_block.size, 0)[:, :, None]
        mask = jnp.full((1, 1, 1), self.ids.mask_id)
        masks = Part(plan_block, mask, is_plan | needs.masks, always, ~needs.masks)
        feed = pack(drafts, masks, s.work.planned, self.width)
        hidden, index, new = run(model, s.cache, feed, self.visible(s.work, feed), shape, sizes, self.block_tokens)
        fold_in = jax.vmap(jax.random.fold_in)
        draws = fold_in(s.keys, s.rounds), fold_in(s.keys, s.rounds - 1), s.settings
        of_drafts, of_masks = read(model, hidden, index, feed, draws, self.ids, sizes)

        tell(s.work.drafts, here.start[:, :, None] + offset, drafts.is_fed)
        tell(of_masks.token, plan_block.start[:, :, None] + offset, is_plan, of_masks.chance)

        work, committed = self.judge(s.work, here, of_drafts, of_masks, s.settings)
        after = s.replace(cache=kv.write(s.cache, new), work=work)
        after = self.commit(after, s.work.drafts, committed, following, feed)

        # The next plan is ready if it was fed and all drafts before it were committed.
        is_valid = jnp.sum(committed, axis=(1, 2)) == jnp.sum(needs.drafted, axis=1)
        is_ready = jnp.any(planned, axis=1) & is_valid & after.active
        chosen = choose_slots(after.remaining, plan_block, of_masks.chance[:, :, 0], s.settings)
        return after.replace(
            work=select(is_ready, Work.of(chosen, of_masks), after.work),
            forwards=s.forwards + 1,
            plans=s.plans + is_ready,
            plan_hits=s.plan_hits + (needs.may_plan & is_valid),
            plan_misses=s.plan_misses + (needs.may_plan & ~is_valid),
        )

    def choose_plan(
        self, s: SlotState, needs: Needs, here: Block, following: Block, sizes: Sizes
    ) -> tuple[Block, Bool[Array, "B M"], Int32[Array, ""]]:
        """(the block of each row's masks, its planned slots; the shape to run).

        A row in the phase PLAN plans what remains of its block. Others may plan ahead if speculation has room: the
        slots that remain if all their drafts are accepted or, if none remain, those of the following block. Not after
        a draft with an EOS: either it is rejected, or what follows it is not committed.

        Example: the plans of rows whose serial blocks have four slots, a to d and then e to h:

            phase    remaining   drafts   with an EOS   plan with room   without room
            plan     a b c d                            a b c d          a b c d
            verify   a b c d     b d                    a c
            verify   b d         b d                    e f g h
            verify   a b c d     b d      d
        """
        rest = s.remaining & ~needs.chosen
        is_last = ~jnp.any(rest, axis=1)
        plan_block = select(is_last & needs.may_plan, following, here)
        has_eos = jnp.any(needs.chosen[:, :, None] & (s.work.drafts == self.ids.eos_id), axis=(1, 2))
        following_slots = (following.size > 0) & ~s.ended[:, None]
        ahead = select(is_last, following_slots, rest) & (needs.may_plan & ~has_eos)[:, None]
        planned = (s.work.phase == PLAN)[:, None] & s.remaining

        needed = jnp.sum(needs.drafted + jnp.where(planned, here.size, 0) + jnp.sum(needs.masks, axis=2), axis=1)
        next_plan = jnp.sum(jnp.where(ahead, plan_block.size, 0), axis=1)
        requested = jnp.where((s.settings.budget != 0) & (needed + next_plan <= self.width), next_plan, 0)
        is_auto, shards = s.settings.budget < 0, sizes.shards
        budget = jnp.where(is_auto, sizes.free, s.settings.budget)
        pays = jnp.where(is_auto, worthwhile(sizes.free, s.plan_hits, s.plan_misses, s.active, shards), 0)
        shape, is_granted = choose(needed, requested, budget, pays, sizes.shapes, shards)
        return plan_block, planned | ahead & (is_granted & (requested > 0))[:, None], shape

    def commit(
        self, s: SlotState, drafts: Int32[Array, "B M K"], committed: Bool[Array, "B M K"], following: Block, feed: Feed
    ) -> SlotState:
        """Commits drafts, and moves rows with a finished block to the following one or ends them.

        A committed EOS, which is then the last committed token, drops the slots after it and all further blocks;
        remaining slots of the block before it are still decoded.
        """
        slot = jnp.arange(drafts.shape[1])[None]
        count = jnp.sum(committed, axis=(1, 2), dtype=jnp.int32)
        is_in = jnp.any(committed, axis=2)
        eos = jnp.any(committed & (drafts == self.ids.eos_id), axis=(1, 2))
        last = jnp.max(jnp.where(is_in, slot, -1), axis=1)
        remaining = s.remaining & ~is_in & ~(eos[:, None] & (slot > last[:, None]))
        ended = s.ended | eos

        is_finished = ~jnp.any(remaining, axis=1)
        is_over = is_finished & (ended | ~jnp.any(following.size > 0, axis=1))
        goes_on = is_finished & ~is_over
        return s.replace(
            cache=kv.commit(s.cache, count),
            record=s.record.append(feed.tokens[:, : self.block_tokens], feed.positions[:, : self.block_tokens], count),
            active=~is_over,
            block=s.block + goes_on,
            remaining=select(goes_on, following.size > 0, remaining),
            ended=ended,
        )

    def visible(self, work: Work, feed: Feed) -> Bool[Array, "B W W"]:
        """Which tokens of the feed each one attends to: all before it, and itself."""
        (B, W), index = feed.tokens.shape, jnp.arange(feed.tokens.shape[1])
        return jnp.broadcast_to((index[:, None] >= index[None])[None], (B, W, W))

    def judge(
        self, work: Work, here: Block, of_drafts: Reading, of_masks: Reading, settings: TracedSettings
    ) -> tuple[Work, Bool[Array, "B M K"]]:
        """(the next work of each row, unless a next plan is ready; the drafts to commit)."""
        raise NotImplementedError

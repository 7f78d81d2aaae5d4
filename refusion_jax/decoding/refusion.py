"""Plan and infill (ReFusion, arXiv 2512.13586, section 3.3): one forward, four phases.

One `lax.while_loop`, whose body is one forward of W tokens a row on top of the cache. Each row is in a phase of its
own, which decides what it feeds and what it makes of the logits, so no row ever waits for another.

    plan      feeds mask tokens for all remaining slots of the block; drafts them; chooses the confident ones
    verify    feeds the drafts of the chosen slots, one after the other; commits the whole slots that are accepted
    propose   (if there was none) feeds each chosen slot alone: its accepted run, then mask tokens; drafts those anew
    check     feeds each chosen slot alone; lengthens its accepted run; commits once every run is a whole slot

Axes: B rows, G new tokens, M slots of a block, K slot size, W = M * K. The *grid* [B, M, K] is the current block in
text order. A forward feeds its slots *compacted* [B, W]: those that are fed come first, in text order; what is
committed is then always a prefix of what was fed, and its cache entries are a prefix of those just written.
"""

import dataclasses

import jax
import jax.numpy as jnp

from refusion_jax.decoding import cache as kv
from refusion_jax.decoding.sampling import Record, mask_logits, probability, sample
from refusion_jax.decoding.settings import Dials, Static
from refusion_jax.model.transformer import Transformer

PLAN, VERIFY, PROPOSE, CHECK, DONE = range(5)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Work:
    """What a row is busy with inside its block."""

    phase: jax.Array  # [B] int32
    chosen: jax.Array  # [B, M] bool, the slots being verified or infilled
    drafts: jax.Array  # [B, M, K] int32
    accepted: jax.Array  # [B, M] int32, length of each chosen slot's accepted run (infill)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """All that the loop carries."""

    cache: kv.Cache
    record: Record
    work: Work
    block: jax.Array  # [B] int32, the serial block being decoded
    remaining: jax.Array  # [B, M] bool, its slots that are still masked
    ended: jax.Array  # [B] bool, an EOS was committed: no further block
    forwards: jax.Array  # [B] int32
    rounds: jax.Array  # [B] int32, plans made


@dataclasses.dataclass(frozen=True)
class Fed:
    """What one forward feeds."""

    slots: jax.Array  # [B, M] bool grid
    to_grid: jax.Array  # [B, M] int32: where each grid slot stands in the compacted order
    tokens: jax.Array  # [B, W] int32 compacted
    offsets: jax.Array  # [B, W] int32 compacted, places in the answer
    visible: jax.Array  # [B, W, W] bool
    length: jax.Array  # [B] int32, tokens that count; those behind are filler


@dataclasses.dataclass(frozen=True)
class Reading:
    """What the logits of one forward say, for every phase."""

    proposals: jax.Array  # [B, M, K] int32 grid: the token chosen at each place
    confidence: jax.Array  # [B, M] float32 grid: probability of each slot's first proposal
    trusted: jax.Array  # [B, M, K] bool grid: above the threshold by the token before it; no meaning for the first


def decode(
    model: Transformer,
    prompts: jax.Array,
    lengths: jax.Array,
    active: jax.Array,
    keys: jax.Array,
    dials: Dials,
    static: Static,
) -> State:
    """Decodes a batch.

    Args:
      model: the transformer.
      prompts: [B, P] int32, padded on the right.
      lengths: [B] int32.
      active: [B] bool; other rows are filler and do nothing.
      keys: [B] PRNG keys of the rows.
      dials: traced settings.
      static: compiled-in settings.
    """
    B, P = prompts.shape
    G, K = static.new_tokens, static.slot_size
    M = G // static.serial_blocks // K
    zeros = jnp.zeros((B,), jnp.int32)
    start = State(
        cache=kv.prefill(model, prompts, lengths, P + G + M * K),
        record=Record.empty(B, G + M * K),
        work=Work(
            phase=jnp.where(active, PLAN, DONE),
            chosen=jnp.zeros((B, M), bool),
            drafts=jnp.zeros((B, M, K), jnp.int32),
            accepted=jnp.zeros((B, M), jnp.int32),
        ),
        block=zeros,
        remaining=jnp.ones((B, M), bool),
        ended=jnp.zeros((B,), bool),
        forwards=zeros,
        rounds=zeros,
    )
    return jax.lax.while_loop(
        lambda s: jnp.any(s.work.phase != DONE), lambda s: step(model, s, lengths, keys, dials, static), start
    )


def step(model: Transformer, s: State, prompt_lengths, keys, dials: Dials, static: Static) -> State:
    """One forward, and what each row makes of it."""
    fed = feed(s, static)
    logits, cache = kv.extend(model, s.cache, fed.tokens, prompt_lengths[:, None] + fed.offsets, fed.visible)
    reading = read(logits, fed, s, jax.vmap(jax.random.fold_in)(keys, s.forwards), dials, static)

    moves = {
        PLAN: plan(s, reading, dials),
        VERIFY: verify(s, fed, reading, static),
        PROPOSE: propose(s, reading),
        CHECK: check(s, fed, reading, static),
    }
    work, count = s.work, jnp.zeros_like(s.block)  # rows that are done stay as they are
    for phase, move in moves.items():
        work, count = select(s.work.phase == phase, move, (work, count))
    return settle(dataclasses.replace(s, cache=cache, work=work), s.work.phase, fed, count, static)


def feed(s: State, static: Static) -> Fed:
    """Lays out what each row feeds in its phase."""
    B, M, K = s.work.drafts.shape
    W = M * K
    phase = s.work.phase[:, None]
    slots = jnp.where(phase == PLAN, s.remaining, s.work.chosen) & (phase != DONE)
    order = jnp.argsort(~slots, axis=1, stable=True)  # compacted -> grid: fed slots first, in text order

    # How many leading tokens of each slot are fed; mask tokens follow.
    unmasked = jnp.where(phase == PLAN, 0, jnp.where(phase == PROPOSE, s.work.accepted, K))
    tokens = jnp.where(jnp.arange(K)[None, None] < unmasked[:, :, None], s.work.drafts, static.mask_id)
    offsets = s.block[:, None, None] * W + (order[:, :, None] * K + jnp.arange(K)[None, None])

    index = jnp.arange(W)
    causal = index[:, None] >= index[None]  # [W, W]
    same_slot = index[:, None] // K == index[None] // K
    alone = (phase == PROPOSE) | (phase == CHECK)
    return Fed(
        slots=slots,
        to_grid=jnp.argsort(order, axis=1),
        tokens=jnp.take_along_axis(tokens, order[:, :, None], axis=1).reshape(B, W),
        offsets=offsets.reshape(B, W),
        visible=causal[None] & (same_slot[None] | ~alone[:, :, None]),
        length=jnp.sum(slots, axis=1) * K,
    )


def read(logits: jax.Array, fed: Fed, s: State, keys: jax.Array, dials: Dials, static: Static) -> Reading:
    """Draws proposals (with temperature only where a row plans) and weighs the tokens that were fed."""
    B, M, K = s.work.drafts.shape

    def grid(x):  # [B, W] compacted -> [B, M, K]
        return jnp.take_along_axis(x.reshape(B, M, K), fed.to_grid[:, :, None], axis=1)

    real, choosable = mask_logits(logits, static)
    planning = s.work.phase == PLAN
    drawn = sample(choosable, keys, jnp.where(jnp.any(planning), dials.temperature, 0.0))
    proposals = jnp.where(planning[:, None], drawn, jnp.argmax(choosable, axis=-1).astype(jnp.int32))
    next_probability = probability(real, jnp.roll(fed.tokens, -1, axis=1))
    return Reading(
        proposals=grid(proposals),
        confidence=grid(probability(real, proposals))[:, :, 0],
        trusted=grid(jnp.roll(next_probability, 1, axis=1)) > dials.token_threshold,
    )


def plan(s: State, reading: Reading, dials: Dials) -> tuple[Work, jax.Array]:
    """Chooses every slot above the threshold, or else the single best one."""
    confident = s.remaining & (reading.confidence > dials.slot_threshold)
    best = jnp.argmax(jnp.where(s.remaining, reading.confidence, -1.0), axis=1)
    single = jnp.arange(s.remaining.shape[1])[None] == best[:, None]
    chosen = jnp.where(jnp.any(confident, axis=1, keepdims=True), confident, single)
    work = Work(jnp.full_like(s.work.phase, VERIFY), chosen, reading.proposals, s.work.accepted)
    return work, jnp.zeros_like(s.block)


def verify(s: State, fed: Fed, reading: Reading, static: Static) -> tuple[Work, jax.Array]:
    """Commits what the accepted prefix of the concatenation covers: up to its first EOS, or else its whole slots.

    A slot's first token is accepted always. An EOS behind the accepted prefix is ignored.
    """
    B, M, K = s.work.drafts.shape
    accepted = reading.trusted | (jnp.arange(K) == 0)[None, None]
    in_order = jnp.take_along_axis(accepted, jnp.argsort(~fed.slots, axis=1, stable=True)[:, :, None], axis=1)
    prefix = jnp.minimum(run_length(in_order.reshape(B, M * K)), fed.length)
    eos_at = first(fed.tokens == static.eos_id)
    count = jnp.where(eos_at < prefix, eos_at + 1, prefix // K * K)
    phase = jnp.where(count > 0, PLAN, PROPOSE)
    return dataclasses.replace(s.work, phase=phase, accepted=run_length(accepted)), count


def propose(s: State, reading: Reading) -> tuple[Work, jax.Array]:
    """Drafts anew what is not accepted yet; greedy even at a temperature, as the authors do."""
    is_accepted = jnp.arange(s.work.drafts.shape[2])[None, None] < s.work.accepted[:, :, None]
    drafts = jnp.where(is_accepted, s.work.drafts, reading.proposals)
    return dataclasses.replace(s.work, phase=jnp.full_like(s.work.phase, CHECK), drafts=drafts), jnp.zeros_like(s.block)


def check(s: State, fed: Fed, reading: Reading, static: Static) -> tuple[Work, jax.Array]:
    """Lengthens the accepted runs, by one token at least; commits when all are whole, up to the first EOS.

    Once an accepted token is EOS, the rest of its slot counts as accepted and the chosen slots behind it are dropped.
    (The authors' code drops by the index among the chosen slots and can lose earlier, unfinished ones; this does not.)
    """
    _, M, K = s.work.drafts.shape
    offset, slot = jnp.arange(K)[None, None], jnp.arange(M)[None]
    runs = run_length(reading.trusted | (offset <= s.work.accepted[:, :, None]))
    is_eos = (s.work.drafts == static.eos_id) & (offset < runs[:, :, None]) & s.work.chosen[:, :, None]
    eos_slot = first(jnp.any(is_eos, axis=2))[:, None]  # M where there is none
    chosen = s.work.chosen & (slot <= eos_slot)
    runs = jnp.where(slot == eos_slot, K, runs)

    finished = jnp.all((runs == K) | ~chosen, axis=1)
    length = jnp.sum(chosen, axis=1) * K
    count = jnp.where(finished, jnp.minimum(first(fed.tokens == static.eos_id) + 1, length), 0)
    return Work(jnp.where(finished, PLAN, PROPOSE), chosen, s.work.drafts, runs), count


def settle(s: State, phase: jax.Array, fed: Fed, count: jax.Array, static: Static) -> State:
    """Commits the first `count` [B] tokens fed; moves rows whose block is finished to the next, or ends them.

    A committed EOS (it is then the last token committed) drops the slots behind it and stops further blocks; slots of
    the block that lie before it go on being decoded.
    """
    M, K = s.work.drafts.shape[1:]
    slot = jnp.arange(M)[None]
    committed = fed.slots & (fed.to_grid * K < count[:, None])
    last_token = jnp.take_along_axis(fed.tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    eos = (count > 0) & (last_token == static.eos_id)
    eos_slot = jnp.max(jnp.where(committed, slot, -1), axis=1)
    remaining = s.remaining & ~committed & ~(eos[:, None] & (slot > eos_slot[:, None]))
    ended = s.ended | eos

    finished = (phase != DONE) & ~jnp.any(remaining, axis=1)
    over = finished & (ended | (s.block + 1 == static.serial_blocks))
    onward = finished & ~over
    return State(
        cache=kv.commit(s.cache, count),
        record=s.record.append(fed.tokens, fed.offsets, count),
        work=dataclasses.replace(s.work, phase=jnp.where(over, DONE, s.work.phase)),
        block=s.block + onward,
        remaining=remaining | onward[:, None],
        ended=ended,
        forwards=s.forwards + (phase != DONE),
        rounds=s.rounds + (phase == PLAN),
    )


def select(rows: jax.Array, new, old):
    """A tree of per-row arrays: new where rows [B] is True, old elsewhere."""
    return jax.tree.map(lambda n, o: jnp.where(rows.reshape(rows.shape + (1,) * (n.ndim - 1)), n, o), new, old)


def run_length(flags: jax.Array) -> jax.Array:
    """Length of the leading run of True over the last axis, int32."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=-1), axis=-1)


def first(flags: jax.Array) -> jax.Array:
    """Index of the first True over the last axis, its length where there is none; int32."""
    return run_length(~flags)

"""D2F (Wang et al., "Discrete Diffusion Forcing", arXiv 2508.09192): block-causal masked diffusion in a pipeline.

Training: the response is cut into blocks. Every block attends to the prompt, to itself and to the noisy blocks before
it. The noise rises from block to block: p_0 ~ U(0.2, most) and p_b = p_0 + (most - p_0) / (n - 1) * (sum of b draws
from U(0, 1)), for the n blocks of a document. The loss is the cross-entropy of the masked tokens themselves (not
shifted), weighted by 1 / p and normalized by the number of masked tokens in the batch, as in the authors' code. Blocks
of two:

    text       p q a b c d          rank     0 0 1 1 2 2
    inputs     p q a M M M
    labels     . . . b c d          1 1 . . . .
                                    1 1 . . . .
                                    1 1 1 1 . .
                                    1 1 1 1 . .
                                    1 1 1 1 1 1
                                    1 1 1 1 1 1

Decoding: a forward pass opens one more block of masks if a tenth of the last one is committed, but none after an EOS
is. In each open block it commits the tokens with p > `threshold`; where there is none, the most probable one if 95 % of
the block before it was committed already. Leading blocks that were fed without masks go to the cache, which is exact,
as nothing that they attend to changes any more.

From the paper and the authors' code: mask, noise, 1 / p, pipeline, blocks of 16. Left out: the paper distils a
bidirectional teacher into this model; here the labels are the tokens themselves, and training starts from scratch or
from `init_from`. Our choices: noise up to 1 (`most`; 0.7 in the paper), since a newly opened block is all masks, which
a model without a teacher has to learn; increments are scaled by each document's own number of blocks, not by the
largest of the batch; at most four blocks are fed, so that shapes are static; mask and padding are never chosen.

Axes: B rows, T row length, C text length, N tokens to decode, K block length, W blocks in flight, F = W K tokens fed.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32, Key

from refusion_jax.batch.batch import Batch
from refusion_jax.batch.masking import PADDING, pad_answers
from refusion_jax.batch.rows import Rows, document_start, per_document_sum, text_positions
from refusion_jax.batch.visibility import BlockCausal, Pattern, Visibility
from refusion_jax.cli.settings import setting
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding import settings as shared
from refusion_jax.decoding.decoder import Decoder
from refusion_jax.decoding.reference import ReferenceDecoder
from refusion_jax.decoding.requests import Layout, Request, most_new_tokens, rounded_up, text_capacity
from refusion_jax.decoding.sampling import entry
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.shape import ModelConfig
from refusion_jax.systems import masked
from refusion_jax.systems.interface import Objective, System

_BLOCK = 16  # as in the paper
_IN_FLIGHT = 4  # most blocks of one forward pass
_LEAST = 0.2  # least probability of masking a token, as in the paper
_OPEN_AT, _FORCE_AT = 0.1, 0.95  # committed shares of the block before, as in the paper


@dataclasses.dataclass(frozen=True)
class BlockForcing(Objective):
    """1 / M * sum over the M masked tokens of the batch of CE / p."""

    coefficients: ClassVar[dict[str, float]] = {"mdm": 1.0}

    block_length: int = setting(_BLOCK, "tokens of a block, also the default for decoding", at_least=1, at_most=2**20)
    padding: float = PADDING()
    most: float = setting(1.0, "highest probability of masking a token, in any block", at_least=_LEAST, at_most=1)

    @property
    def pattern(self) -> Pattern:
        """About as many keys: blocks are counted from the start of each response, and a prompt sees all of itself."""
        return BlockCausal(self.block_length)

    def corrupt(self, rows: Rows, keys: Key[Array, "B"]) -> Batch:
        rows = pad_answers(rows, keys, self.padding, self.eos_id)
        positions = text_positions(rows.segment_ids)
        offset = text_positions(2 * rows.segment_ids + rows.is_response)  # in the prompt or in the response
        block = jnp.where(rows.is_response, 1 + offset // self.block_length, 0)
        is_masked, p = self._draw(rows, block, keys)
        weight = is_masked / (p * jnp.maximum(jnp.sum(is_masked), 1).astype(jnp.float32))
        return Batch(
            inputs=jnp.where(is_masked, self.mask_id, rows.tokens),
            positions=positions,
            visibility=Visibility(rows.segment_ids, block, jnp.zeros_like(block)),
            labels=rows.tokens,
            weights={"mdm": weight},
            diagnostics={"mask_ratio": p},
        )

    def _draw(
        self, rows: Rows, block: Int32[Array, "B T"], keys: Key[Array, "B"]
    ) -> tuple[Bool[Array, "B T"], Float32[Array, "B T"]]:
        """(which tokens are masked, p of each token's block)."""
        T = rows.tokens.shape[1]
        document = document_start(rows.segment_ids)
        draws = jax.vmap(lambda key: jax.random.uniform(key, (3, T)))(keys)
        first = _LEAST + (self.most - _LEAST) * jnp.take_along_axis(draws[:, 0], document, axis=1)
        # The increment of a block is the draw at its first token; the first block of a response has none.
        rises = jnp.pad(block[:, 1:] != block[:, :-1], ((0, 0), (1, 0))) & (block > 1)
        risen = jnp.cumsum(jnp.where(rises, draws[:, 1], 0.0), axis=1)
        risen = risen - jnp.take_along_axis(risen, document, axis=1)  # over this document alone
        increments = (per_document_sum(rows.is_response, rows.segment_ids) - 1) // self.block_length
        p = first + (self.most - first) / jnp.maximum(increments, 1) * risen
        p = jnp.clip(p, _LEAST, self.most)
        return rows.is_response & (draws[:, 2] < p), p


@dataclasses.dataclass(frozen=True)
class PipelineSettings(shared.Settings):
    """How to decode blocks in a pipeline."""

    block_length: int = setting(
        0, f"Tokens of a block; 0: as the model was trained, or {_BLOCK} if unknown", scope="compiled",
        at_least=0, at_most=2**24,
    )  # fmt: skip
    threshold: float = setting(0.9, "Tokens more probable than this are committed at once", at_least=0, at_most=1)

    @classmethod
    def operating_points(cls, new_tokens: int, trained: Mapping[str, Any]) -> list[dict[str, Any]]:
        own = {"block_length": trained["block_length"]}
        return [own | {"threshold": threshold} for threshold in (0.95, 0.9, 0.7, 0.5)]

    @property
    def unit(self) -> int:
        return self.block_length or _BLOCK

    def for_model(self, model: ModelConfig) -> Self:
        return dataclasses.replace(self, block_length=self.block_length or model.block_size or _BLOCK)


@struct.dataclass
class PipelineState(masked.MaskedText):
    """The text, a cache, and the number of open blocks."""

    cache: kv.Cache  # of the prompt and of leading blocks without masks
    opened: Int32[Array, "B"]  # blocks opened so far


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipeline(Decoder):
    """Fills several blocks at once; F is the width, C + F the length of the cache."""

    settings: ClassVar[type[PipelineSettings]] = PipelineSettings
    fills_gaps: ClassVar[bool] = False  # the model does not see the text after a gap

    block_length: int  # K
    shifted: bool  # whether the token at j is read from the logits at j - 1

    @classmethod
    def for_requests(cls, requests: Sequence[Request], model: ModelConfig) -> Self:
        if model.shifted:
            masked.check_first(requests)
        own, N = requests[0].settings, most_new_tokens(requests)
        width = own.block_length * min(_IN_FLIGHT, -(-N // own.block_length))
        chunk = rounded_up(max(len(request.given[0]) for request in requests))
        room = text_capacity(requests) + width + model.shifted
        return cls.sized(requests, model, width=width, shifted=model.shifted, chunk=chunk, cache_length=room)

    def init(self, model: LanguageModel, layout: Layout, keys: Key[Array, "B"]) -> PipelineState:
        """The initial state: prompts are cached, with bidirectional attention; no block is open."""
        cache = kv.prefill(model, layout.given, self.chunk, block_size=self.chunk)
        return self.start_text(PipelineState, layout, keys, cache=cache, opened=jnp.zeros_like(cache.length))

    def step(self, model: LanguageModel, s: PipelineState) -> PipelineState:
        K, F, own = self.block_length, self.width, s.settings
        cached = (s.cache.length - s.first) // K  # [B] blocks
        w = s.window(F, cached * K, jnp.full_like(cached, F))
        before = jnp.sum(w.masked.reshape(len(cached), F // K, K), axis=2)  # [B, W] masks of blocks, open or not
        opened = self._open(s, cached, before)
        w = w._replace(masked=w.masked & (jnp.arange(F)[None] < ((opened - cached) * K)[:, None]))

        offset = jnp.arange(F)
        if self.shifted:  # the last cached token, after the others: nobody sees it here, and it sees the cache alone
            offset = jnp.append(offset, -1)
        index = s.cache.length[:, None] + offset[None]
        tokens = jnp.take_along_axis(s.text, jnp.minimum(index, s.text.shape[1] - 1), axis=1)
        block = offset // K
        visible = (block[:, None] >= block[None]) & (offset >= 0)[None]
        logits, cache = kv.extend(model, s.cache, tokens, index, visible[None])
        logits = jnp.roll(logits, int(self.shifted), axis=1)[:, :F]

        proposal = s.propose(logits, w.position, w.masked)
        by_block = (len(index), F // K, K)
        p = jnp.where(w.masked, proposal.probability, -1.0).reshape(by_block)
        sure = p > own.threshold[:, None, None]
        is_best = jnp.argmax(p, axis=2)[:, :, None] == jnp.arange(K)[None, None]
        share = 1 - jnp.pad(before[:, :-1], ((0, 0), (1, 0))) / K  # committed share of the block before each one
        is_forced = (share >= _FORCE_AT) & ~jnp.any(sure, axis=2)
        chosen = (sure | (is_best & is_forced[:, :, None])).reshape(w.masked.shape)
        after = s.commit(w, proposal.token, chosen)

        done = jnp.cumprod(before == 0, axis=1) * (jnp.arange(F // K)[None] < (opened - cached)[:, None])
        return after.replace(cache=kv.commit(cache, jnp.sum(done, axis=1) * K), opened=opened)

    def _open(self, s: PipelineState, cached: Int32[Array, "B"], left: Int32[Array, "B W"]) -> Int32[Array, "B"]:
        """Number of open blocks, with a new one if the last one is far enough, there is room, and no EOS yet."""
        last = s.opened - cached - 1  # in flight; -1 where all are cached
        of_last = entry(left, jnp.maximum(last, 0))
        share = jnp.where(last >= 0, 1 - of_last / self.block_length, 1.0)
        has_room = (last + 1 < self.width // self.block_length) & (s.opened * self.block_length < s.places.count)
        has_ended = s.first_of(self.ids.eos_id) < s.places.position.shape[1]
        return s.opened + (has_room & (share >= _OPEN_AT) & ~has_ended)


def reference(model: LanguageModel, request: Request) -> dict:
    """The decoder in plain Python: one request, no cache, greedy."""
    plain, s = ReferenceDecoder(model, request), request.settings
    K, first, shift = s.block_length, plain.places[0], int(model.config.shifted)
    blocks = [plain.places[i : i + K] for i in range(0, len(plain.places), K)]
    opened = cached = 0

    def share(block):
        return 1.0 if block < 0 else sum(place in plain.text for place in blocks[block]) / K

    while not plain.is_complete():
        room = opened < len(blocks) and opened - cached < _IN_FLIGHT
        if room and share(opened - 1) >= _OPEN_AT and not plain.has_ended:
            opened += 1
        places = [*range(first + opened * K)]
        rank = np.array([max(0, 1 + (place - first) // K) for place in places])
        p = plain.forward("blocks", plain.tokens(places), places, rank[:, None] >= rank)
        new, shares = {}, [share(block) for block in range(-1, opened)]
        for block in range(cached, opened):
            rows = {place: p[place - shift] for place in blocks[block] if place not in plain.text}
            new |= plain.surest(rows, s.threshold, least=int(shares[block] >= _FORCE_AT))
        while cached < opened and shares[cached + 1] == 1:
            cached += 1
        plain.text |= new
    return plain.result()


SYSTEM = System(
    name="d2f",
    objective=BlockForcing,
    decoders={"d2f": Pipeline},
    references={"d2f": reference},
    former={"least": 0.2},
    block_key="block_length",
)

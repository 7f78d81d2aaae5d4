"""Block diffusion as in Fast-dLLM v2 (arXiv 2509.26328): blocks of masks one after the other, on a cache of clean ones.

Training on [x_t; x_t'; x_0]: per block t ~ U(0, 1) and p = (1 - eps) t + eps. Each response token is masked in x_t with
probability p, and in x_t', the complementary copy, exactly where it is not masked in x_t. A noisy block attends to
itself, in both directions, and to the clean text of earlier blocks; a clean block to itself and to earlier clean ones.
A masked token is predicted at the token before it (shifted) in its own copy; the loss is the mean over the masked
tokens of both copies. Example: a b c d in blocks of two, with b and c masked in x_t:

                     a M M d M b c M a b c d
    inputs    a      1 1 . . . . . . . . . .
              M      1 1 . . . . . . . . . .
              M      . . 1 1 . . . . 1 1 . .
              d      . . 1 1 . . . . 1 1 . .
              M      . . . . 1 1 . . . . . .
              b      . . . . 1 1 . . . . . .
              c      . . . . . . 1 1 1 1 . .
              M      . . . . . . 1 1 1 1 . .
              a      . . . . . . . . 1 1 . .
              b      . . . . . . . . 1 1 . .
              c      . . . . . . . . 1 1 1 1
              d      . . . . . . . . 1 1 1 1
    labels    b c . . . . d . . . . .          (and a at the token before it, if there is one)

Decoding, block by block: a forward pass over the block reveals all tokens with p > `threshold`, and at least the most
probable one, in the first sub-block that has masks. When no mask is left, one more forward pass over the finished block
commits its keys and values, and its last token predicts the first token of the next block.

Decoding gives the tokens of the code that the authors released (tests/test_releases.py), except after prompts of just
one block, which it leaves out. Training is based on a description of the paper and of their code, neither of which
we have read: masks and complementary copies, shift and mean. The authors give each copy a clean text of its own; here
both share one, which is the same loss with 3 T tokens instead of 4 T. They pad every example with masks to whole
blocks. Here rows are packed: a noisy block belongs to the document of its first token; after the end of that document
it holds repeats of the EOS in place of the next document, whose labels in this block are lost. They are masked and
predicted like others, because a decoder fills them before it knows where the text ends; after a truncated text, which
has no EOS, the block is empty. Blocks are counted from the start of the row, so the documents of a row are shuffled:
otherwise, as they are packed by length, their places in the row would give away their lengths.
Their approximate cache inside a block, off by default, is left out. Places after a revealed EOS are not decoded, but
fed as masks.

Axes: B rows, T row length, C text length, K block size, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Key

from refusion_jax.batch.batch import Batch, mean_over
from refusion_jax.batch.masking import draw_levels, shuffle_documents
from refusion_jax.batch.rows import Rows, join, next_in_row, row_index, text_positions
from refusion_jax.batch.visibility import Pattern, Visibility
from refusion_jax.cli.settings import setting
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding import settings as shared
from refusion_jax.decoding.decoder import Continuer, FilledText
from refusion_jax.decoding.reference import ReferenceDecoder
from refusion_jax.decoding.requests import Layout, Request
from refusion_jax.decoding.sampling import surest
from refusion_jax.model.families import Release
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.shape import ModelConfig
from refusion_jax.systems.interface import Objective, System

_BLOCK = 32  # as in the paper


@dataclasses.dataclass(frozen=True)
class ComplementaryBlocks(Pattern):
    """[x_t; x_t'; x_0] in blocks of `size` places, as shown in the docstring of the module."""

    size: int

    def rank_and_group(self, length: int) -> tuple[Int32[np.ndarray, "T"], Int32[np.ndarray, "T"]]:
        block = np.arange(length // 3, dtype=np.int32) // self.size
        rank = np.concatenate([2 * block, 2 * block, 2 * block + 1])
        return rank, np.concatenate([block + 1, block + block.max() + 2, 0 * block])


@dataclasses.dataclass(frozen=True)
class ComplementaryMasks(Objective):
    """The mean of CE over the masked tokens of both copies."""

    coefficients: ClassVar[dict[str, float]] = {"mdm": 1.0}
    streams: ClassVar[int] = 3  # two noisy copies and the text

    block_size: int = setting(_BLOCK, "tokens denoised together", at_least=1, at_most=4096)

    @property
    def pattern(self) -> ComplementaryBlocks:
        return ComplementaryBlocks(self.block_size)

    def corrupt(self, rows: Rows, keys: Key[Array, "B"]) -> Batch:
        """Both noisy copies and the clean text; each noisy block belongs to the document of its first token."""
        rows = shuffle_documents(rows, keys)
        index, positions = row_index(rows.tokens), text_positions(rows.segment_ids)
        first = index - index % self.block_size  # of the block

        p, u = draw_levels(keys, rows)
        p, owner, start = (jnp.take_along_axis(x, first, axis=1) for x in (p, rows.segment_ids, positions))
        is_own = rows.segment_ids == owner
        source = jax.lax.cummax(jnp.where(is_own, index, 0), axis=1)  # after the owner's end: its last token
        tokens, is_response = (jnp.take_along_axis(x, source, axis=1) for x in (rows.tokens, rows.is_response))
        owner = jnp.where(is_own | (tokens == self.eos_id), owner, 0)  # no document's after a truncated text
        is_response &= owner > 0
        masked = [is_response & side for side in (u < p, u >= p)]
        # Masked token n is labelled at n - 1, if that belongs to the same document.
        follows = ((index % self.block_size > 0)[:, 1:]) | ((rows.segment_ids[:, 1:] == owner[:, :-1]) & is_own[:, :-1])
        has_label = [jnp.pad(m[:, 1:] & follows, ((0, 0), (0, 1))) for m in masked]
        noisy = [jnp.where(m, self.mask_id, tokens) for m in masked]
        return Batch(
            inputs=join(*noisy, rows.tokens),
            positions=join(*[start + index % self.block_size] * 2, positions),
            visibility=Visibility.of(self.pattern, join(owner, owner, rows.segment_ids)),
            labels=join(*[next_in_row(tokens)] * 3),
            weights={"mdm": mean_over(join(*has_label, jnp.zeros_like(is_own)))},
            diagnostics={"mask_ratio": join(p, 1 - p, 0 * p)},
        )


@dataclasses.dataclass(frozen=True)
class BlockSizeSettings(shared.Settings):
    """Settings of all decoders that go block by block."""

    block_size: int = setting(
        0, f"Tokens denoised together; 0: as the model was trained, or {_BLOCK} if unknown",
        scope="compiled", at_least=0, at_most=4096,
    )  # fmt: skip

    def for_model(self, model: ModelConfig) -> Self:
        return dataclasses.replace(self, block_size=self.block_size or model.block_size or _BLOCK)


@dataclasses.dataclass(frozen=True)
class BlockSettings(BlockSizeSettings):
    """How to decode block by block."""

    sub_block: int = setting(
        8, "Tokens of a sub-block; sub-blocks are decoded one after the other", at_least=1, at_most=4096
    )
    threshold: float = setting(0.9, "Tokens more probable than this are revealed", at_least=0, at_most=1)

    @classmethod
    def operating_points(cls, new_tokens: int, trained: Mapping[str, Any]) -> list[dict[str, Any]]:
        own = {"block_size": trained["block_size"]}
        whole = own | {"sub_block": trained["block_size"]}
        points = [own | {"threshold": threshold} for threshold in (0.95, 0.9, 0.7, 0.5)]
        return points + [whole | {"threshold": threshold} for threshold in (0.9, 0.7)]


class BlockByBlock(Continuer):
    """Reveals one block after the other."""

    settings: ClassVar[type[BlockSettings]] = BlockSettings
    typical: ClassVar[dict[float, float]] = {16.0: 3.24}
    shift: ClassVar[int] = 1  # how many places before a token it is predicted

    @classmethod
    def for_requests(cls, requests: Sequence[Request], model: ModelConfig) -> Self:
        """The smallest sizes that serve all of these requests, with a prefill of whole blocks; see `Continuer`."""
        own, K = super().for_requests(requests, model), cls.width_for(requests)
        chunk = -(-own.chunk // K) * K
        return dataclasses.replace(own, chunk=chunk, cache_length=max(own.cache_length, chunk + K))

    @classmethod
    def width_for(cls, requests: Sequence[Request]) -> int:
        return requests[0].settings.block_size

    @property
    def prefix_block(self) -> int:
        return math.lcm(super().prefix_block, self.width)

    def init(self, model: LanguageModel, layout: Layout, keys: Key[Array, "B"]) -> FilledText:
        """The initial state: prompts are cached in whole blocks, except the block that predicts the first new token."""
        given, K = layout.given, self.width
        entries = kv.prefill(model, given, self.chunk, block_size=K).entries
        cache = kv.Cache(entries, (given.length - self.shift) // K * K)
        return self.start_text(FilledText, layout, keys, cache=cache)

    def look(self, model: LanguageModel, s: FilledText) -> tuple[Array, Array, Array, kv.Cache]:
        """One forward pass over each row's block: (its places, the fed tokens, their logits, the cache)."""
        at = s.cache.length[:, None] + jnp.arange(self.width)[None]  # [B, K]
        fed = jnp.where(at < s.length[:, None], jnp.take_along_axis(s.text, at, axis=1), self.ids.mask_id)
        logits, cache = kv.extend(model, s.cache, fed, at, jnp.ones((1, self.width, self.width), bool))
        return at, fed, logits, cache

    def step(self, model: LanguageModel, s: FilledText) -> FilledText:
        """A pass over each row's block: reveals tokens, or commits it and, if shifted, reveals one of the next."""
        offset, own = jnp.arange(self.width)[None], s.settings
        at, _, logits, cache = self.look(model, s)

        open_here = jnp.take_along_axis(s.masks, at, axis=1)  # masks of the block
        is_done = ~jnp.any(open_here, axis=1)
        part = offset // own.sub_block[:, None]
        here = jnp.min(jnp.where(open_here, part, self.width), axis=1, keepdims=True)
        readable = open_here & (part == here)
        if self.shift:  # the first token of a block is read from the last one before it
            readable = jnp.where(is_done[:, None], offset == self.width - 1, next_in_row(readable))
        proposal = s.propose(logits, at + self.shift, readable)
        confidence = proposal.probability
        reveals = surest(confidence, readable, confidence > own.threshold[:, None])
        cache = kv.commit(cache, jnp.where(is_done, self.width, 0))
        return s.fill(cache, reveals, proposal.token, at + self.shift)


def reference(model: LanguageModel, request: Request, shift: int = 1) -> dict:
    """The decoder in plain Python: one request, no cache, greedy."""
    plain, s = ReferenceDecoder(model, request), request.settings
    mask_id, K = plain.ids.mask_id, s.block_size
    start = (len(plain.text) - shift) // K * K
    while not plain.is_complete():
        tokens = [plain.text.get(at, mask_id) if at < plain.end else mask_id for at in range(start + K)]
        block = np.arange(start + K) // K
        masks = [at for at in range(start, min(start + K, plain.end)) if at not in plain.text]
        p = plain.forward("reveal" if masks else "commit", tokens, [*range(start + K)], block[:, None] >= block[None])
        if masks:
            masks = [at for at in masks if (at - start) // s.sub_block == (masks[0] - start) // s.sub_block]
            plain.fill(plain.surest({at: p[at - shift] for at in masks}, s.threshold))
        else:
            start += K
            plain.fill({start: plain.best(p[start - 1], start)} if shift else {})
    return plain.result()


SYSTEM = System(
    name="block_diffusion",
    objective=ComplementaryMasks,
    decoders={"block_diffusion": BlockByBlock},
    references={"block_diffusion": reference},
    former={"eps": 1e-3},
    block_key="block_size",
    releases=(
        Release(
            "Fast_dLLM_Qwen",
            "qwen2",
            keys={"bd_size": "block_size"},
            defaults={"mask_token_id": 151665, "block_size": _BLOCK},
            ignored=("conplemenrary_mask",),  # of training
        ),
    ),
)

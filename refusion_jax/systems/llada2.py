"""LLaDA2 (arXiv 2512.15745): block diffusion with a mixture of experts. Decoder only.

`llada2` is the decoder of sdar.py except for the block of 32 and the threshold. From the authors' code
(github.com/inclusionAI/dFactory, 92b6890): all of this, with as many steps as a block has tokens. At temperature 0
theirs still draws tokens; ours takes the most probable ones.

`llada2_edit` is that of LLaDA2.1 (arXiv 2602.08676), whose releases look the same. Each pass over a block reveals
the masks with p > `threshold`, at least the most probable one, and replaces the answer's tokens in it where another one
has p > `editing_threshold`. A block that has no masks left is edited until a forward pass changes nothing, in at most
`max_post_steps`; that pass, or one more, commits it. An EOS ends the answer then, and can be edited away before.

From the authors' `generate`, in the directory of LLaDA2.1-mini: all of this. The defaults are their "quality mode";
"speed mode" is threshold=0.5 and editing_threshold=0. Here no block sees later ones, as in training and in their
decoder for SGLang; their `generate` gives attention its mask of ones and zeros as a bias, so that there every edit also
changes what earlier blocks compute.

Axes: B rows, K block size.
"""

import dataclasses
import functools
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int32, Key

from refusion_jax.cli.settings import setting
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding.decoder import FilledText
from refusion_jax.decoding.reference import ReferenceDecoder
from refusion_jax.decoding.requests import Layout, Request
from refusion_jax.decoding.sampling import put, surest
from refusion_jax.model.families import Release
from refusion_jax.model.interface import LanguageModel
from refusion_jax.systems import block_diffusion, sdar
from refusion_jax.systems.interface import System


@dataclasses.dataclass(frozen=True)
class BlockSettings(sdar.BlockSettings):
    """How to decode block by block."""

    threshold: float = setting(0.95, "Tokens more probable than this are revealed", at_least=0, at_most=1)


class BlockByBlock(sdar.BlockByBlock):
    """SDAR's decoder with these defaults."""

    settings: ClassVar[type[BlockSettings]] = BlockSettings


@dataclasses.dataclass(frozen=True)
class EditSettings(block_diffusion.BlockSizeSettings):
    """How to decode and edit block by block."""

    threshold: float = setting(0.7, "Tokens more probable than this are revealed", at_least=0, at_most=1)
    editing_threshold: float = setting(
        0.5, "Tokens more probable than this replace other tokens already in the block", at_least=0, at_most=1
    )
    max_post_steps: int = setting(
        16, "Forward passes, at most, that may edit a block after its last mask is revealed", at_least=0, at_most=4096
    )
    points = [{}, {"threshold": 0.5, "editing_threshold": 0.0}]


@struct.dataclass
class EditedText(FilledText):
    """The text, of which the current block can still be edited."""

    post_steps: Int32[Array, "B"]  # forward passes since the block's last mask was revealed


class EditedBlocks(sdar.BlockByBlock):
    """Reveals and edits one block after the other."""

    settings: ClassVar[type[EditSettings]] = EditSettings

    def init(self, model: LanguageModel, layout: Layout, keys: Key[Array, "B"]) -> EditedText:
        s = super().init(model, layout, keys)
        return EditedText(**vars(s), post_steps=jnp.zeros_like(s.length))

    def step(self, model: LanguageModel, s: EditedText) -> EditedText:
        """One forward pass over each row's block: writes and edits tokens, or commits it if none changes."""
        at, fed, logits, cache = self.look(model, s)
        own, is_own = s.settings, (at >= s.places.position[:, :1]) & (at < s.length[:, None])
        proposal = s.propose(logits, at, is_own)
        chosen, confidence = proposal.token, proposal.probability

        is_mask = is_own & (fed == self.ids.mask_id)
        has_masks = jnp.any(is_mask, axis=1)
        reveals = surest(confidence, is_mask, confidence > own.threshold[:, None])
        edits = is_own & ~is_mask & (chosen != fed) & (confidence > own.editing_threshold[:, None])
        changes = reveals | edits & (has_masks | (s.post_steps < own.max_post_steps))[:, None]

        is_final = ~jnp.any(changes, axis=1)
        cache = kv.commit(cache, jnp.where(is_final, self.width, 0))
        after = s.fill(cache, is_own & is_final[:, None], fed, at)
        return after.replace(
            text=put(s.text, jnp.where(changes, at, s.text.shape[1]), chosen),
            active=after.active | ~is_final,
            post_steps=jnp.where(is_final, 0, s.post_steps + ~has_masks),
        )


def edit_reference(model: LanguageModel, request: Request) -> dict:
    """`llada2_edit` in plain Python: one request, no cache, greedy."""
    plain, s = ReferenceDecoder(model, request), request.settings
    for start in range(len(plain.text) // s.block_size * s.block_size, request.length, s.block_size):
        places = [at for at in plain.places if start <= at < start + s.block_size]
        fed, block = [*range(start + s.block_size)], np.arange(start + s.block_size) // s.block_size
        written: dict[int, int] = {}
        changes, post_steps = True, 0
        while changes:
            tokens = [(plain.text | written).get(at, plain.ids.mask_id) for at in fed]
            p = plain.forward("block", tokens, fed, block[:, None] >= block[None])
            best = {at: plain.best(p[at], at) for at in places}
            changes = plain.surest({at: p[at] for at in places if at not in written}, s.threshold)
            has_masks = bool(changes)
            if has_masks or post_steps < s.max_post_steps:
                others = [at for at in written if best[at] != written[at]]
                changes |= {at: best[at] for at in others if plain.above(p[at][best[at]], s.editing_threshold)}
            written |= changes
            post_steps += not has_masks
        plain.fill({at: written[at] for at in places})
        if plain.has_ended:
            break
    return plain.result()


SYSTEM = System(
    name="llada2",
    decoders={"llada2": BlockByBlock, "llada2_edit": EditedBlocks},
    references={"llada2": functools.partial(block_diffusion.reference, shift=0), "llada2_edit": edit_reference},
    releases=(
        Release(
            "llada2_moe",
            "llada2_moe",
            defaults={"block_size": 32, "mask_token_id": 156895, "eos_token_id": 156892},
            ignored=("embedding_dropout", "output_dropout", "output_router_logits"),
        ),
    ),
)

"""LLaDA2 (arXiv 2512.15745): block diffusion with a mixture of experts. Decoder only.

It is the decoder of sdar.py but for the block of 32 and the threshold. From the authors' code
(github.com/inclusionAI/dFactory, 92b6890): all of this, with as many steps as a block has tokens. At temperature 0
theirs still draws tokens; ours takes the most probable ones. LLaDA2.1 has the same layout; its decoder, which also
edits tokens that it has written, is left out.
"""

import dataclasses
import functools
from typing import ClassVar

from refusion_jax.cli.settings import setting
from refusion_jax.model.families import Release
from refusion_jax.systems import block_diffusion, sdar
from refusion_jax.systems.interface import System


@dataclasses.dataclass(frozen=True)
class BlockSettings(sdar.BlockSettings):
    """How to decode block by block."""

    threshold: float = setting(0.95, "Tokens more probable than this are revealed", at_least=0, at_most=1)


@dataclasses.dataclass(frozen=True)
class BlockByBlock(sdar.BlockByBlock):
    """The decoder with its compiled sizes."""

    settings: ClassVar[type[BlockSettings]] = BlockSettings


SYSTEM = System(
    name="llada2",
    objective=None,
    decoders={"llada2": BlockByBlock},
    references={"llada2": functools.partial(block_diffusion.reference, shift=0)},
    releases=(
        Release(
            "llada2_moe",
            "llada2_moe",
            defaults={"block_size": 32, "mask_token_id": 156895, "eos_token_id": 156892},
            ignored=("embedding_dropout", "output_dropout", "output_router_logits"),
        ),
    ),
)

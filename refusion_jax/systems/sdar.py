"""SDAR (arXiv 2510.06303): block diffusion whose masks predict their own tokens, not those after them. Decoder only.

Block by block, on a cache of the blocks before: one forward pass over the block reveals all tokens with p >
`threshold`, and at least the most probable one; one more forward pass over the finished block commits its keys and
values. It is the decoder of block_diffusion.py except for the shift and the defaults.

From the authors' code (github.com/JetAstra/SDAR, c2041a8): all of this, with their `low_confidence_dynamic` remasking
and as many denoising steps as a block has tokens. Our choices: places after a revealed EOS are not decoded.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from refusion_jax.cli.settings import setting
from refusion_jax.model.families import Release
from refusion_jax.systems import block_diffusion
from refusion_jax.systems.interface import System


@dataclasses.dataclass(frozen=True)
class BlockSettings(block_diffusion.BlockSettings):
    """How to decode block by block."""

    sub_block: int = setting(4096, "Tokens of a sub-block; by default the whole block", at_least=1, at_most=4096)
    threshold: float = setting(0.85, "Tokens more probable than this are revealed", at_least=0, at_most=1)

    @classmethod
    def operating_points(cls, new_tokens: int, trained: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{"threshold": threshold} for threshold in (0.95, 0.85, 0.7, 0.5)]


class BlockByBlock(block_diffusion.BlockByBlock):
    """Block diffusion without the shift."""

    settings: ClassVar[type[BlockSettings]] = BlockSettings
    shift: ClassVar[int] = 0


_OPEN = {"block_size": 4, "mask_token_id": 151669}  # where config.json does not say it

SYSTEM = System(
    name="sdar",
    decoders={"sdar": BlockByBlock},
    references={"sdar": functools.partial(block_diffusion.reference, shift=0)},
    releases=(
        Release(
            "sdar",
            "qwen3",
            defaults=_OPEN,
            ignored=("debug", "ep_size", "fuse_cross_entropy", "micro_forward", "skip_checkpoint", "use_deepep"),
        ),
        Release("sdar_moe", "qwen3_moe", defaults=_OPEN, ignored=("output_router_logits",)),
    ),
)

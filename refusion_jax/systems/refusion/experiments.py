"""The claims of the ReFusion paper, and further settings to compare: `bench headline` measures both."""

from collections.abc import Mapping
from typing import Any

from refusion_jax.systems.interface import Claim, Experiments
from refusion_jax.systems.refusion.settings import BEST_INFILL, ORDERS

# arXiv 2512.13586, abstract: 34 % better and 18 times as fast as earlier masked diffusion models, and 2.33 times as
# fast as strong autoregressive models, with about their quality.
CLAIMS = (Claim("llada", accuracy=1.34, speed=18.0), Claim("ar", accuracy=0.98, speed=2.33))


def slots_blocks_and_order(new_tokens: int, trained: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each slot size that was trained, and twice the largest, with one to four serial blocks, in every order.

    A block of one slot has one order alone.
    """
    sizes = [*trained["sizes"], 2 * max(trained["sizes"])]
    return [
        BEST_INFILL | {"slot_threshold": 0.6, "slot_size": size, "serial_blocks": blocks, "order": order}
        for size in sizes
        for blocks in (1, 2, 4)
        for order in (ORDERS if size * blocks < new_tokens else ORDERS[:1])
        if not new_tokens % (size * blocks)
    ]


def infilling(new_tokens: int, trained: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The authors' infilling with three thresholds, and exact infilling with four blends."""
    own = {"slot_size": min(trained["sizes"]), "slot_threshold": 0.6}
    return [own | {"token_threshold": sure} for sure in (0.9, 0.6, 0.3)] + [
        own | {"infill": "exact", "infill_blend": blend} for blend in (0.0, 0.3, 0.5, 0.7)
    ]


EXPERIMENTS = Experiments(
    CLAIMS, {"slot size, serial blocks and order": slots_blocks_and_order, "infilling": infilling}
)

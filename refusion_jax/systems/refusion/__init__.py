"""ReFusion (arXiv 2512.13586): slot diffusion, with slots in any order and the tokens of a slot left to right."""

from refusion_jax.systems.interface import System
from refusion_jax.systems.refusion.decoder import PlanAndInfill
from refusion_jax.systems.refusion.likelihood import slot_feed
from refusion_jax.systems.refusion.objective import KEYS, SlotDiffusion, check
from refusion_jax.systems.refusion.reference import one_by_one, plan_and_infill
from refusion_jax.systems.refusion.sequential import Sequential
from refusion_jax.systems.refusion.studies import CLAIMS, STUDIES

SYSTEM = System(
    name="refusion",
    objective=SlotDiffusion,
    decoders={"refusion": PlanAndInfill, "sequential": Sequential},
    references={"refusion": plan_and_infill, "sequential": one_by_one},
    section="slots",
    keys=KEYS,
    check=check,
    feed=slot_feed,
    claims=CLAIMS,
    studies=STUDIES,
    is_default=True,
)

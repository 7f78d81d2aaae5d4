"""Dense slot diffusion: slots in any order, each token trained on as the next token and as a mask."""

import functools
from pathlib import Path

from refusion_jax.systems.dense.drafting import Drafting
from refusion_jax.systems.dense.objective import CONFIG_KEYS, DenseSlots
from refusion_jax.systems.dense.planning import PlanAlone
from refusion_jax.systems.dense.reference import one_by_one
from refusion_jax.systems.dense.scoring import scoring_forward
from refusion_jax.systems.interface import Claim, ConfigSection, Scoring, System
from refusion_jax.systems.refusion.reference import plan_and_infill

# No paper claims them: these are ReFusion's, for its own system, as goals.
GOALS = (Claim("llada", accuracy=1.34, speed=18.0), Claim("ar", accuracy=0.98, speed=2.33))

SYSTEM = System(
    name="dense",
    objective=DenseSlots,
    decoders={"dense": Drafting, "dense_plan": PlanAlone},
    references={"dense": one_by_one, "dense_plan": functools.partial(plan_and_infill, plans_alone=True)},
    section=ConfigSection("dense", CONFIG_KEYS),
    scoring=Scoring(scoring_forward),
    claims=GOALS,
    custom_generate=Path(__file__).parent / "custom_generate",
)

"""Dense slot diffusion: slots in any order, each token trained on as the next token and as a mask."""

from refusion_jax.systems.dense.drafting import Drafting
from refusion_jax.systems.dense.objective import KEYS, DenseSlots, check
from refusion_jax.systems.dense.reference import one_by_one
from refusion_jax.systems.dense.scoring import scoring_forward
from refusion_jax.systems.interface import Scoring, System

SYSTEM = System(
    name="dense",
    objective=DenseSlots,
    decoders={"dense": Drafting},
    references={"dense": one_by_one},
    section="dense",
    keys=KEYS,
    check=check,
    scoring=Scoring(scoring_forward),
)

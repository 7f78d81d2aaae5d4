"""Dense slot diffusion: slots in any order, each token trained on as the next token and as a mask."""

from refusion_jax.systems.dense.objective import KEYS, DenseSlots, check
from refusion_jax.systems.interface import System

SYSTEM = System(
    name="dense",
    objective=DenseSlots,
    decoders={},
    references={},
    section="dense",
    keys=KEYS,
    check=check,
)

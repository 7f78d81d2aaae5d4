"""A run, and where its training loop stands after a step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_collections
from etils import epath
from jax.sharding import Mesh

from refusion_jax.data.interface import RowSource, Tokenizer
from refusion_jax.distributed.preemption import Preemption
from refusion_jax.model.shape import ModelConfig
from refusion_jax.training.program import Program
from refusion_jax.training.train_step import TrainState


@dataclasses.dataclass
class Now:
    """Where training stands after a step."""

    step: int
    state: TrainState
    metrics: dict[str, Any]  # of the step; the devices may still be computing them
    is_end: bool  # whether this is the last step of the run
    is_preempted: bool  # whether the process has to leave after this step
    evaluated: dict[str, Any] = dataclasses.field(default_factory=dict)  # what was measured after the step

    @property
    def is_last(self) -> bool:
        """Whether this is the last step of the session."""
        return self.is_end or self.is_preempted


class RollBack(Exception):  # noqa: N818  a decision, not a fault
    """Raised after a step at which training has failed: it continues from the newest checkpoint."""

    def __init__(self, step: int, why: str):
        super().__init__(why)
        self.step = step


@dataclasses.dataclass
class Run:
    """Everything that is created once, however often the run is rolled back."""

    config: ml_collections.ConfigDict
    workdir: epath.Path
    mesh: Mesh
    tokenizer: Tokenizer
    rows: RowSource
    shape: ModelConfig
    program: Program
    held_out: Callable | None  # from make_held_out
    tasks: Callable | None  # a TaskScores
    preemption: Preemption
    changed: list[str]  # config keys that differ from the previous session's, see `check_same_run`
    may_change_data: bool = False
    initial_weights: dict | None = None  # the weights to start from, until they are used
    check_lock: Callable[[], None] = lambda: None  # UserError if another process has taken over the directory
    compiled_step: Callable | None = None
    failure: RollBack | None = None  # why the previous session was rolled back

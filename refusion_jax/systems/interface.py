"""What a system is made of: an objective that trains it, and decoders. Three small protocols; nothing else is asked.

Whoever trains, plans, inspects or decodes asks the system, and never its name: see systems/README.md for how one is
added.

Axes: B rows, T row length.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxtyping import Array, Key

from refusion_jax.batch.batch import Batch
from refusion_jax.batch.rows import Rows
from refusion_jax.batch.visibility import Pattern
from refusion_jax.decoding.decoder import Decoder
from refusion_jax.decoding.requests import Request
from refusion_jax.model.flops import train_flops_per_token
from refusion_jax.model.transformer import ModelConfig, Transformer
from refusion_jax.runtime.settings import Setting
from refusion_jax.systems.likelihood import Feed, Text

__all__ = ["Claim", "Decoder", "Objective", "System", "train_flops_per_row"]


class Objective(Protocol):
    """How rows of text become a batch to train on: a frozen dataclass."""

    coefficients: Mapping[str, float]  # of each term of the loss in the total
    pattern: Pattern  # who sees whom; where that is drawn at random, a bound of it, by which FLOPs are counted

    def corrupt(self, rows: Rows, keys: Key[Array, "B"]) -> Batch:
        """The batch of some rows; runs inside `jit`.

        Args:
          rows: packed rows; the global batch, so that normalizers are counted over all of it.
          keys: one a row: a row's noise depends on nothing else.
        """
        ...

    def input_length(self, row_length: int) -> int:
        """Tokens of a row as the model sees it, for rows of T tokens."""
        ...


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a paper says of its system beside another one, trained alike: `bench headline` prints whether it holds."""

    rival: str  # name of the other system, measured by its own decoder
    accuracy: float  # at least so many times the rival's
    speed: float  # tokens a second, one prompt at a time, at least so many times the rival's


@dataclasses.dataclass(frozen=True)
class System:
    """A way to train and to decode, under one name.

    `objective` is called with mask_id and the system's own config keys as keyword arguments, and None where the system
    decodes models that others train. `keys` are the config keys under `section`.
    """

    name: str
    objective: Callable[..., Objective] | None
    decoders: Mapping[str, type[Decoder]]  # by name; the first is the default
    references: Mapping[
        str, Callable[[Transformer, Request], dict]
    ]  # each decoder in plain Python, see decoding/plain.py
    section: str = ""  # of the config, where the keys are
    keys: Mapping[str, Setting] = dataclasses.field(default_factory=dict)
    check: Callable[[Any], None] = lambda section: None  # raises SettingError where values do not fit together
    decodes: tuple[str, ...] = ()  # names of the systems whose models its decoders serve, too
    feed: Callable[[Text], Feed] | None = None  # by which forward a text is scored, if its likelihood is known
    needs_prompt: bool = False  # the first token of a text is read from the one before it, which must be there
    is_bound: bool = False  # the feed is drawn at random, and the mean over draws bounds log p from below
    block_key: str = ""  # its config key that says how many tokens its models denoise together; decoders go by that
    shifted: bool = False  # whether its models read a masked token from the logits at the token before it
    claims: tuple[Claim, ...] = ()
    studies: Mapping[str, Callable[[int, Mapping[str, Any]], list[dict[str, Any]]]] = dataclasses.field(
        default_factory=dict
    )  # by title: more settings to compare; called with the arguments of `Settings.operating_points`
    is_default: bool = False  # what is trained unless the config says otherwise; one system alone


def train_flops_per_row(objective: Objective, model: ModelConfig, row_length: int) -> float:
    """FLOPs of forward and backward of one row of T tokens, as `train_flops_per_token` counts them."""
    length = objective.input_length(row_length)
    return length * train_flops_per_token(model, objective.pattern.keys_seen(length))

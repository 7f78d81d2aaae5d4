"""The interface of a system: an objective that trains it, and decoders.

Code that trains, plans, inspects or decodes uses this interface and never tests for the name of a system. See
systems/README.md for how to add one.

Axes: B rows, T row length; N tokens of a forward pass that scores a text, P of its prompt, R of its continuation.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int, Int32, Key

from refusion_jax.batch.batch import Batch
from refusion_jax.batch.rows import Rows
from refusion_jax.batch.visibility import Pattern
from refusion_jax.cli.errors import UserError
from refusion_jax.cli.settings import Setting, declared
from refusion_jax.decoding.decoder import Decoder
from refusion_jax.decoding.requests import Request
from refusion_jax.model.families import Release
from refusion_jax.model.flops import train_flops_per_token
from refusion_jax.model.shape import ModelConfig
from refusion_jax.model.transformer import Transformer

SHARED_CODE = Path(__file__).parent / "custom_generate" / "rows.py"  # what `System.custom_generate` imports
PLAIN = "plain"  # in `System.decodes`: language models that nobody has adapted


@dataclasses.dataclass(frozen=True)
class Objective(abc.ABC):
    """How rows of text become a training batch: a frozen dataclass of token ids and the system's own config keys."""

    mask_id: int
    eos_id: int = dataclasses.field(default=-1, kw_only=True)  # at the end of every text that is not cut; -1: of none
    # Path of a frozen model whose hidden states of the text (tokens of group 0) are added to the input; "": none. A
    # class attribute, unless a subclass makes it a field.
    reads = ""

    shifted: ClassVar[bool] = False  # whether models learn to read a masked token from the logits at the one before it
    streams: ClassVar[int] = 1  # versions of a row that the model is fed, one after the other

    @property
    @abc.abstractmethod
    def coefficients(self) -> Mapping[str, float]:
        """Weight of each loss term in the total."""

    @property
    @abc.abstractmethod
    def pattern(self) -> Pattern:
        """The attention mask; an upper bound where that is random. FLOPs are counted by it."""

    @abc.abstractmethod
    def corrupt(self, rows: Rows, keys: Key[Array, "B"]) -> Batch:
        """Corrupts the packed rows of the global batch, which normalizers cover, into a batch; runs inside `jit`.

        There is a key per row, and a row's noise depends on nothing else. Documents keep their numbers in the row, by
        which reports find their text.
        """

    def input_length(self, row_length: int) -> int:
        """Tokens that the model is fed for a row of T tokens."""
        return self.streams * row_length

    def batch(self, rows: Rows, keys: Key[Array, "B"]) -> Batch:
        """The batch of `corrupt`; UserError where its arrays do not fit together, or its terms to `coefficients`."""
        batch, name = self.corrupt(rows, keys), f"{type(self).__module__}.{type(self).__name__}.corrupt"
        if not isinstance(batch, Batch):
            raise UserError(f"{name}: returns {type(batch).__name__}, not a Batch")
        found, expected = sorted(batch.weights), sorted(self.coefficients)
        if found != expected:
            raise UserError(f"{name}: has weights of {found}, and coefficients of {expected}")
        B, T = np.shape(rows.tokens)
        dtypes = {"weights": jnp.float32} | dict.fromkeys(("inputs", "positions", "labels"), jnp.int32)
        for at, x in jax.tree.leaves_with_path(batch):
            part, dtype = f"{name}: batch{jax.tree_util.keystr(at)}", jnp.result_type(x)
            if x.shape != (shape := (B, self.input_length(T))):
                raise UserError(f"{part} is of shape {x.shape}, not (B, T) = {shape}")
            if dtype != (expected := jnp.dtype(dtypes.get(at[0].name, dtype))):
                raise UserError(f"{part} is of {dtype}, not {expected}")
        return batch


@dataclasses.dataclass(frozen=True)
class ScoredTokens:
    """The tokens of one forward pass that scores a text: log p is the sum of weight * log p(label)."""

    tokens: Int32[np.ndarray, "N"]
    positions: Int32[np.ndarray, "N"]  # in the text
    rank: Int32[np.ndarray, "N"]  # as in batch/visibility.py; every text is its own segment
    group: Int32[np.ndarray, "N"]
    labels: Int32[np.ndarray, "N"]
    weights: Float32[np.ndarray, "N"]  # 0 without a label
    places: Int32[np.ndarray, "N"]  # of the labels in the continuation; only those with a weight count

    def __len__(self) -> int:
        return len(self.tokens)


@dataclasses.dataclass(frozen=True)
class ScoredText:
    """A text to score."""

    prompt: Int[np.ndarray, "P"]  # may be empty
    continuation: Int[np.ndarray, "R"]  # at least one token
    slot_size: int  # for systems with slots, as is `order`
    order: str | Sequence[int]  # "left_to_right" | "random" | slots by their number in the text
    mask_id: int
    draw: tuple[int, ...]  # random draws are a function of this
    name: str  # in error messages


@dataclasses.dataclass(frozen=True)
class Scoring:
    """The likelihood of texts under a system's models."""

    forward: Callable[[ScoredText], ScoredTokens]
    needs_prompt: bool = False  # whether the first token can only be predicted from one before it
    is_bound: bool = False  # whether the forward pass is random, and its mean a lower bound of log p


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim about a system against another one, of its paper or a goal; `bench headline` prints whether it holds."""

    rival: str  # name of the other system, which is measured with its own decoder
    accuracy: float  # as a multiple of the rival's, at least
    speed: float  # tokens per second with one prompt at a time, as a multiple of the rival's, at least


@dataclasses.dataclass(frozen=True)
class System:
    """A training objective and its decoders, under one name.

    `references` has each decoder in plain Python, see decoding/reference.py.
    """

    name: str
    objective: type[Objective] | None  # None: it only decodes models of others
    decoders: Mapping[str, type[Decoder]]  # by name; the first is the default
    references: Mapping[str, Callable[[Transformer, Request], dict]]
    section: str = ""  # of the config, with the settings of the objective as keys; by default its name, if it has any
    former: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # keys that are gone -> the value still used
    block_key: str = ""  # the key with the number of tokens that are denoised together, if that is one
    decodes: tuple[str, ...] = ()  # other systems whose models its decoders serve; PLAIN in one system
    scoring: Scoring | None = None  # None: the likelihood of texts is not known
    releases: tuple[Release, ...] = ()  # models of its authors that `load_model` reads
    claims: tuple[Claim, ...] = ()
    custom_generate: Path | None = None  # directory with generate.py, in PyTorch, which exports for transformers carry
    is_default: bool = False  # whether it is trained by default; true for one system

    def __post_init__(self) -> None:
        if self.keys:
            object.__setattr__(self, "section", self.section or self.name)

    @property
    def keys(self) -> dict[str, Setting]:
        """The keys of its section."""
        return declared(self.objective) if self.objective else {}


def train_flops_per_row(objective: Objective, model: ModelConfig, row_length: int) -> float:
    """FLOPs of forward and backward on one row of T tokens, counted as by `train_flops_per_token`.

    Every token fed counts with the output head, as is usual, although the step computes logits only where a label is.
    """
    length = objective.input_length(row_length)
    return length * train_flops_per_token(model, objective.pattern.keys_seen(length))

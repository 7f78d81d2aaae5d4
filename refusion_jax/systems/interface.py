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
from refusion_jax.model.flops import layer_flops_per_token, train_flops_per_token
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.lora import Lora
from refusion_jax.model.shape import ModelConfig

SHARED_CODE = Path(__file__).parent / "custom_generate" / "rows.py"  # what `System.custom_generate` imports
PLAIN = "plain"  # in `System.decodes`: pretrained language models as they are


@dataclasses.dataclass(frozen=True)
class Objective(abc.ABC):
    """How rows of text become a training batch: a frozen dataclass of token ids and the system's own config keys."""

    mask_id: int
    eos_id: int = dataclasses.field(default=-1, kw_only=True)  # ends every text that is not truncated; -1: none does
    # Path of the target model, a frozen one whose hidden states of the text (tokens of group 0) are added to the input;
    # "": none. A class attribute, unless a subclass makes it a field.
    reads = ""

    shifted: ClassVar[bool] = False  # whether models predict a masked token at the token before it
    streams: ClassVar[int] = 1  # versions of a row in the input, one after the other

    @property
    @abc.abstractmethod
    def coefficients(self) -> Mapping[str, float]:
        """Weight of each loss term in the total."""

    @property
    @abc.abstractmethod
    def pattern(self) -> Pattern:
        """The attention mask, by which FLOPs are counted; if it is random, one that sees about as many keys."""

    @abc.abstractmethod
    def corrupt(self, rows: Rows, keys: Key[Array, "B"]) -> Batch:
        """Corrupts the packed rows of the global batch into a training batch; runs inside `jit`.

        Normalizers of the loss count over all of these rows. A row's noise depends only on its key. Documents keep
        their segment_ids, by which reports find their text.
        """

    def input_length(self, row_length: int) -> int:
        """Number of input tokens for a row of T tokens."""
        return self.streams * row_length

    def batch(self, rows: Rows, keys: Key[Array, "B"]) -> Batch:
        """The batch from `corrupt`; UserError if its shapes or dtypes are wrong, or its terms not `coefficients`'."""
        batch, name = self.corrupt(rows, keys), f"{type(self).__module__}.{type(self).__name__}.corrupt"
        if not isinstance(batch, Batch):
            raise UserError(f"{name}: returns {type(batch).__name__}, not a Batch")
        B, T = np.shape(rows.tokens)
        shape, seen = [B, self.input_length(T)], (f".visibility.{part}" for part in ("segment_ids", "rank", "group"))
        expected = dict.fromkeys((".inputs", ".positions", ".labels", *seen), f"int32{shape}")
        expected |= {f".weights[{term!r}]": f"float32{shape}" for term in self.coefficients}
        expected |= {f".diagnostics[{key!r}]": f"{jnp.result_type(x)}{shape}" for key, x in batch.diagnostics.items()}
        leaves = jax.tree.leaves_with_path(batch)
        found = {jax.tree_util.keystr(at): f"{jnp.result_type(x)}{[*np.shape(x)]}" for at, x in leaves}
        for part in sorted(found.keys() | expected.keys()):
            told, wanted = (parts.get(part, "missing") for parts in (found, expected))
            if told != wanted:
                raise UserError(f"{name}: batch{part} is {told}, and should be {wanted}")
        if batch.combine:
            terms = jax.eval_shape(batch.combine, jnp.zeros(batch.labels.shape), batch)
            found = jax.tree.map(lambda x: f"{x.dtype}{[*x.shape]}", terms)
            if found != (expected := dict.fromkeys(self.coefficients, "float32[]")):
                raise UserError(f"{name}: combine returns {found}, not {expected}")
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
    places: Int32[np.ndarray, "N"]  # index of each label in the continuation; only those with a weight count

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
    draw: tuple[int, ...]  # seed of all random draws
    name: str  # in error messages


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How to compute the likelihood of texts under a system's models."""

    forward: Callable[[ScoredText], ScoredTokens]
    needs_prompt: bool = False  # whether the first token can only be predicted from one before it
    is_bound: bool = False  # whether the forward pass is random, and its mean a lower bound of log p


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim of a paper, or a goal: a system versus another one. `bench headline` prints whether it holds."""

    rival: str  # name of the other system, which is measured with its own decoder
    accuracy: float  # as a multiple of the rival's, at least
    speed: float  # tokens per second with one prompt at a time, as a multiple of the rival's, at least


@dataclasses.dataclass(frozen=True)
class System:
    """A training objective and its decoders, under one name."""

    name: str
    objective: type[Objective] | None = None  # None: it only decodes models of others
    decoders: Mapping[str, type[Decoder]] = dataclasses.field(default_factory=dict)  # by name; the first is the default
    # Of each decoder, in plain Python: decoding/reference.py.
    references: Mapping[str, Callable[[LanguageModel, Request], dict]] = dataclasses.field(default_factory=dict)
    section: str = ""  # config section with the settings of the objective; by default the name, if there are any
    former: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # removed keys -> the value that is still used
    block_key: str = ""  # the key for the number of tokens that are denoised together, if there is one
    decodes: tuple[str, ...] = ()  # other systems whose models its decoders serve; PLAIN in one system
    scoring: Scoring | None = None  # None: the likelihood of texts is not known
    releases: tuple[Release, ...] = ()  # models of its authors that `load_model` reads
    claims: tuple[Claim, ...] = ()
    custom_generate: Path | None = None  # directory of generate.py, in PyTorch; exports for transformers include it
    is_default: bool = False  # whether it is trained by default; true for one system

    def __post_init__(self) -> None:
        if self.keys:
            object.__setattr__(self, "section", self.section or self.name)

    @property
    def keys(self) -> dict[str, Setting]:
        """The keys of its config section."""
        return declared(self.objective) if self.objective else {}


def train_flops_per_row(
    objective: Objective,
    model: ModelConfig,
    row_length: int,
    lora: Lora | None = None,
    target: ModelConfig | None = None,
) -> float:
    """FLOPs of forward and backward on one row of T tokens, counted as in `train_flops_per_token`.

    As is usual, the output head counts for every input token, although the step computes logits only at labels. Of a
    target model the forward pass through the layers is added: its logits are not used.
    """
    length = objective.input_length(row_length)
    seen = objective.pattern.keys_seen(length)
    read = layer_flops_per_token(target, seen) if target else 0.0
    return length * (train_flops_per_token(model, seen, lora) + read)

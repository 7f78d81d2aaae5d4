"""What a user can set about decoding, split into what is compiled in and what is traced."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from refusion_jax.model.transformer import ModelConfig
from refusion_jax.runtime.errors import UserError

METHODS = ("refusion", "sequential", "ar")
_MOST_NEW_TOKENS = 128  # unless asked for


@dataclasses.dataclass(frozen=True)
class DecodeSettings:
    """How to decode. Thresholds, temperature and seed are traced: changing them does not recompile.

    Raises:
      UserError: where a value is impossible, naming it, the reason, and what would work.
    """

    method: str = "refusion"  # refusion | sequential (same model, one token a forward) | ar (models of objective=ar)
    max_new_tokens: int = 0  # tokens to decode at most, rounded up to whole slots; 0: 128, or what still fits
    slot_size: int = 8  # tokens a slot
    serial_blocks: int = 1  # the answer is cut into this many equal runs of slots, finished one after the other
    slot_threshold: float = 0.9  # slots are chosen whose first token is more probable than this
    token_threshold: float = 0.9  # drafted tokens are accepted to which their predecessor gives more than this
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # with a temperature: draw among this many most probable tokens; 0: all
    top_p: float = 1.0  # with a temperature: draw among the fewest tokens that hold this share of the probability
    seed: int = 0  # of the sampling noise; prompt i of a call draws from (seed, i)
    overlap_planning: bool = True  # plan the next slots in the forward that checks these; the same text, sooner
    overlap_infilling: bool = True  # draft a slot's likely rest in the forward that checks it; the same text, sooner
    batch_size: int = 64  # prompts decoded at once, at most
    cache_length: int = 0  # tokens, prompt and answer together, that a row may hold; 0: what the longest prompt needs
    eos_id: int = -1  # end of text; -1: the model's own
    mask_id: int = -1  # mask token; -1: the model's own

    def __post_init__(self):
        def refuse(name: str, why: str):
            raise UserError(f"--decode.{name}={getattr(self, name)}: {why}")

        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            wanted = (int, float) if field.type is float else field.type
            if not isinstance(value, wanted) or (isinstance(value, bool) and field.type is not bool):
                refuse(field.name, f"must be of type {field.type.__name__}")
        if self.method not in METHODS:
            refuse("method", f"unknown; known: {', '.join(METHODS)}")
        for name in ("slot_size", "serial_blocks", "batch_size"):
            if getattr(self, name) < 1:
                refuse(name, "must be at least 1")
        for name in ("max_new_tokens", "temperature", "top_k", "seed", "cache_length"):
            if getattr(self, name) < 0:
                refuse(name, "must be at least 0")
        for name, end in (("seed", 2**32), ("top_k", 2**31)):
            if getattr(self, name) >= end:
                refuse(name, f"must be below {end}")
        if not 0 < self.top_p <= 1:
            refuse("top_p", "must be above 0 and at most 1")
        if self.method == "refusion" and self.new_tokens % self._unit:
            refuse(
                "max_new_tokens",
                f"does not divide into serial_blocks={self.serial_blocks} runs of whole slots of "
                f"slot_size={self.slot_size}; {-(-self.new_tokens // self._unit) * self._unit} would",
            )

    @property
    def new_tokens(self) -> int:
        """max_new_tokens, rounded up to whole slots."""
        return -(-self.max_new_tokens // self.slot_size) * self.slot_size

    def fill_in(self, room: int) -> "DecodeSettings":
        """With max_new_tokens set, where it is 0: as many as fit into `room`, one unit at least and 128 at most."""
        fitting = max(min(room, _MOST_NEW_TOKENS) // self._unit, 1) * self._unit
        return self if self.max_new_tokens else dataclasses.replace(self, max_new_tokens=fitting)

    @property
    def _unit(self) -> int:
        """The answer's length is a multiple of this."""
        return self.slot_size * (self.serial_blocks if self.method == "refusion" else 1)


@dataclasses.dataclass(frozen=True)
class Static:
    """What is compiled in: one program serves all requests with these sizes."""

    method: str
    slot_size: int
    slots: int  # of a row, at most
    block_slots: int  # of a serial block, at most
    widths: tuple[int, ...]  # tokens a row that one forward may feed, rising; each forward takes the least that serves
    cache_length: int  # entries of a row's cache
    chunk: int  # given tokens that one forward of the prefill takes
    eos_id: int
    mask_id: int
    pad_id: int
    num_tokens: int  # ids from here on are padding rows of the vocabulary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dials:
    """What is traced: the settings of each row. Axis: B rows."""

    slot_threshold: jax.Array  # [B] float32
    token_threshold: jax.Array  # [B] float32
    temperature: jax.Array  # [B] float32
    top_k: jax.Array  # [B] int32
    top_p: jax.Array  # [B] float32
    overlap_planning: jax.Array  # [B] bool
    overlap_infilling: jax.Array  # [B] bool

    @classmethod
    def of(cls, rows: Sequence[DecodeSettings]) -> "Dials":
        """The traced part of each row's settings."""
        dtypes = {float: np.float32, int: np.int32, bool: np.bool_}
        kinds = {field.name: field.type for field in dataclasses.fields(DecodeSettings)}
        names = (field.name for field in dataclasses.fields(cls))
        return cls(*(np.array([getattr(row, name) for row in rows], dtypes[kinds[name]]) for name in names))


def token_ids(settings: DecodeSettings, model: ModelConfig) -> dict[str, int]:
    """The ids in Static: the settings' own, or else the model's.

    Raises:
      UserError: where neither settings nor model know the EOS or the mask id, or where one is no id of the model's.
    """
    ids = {}
    for name, own in (("eos_id", model.eos_token_id), ("mask_id", model.mask_token_id)):
        ids[name] = getattr(settings, name) if getattr(settings, name) >= 0 else own
        if not 0 <= ids[name] < model.vocab_size:
            raise UserError(
                f"--decode.{name}={ids[name]} is no token of this model; it has 0 to {model.vocab_size - 1}"
            )
    return ids | {"pad_id": model.pad_token_id, "num_tokens": model.num_tokens}

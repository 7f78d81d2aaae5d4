"""What a user can set about decoding, split into what is compiled in and what is traced."""

import dataclasses

import jax
import jax.numpy as jnp

from refusion_jax.errors import UserError
from refusion_jax.model.transformer import ModelConfig

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
    seed: int = 0  # of the sampling noise; prompt i of a call draws from (seed, i)
    batch_size: int = 64  # prompts decoded at once, at most
    cache_length: int = 0  # tokens, prompt and answer together, that a row may hold; 0: what the model was trained on
    eos_id: int = -1  # end of text; -1: the model's own
    mask_id: int = -1  # mask token; -1: the model's own

    def __post_init__(self):
        def refuse(name: str, why: str):
            raise UserError(f"--decode.{name}={getattr(self, name)}: {why}")

        if self.method not in METHODS:
            refuse("method", f"unknown; known: {', '.join(METHODS)}")
        for name in ("slot_size", "serial_blocks", "batch_size"):
            if getattr(self, name) < 1:
                refuse(name, "must be at least 1")
        for name in ("max_new_tokens", "temperature", "cache_length"):
            if getattr(self, name) < 0:
                refuse(name, "must be at least 0")
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
    """The part of the settings that is compiled in."""

    method: str
    new_tokens: int
    slot_size: int
    serial_blocks: int
    eos_id: int
    mask_id: int
    pad_id: int
    num_tokens: int  # ids from here on are padding rows of the vocabulary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dials:
    """The part of the settings that is traced."""

    slot_threshold: jax.Array  # float32 scalar
    token_threshold: jax.Array  # float32 scalar
    temperature: jax.Array  # float32 scalar


def split_settings(settings: DecodeSettings, model: ModelConfig) -> tuple[Static, Dials]:
    """Fills in the model's own ids and separates static from traced.

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
    static = Static(
        settings.method,
        settings.new_tokens,
        settings.slot_size,
        settings.serial_blocks,
        pad_id=model.pad_token_id,
        num_tokens=model.num_tokens,
        **ids,
    )
    numbers = (settings.slot_threshold, settings.token_threshold, settings.temperature)
    return static, Dials(*(jnp.float32(number) for number in numbers))

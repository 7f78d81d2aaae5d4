"""Decode settings that all decoders have, and those of them that are traced arrays with a value for each row.

A decoder declares its own settings in a subclass of `Settings`. Those that are numbers and may differ between requests
are in its state as `TracedSettings`. Axis: B rows.
"""

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import numpy as np

from refusion_jax.cli.errors import SettingError
from refusion_jax.cli.settings import declared, scope, setting
from refusion_jax.model.shape import ModelConfig

_MOST_NEW_TOKENS = 128  # unless asked for


@dataclasses.dataclass(frozen=True)
class Settings:
    """The decode settings of any decoder; SettingError for an impossible value names it, and what would be possible."""

    # Settings that name further models (auxiliary.py), each with the config keys by which `bench headline` trains one,
    # as far as they differ from the main model's; {run} in a value is the main model's run.
    auxiliary_models: ClassVar[dict[str, dict[str, Any]]] = {}
    slot_size: ClassVar[int] = 1  # a setting in decoders with slots
    draft_length: ClassVar[int] = 0  # a setting in decoders that verify drafts
    block_length: ClassVar[int] = 0  # a setting in decoders that go block by block; 0: the whole answer
    # Settings, from careful to fast, at which `bench headline` measures this decoder.
    points: ClassVar[list[dict[str, Any]]] = [{}]

    method: str = setting(
        "", "Name of the decoder; by default the one for the system that trained the model", scope="compiled"
    )
    max_new_tokens: int = setting(
        0, "Maximum number of tokens to decode, rounded up to whole slots or blocks; 0: 128, or what fits", at_least=0,
        at_most=2**24,
    )  # fmt: skip
    temperature: float = setting(0.0, "Temperature of sampling; 0: greedy", at_least=0, at_most=1e4)
    top_k: int = setting(
        0, "With a temperature: sample from this many most probable tokens; 0: all", at_least=0, below=2**31
    )
    top_p: float = setting(
        1.0, "With a temperature: sample from the fewest tokens whose probabilities sum to this", above=0,
        at_most=1,
    )  # fmt: skip
    seed: int = setting(
        0,
        "Seed of the sampling noise; prompt i of a call uses (seed, i), or (seed, 0) if it gives its own seed",
        at_least=0,
        below=2**32,
    )
    batch_size: int = setting(64, "Prompts decoded at once, at most", scope="batch", at_least=1, at_most=2**20)
    cache_length: int = setting(
        0, "Room for prompt and answer per row, in tokens; 0: as much as the longest needs", scope="batch",
        at_least=0, at_most=2**28,
    )  # fmt: skip
    weights: str = setting(
        "same", "Weights while decoding: same (as --dtype) | int8, with a scale for every output channel",
        scope="compiled", choices=("same", "int8"),
    )  # fmt: skip
    cache: str = setting(
        "same", "Keys and values in the cache: same (as --dtype) | int8, with a scale for every token and head",
        scope="compiled", choices=("same", "int8"),
    )  # fmt: skip
    head_rows: int = setting(
        0, "Output-head rows (vocabulary entries) computed exactly per token, chosen by a cheap int8 product with all; "
        "the others get probability 0; 0: all", scope="compiled", at_least=0, at_most=2**24,
    )  # fmt: skip
    eos_id: int = setting(
        -1, "Id of the end-of-text token; -1: the model's own", scope="compiled", at_least=-1, below=2**31
    )
    mask_id: int = setting(-1, "Id of the mask token; -1: the model's own", scope="compiled", at_least=-1, below=2**31)

    def __post_init__(self):
        for name, own in declared(type(self)).items():
            own.check("decode", name, getattr(self, name))
        self.check()

    def check(self) -> None:
        """Refuses values that do not fit together; for subclasses to override."""

    def refuse(self, name: str, why: str) -> None:
        raise SettingError("decode", name, getattr(self, name), why)

    @classmethod
    def operating_points(cls, new_tokens: int, trained: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The `points`; for decoders to override if they depend on more.

        `new_tokens` is the maximal length of an answer, `trained` the config keys of the system that trained the model.
        """
        return cls.points

    @property
    def changeable(self) -> set[str]:
        """Names of the settings that each request of a batch may have its own value of."""
        return scope(type(self), "row") - self.unread.keys()

    @property
    def unread(self) -> dict[str, str]:
        """Names of the settings that have no effect, each with the one that makes it so; for subclasses to override."""
        return {}

    @property
    def unit(self) -> int:
        """max_new_tokens is rounded up to a multiple of this, such as the size of a slot or block."""
        return 1

    @property
    def multiple(self) -> int:
        """The default of max_new_tokens is a multiple of this."""
        return self.unit

    @property
    def new_tokens(self) -> int:
        """max_new_tokens, rounded up to a multiple of `unit`."""
        return -(-self.max_new_tokens // self.unit) * self.unit

    def for_model(self, model: ModelConfig) -> Self:
        """The settings, with defaults that depend on the model filled in; for subclasses to override."""
        return self

    def traced(self) -> dict[str, float | int | bool]:
        """What decoders read inside `jit`: the numbers that may differ between requests, except the seed."""
        own = declared(type(self))
        names = [n for n in scope(type(self), "row") if not isinstance(own[n].default, str) and n != "seed"]
        return {name: type(own[name].default)(getattr(self, name)) for name in sorted(names)}

    def fill_in(self, room: int, most: int = _MOST_NEW_TOKENS) -> Self:
        """The settings with max_new_tokens filled in: what fits into `room` and `most`, but at least one `multiple`."""
        fitting = max(min(room, most) // self.multiple, 1) * self.multiple
        return self if self.max_new_tokens else dataclasses.replace(self, max_new_tokens=fitting)


@jax.tree_util.register_pytree_with_keys_class
class TracedSettings(types.SimpleNamespace):
    """`Settings.traced` of each row, as attributes [B], so that changing them does not recompile."""

    @classmethod
    def of(cls, rows: Sequence[Settings]) -> Self:
        """The traced settings of some rows, as numpy arrays: float32, int32 or bool."""
        dtypes = {float: np.float32, int: np.int32, bool: np.bool_}
        values = [row.traced() for row in rows]
        return cls(**{name: np.array([v[name] for v in values], dtypes[type(values[0][name])]) for name in values[0]})

    def tree_flatten_with_keys(self):
        names = sorted(vars(self))
        return [(jax.tree_util.GetAttrKey(name), vars(self)[name]) for name in names], tuple(names)

    @classmethod
    def tree_unflatten(cls, names, values):
        return cls(**dict(zip(names, values, strict=True)))


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """Ids of the special tokens, as compiled constants."""

    eos_id: int
    mask_id: int
    pad_id: int
    num_tokens: int  # ids from this one on are padding of the vocabulary

    @classmethod
    def of(cls, settings: Settings, model: ModelConfig) -> Self:
        """The ids in the settings, else the model's; SettingError if one is missing or outside the vocabulary."""
        ids = {}
        for name, own in (("eos_id", model.eos_token_id), ("mask_id", model.mask_token_id)):
            ids[name] = getattr(settings, name) if getattr(settings, name) >= 0 else own
            if not 0 <= ids[name] < model.vocab_size:
                raise SettingError(
                    "decode", name, ids[name], f"is not a token of this model: give one of 0 to {model.vocab_size - 1}"
                )
        if ids["eos_id"] == ids["mask_id"]:
            raise SettingError("decode", "eos_id", ids["eos_id"], "is the mask token, which no answer can end with")
        pad_id = -1 if model.pad_token_id == ids["eos_id"] else model.pad_token_id  # EOS must remain choosable
        return cls(**ids, pad_id=pad_id, num_tokens=model.num_tokens)

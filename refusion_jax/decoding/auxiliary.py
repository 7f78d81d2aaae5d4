"""Auxiliary models, which a decoder runs besides the main one, such as a small one that verifies its drafts.

`Settings.auxiliary_models` lists the settings whose values are the checkpoints of such models. The decoder finds each
of them as an attribute of its model, under the name of the setting.

Axes: B rows, T tokens, U rows of an auxiliary model's output head, V those of the main one.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32

from refusion_jax.cli.errors import SettingError
from refusion_jax.decoding.settings import Settings
from refusion_jax.model.interface import LanguageModel, Wrapper
from refusion_jax.model.shape import ModelConfig

_SAME = ("num_tokens", "eos_token_id")  # must agree; an auxiliary model neither pads nor begins a text


class WithAuxiliaries(Wrapper):
    """A model with auxiliary models as attributes, named as their settings are."""

    def __init__(self, model: LanguageModel, **auxiliary: LanguageModel):
        super().__init__(model)
        self.names = tuple(auxiliary)
        for name, other in auxiliary.items():
            setattr(self, name, other)

    weight_bytes = property(lambda self: sum(model.weight_bytes for model in self.models))  # each decodes in a round

    @property
    def models(self) -> list[LanguageModel]:
        """All of them, the main one first."""
        return [self.model, *(getattr(self, name) for name in self.names)]

    def with_head_rows(self, rows: int) -> LanguageModel:
        return WithAuxiliaries(self.model.with_head_rows(rows), **{name: getattr(self, name) for name in self.names})


def with_auxiliaries(model: LanguageModel, **auxiliary: LanguageModel) -> LanguageModel:
    """The model with auxiliary ones, whose tokenizers nobody has compared; SettingError as in `check_vocabulary`."""
    for name, other in auxiliary.items():
        check_vocabulary(name, "", model.config, other.config)
    return joined(model, auxiliary)


def joined(model: LanguageModel, auxiliary: dict[str, LanguageModel]) -> LanguageModel:
    """`WithAuxiliaries`, or the model itself if there are none."""
    return WithAuxiliaries(model, **auxiliary) if auxiliary else model


def check_vocabulary(name: str, path: str, model: ModelConfig, other: ModelConfig) -> None:
    """Raises SettingError if an auxiliary model has another vocabulary, naming the model and what differs."""
    for key in _SAME:
        if getattr(model, key) != getattr(other, key):
            why = f"is of another vocabulary: {key} is {getattr(other, key)}, not {getattr(model, key)}"
            raise SettingError("decode", name, path, why)


def in_vocabulary(logits: Float32[Array, "B T U"], other: ModelConfig, size: int) -> Float32[Array, "B T V"]:
    """The logits of an auxiliary model for V rows of an output head; tokens that it lacks have probability 0.

    Their logit is the least finite number: multiplied by a weight of 0 it is 0, as -inf would not be.
    """
    token, least = jnp.arange(logits.shape[2]), jnp.finfo(logits.dtype).min
    logits = jnp.where((token < other.num_tokens) & (token != other.mask_token_id), logits, least)
    return jnp.pad(logits, ((0, 0), (0, 0), (0, max(size - len(token), 0))), constant_values=least)[:, :, :size]


def check_auxiliaries(there: LanguageModel | Settings, settings: Settings) -> None:
    """Raises SettingError if a decoder lacks an auxiliary model that it needs, naming the first.

    `there` has them as attributes: a model, or settings that hold their checkpoints.
    """
    for name in settings.auxiliary_models:
        if not getattr(there, name, None):
            settings.refuse(name, f"the decoder {settings.method!r} needs a model here, a run with the same tokenizer")

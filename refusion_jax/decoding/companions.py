"""Models that a decoder has beside the one it writes with, such as a smaller one that checks what is written.

A decoder's settings name them (`Settings.companions`), each by the checkpoint that it is; a decoder finds each as an
attribute of the model, under the name of the setting.
"""

from flax import nnx

from refusion_jax.decoding.settings import Settings
from refusion_jax.model.transformer import ModelConfig, Transformer
from refusion_jax.runtime.errors import SettingError

_SAME = ("num_tokens", "pad_token_id", "bos_token_id", "eos_token_id")


def with_companions(model: Transformer, **companions: Transformer) -> Transformer:
    """The same model with others beside it, by the names that a decoder has for them.

    Raises:
      SettingError: where one has another vocabulary.
    """
    together = nnx.merge(*nnx.split(model))
    for name, other in companions.items():
        check_vocabulary(name, "", model.config, other.config)
        setattr(together, name, other)
    return together


def check_vocabulary(name: str, path: str, model: ModelConfig, other: ModelConfig) -> None:
    """Refuses a companion whose token ids mean something else.

    Raises:
      SettingError: naming what differs.
    """
    for key in _SAME:
        if getattr(model, key) != getattr(other, key):
            raise SettingError(
                "decode",
                name,
                path,
                f"is of another vocabulary: {key} is {getattr(other, key)}, not {getattr(model, key)}",
            )


def missing(settings: Settings) -> list[str]:
    """Names of the companions that settings leave empty."""
    return [name for name in settings.companions if not getattr(settings, name)]


def check_companions(model: Transformer, settings: Settings) -> None:
    """Refuses a model without those that the decoder needs beside it.

    Raises:
      SettingError: naming the first.
    """
    for name in settings.companions:
        if not hasattr(model, name):
            raise SettingError(
                "decode",
                name,
                getattr(settings, name),
                f"the decoder {settings.method!r} needs a model here, a run with the same tokenizer",
            )

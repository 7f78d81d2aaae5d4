"""Further models that a decoder runs beside the main one, such as a small one that verifies its drafts.

`Settings.companions` lists the settings whose values are the checkpoints of such models. The decoder finds each of them
as an attribute of the main model, under the name of its setting.
"""

from flax import nnx

from refusion_jax.cli.errors import SettingError
from refusion_jax.decoding.settings import Settings
from refusion_jax.model.transformer import ModelConfig, Transformer

_SAME = ("num_tokens", "pad_token_id", "bos_token_id", "eos_token_id")


def with_companions(model: Transformer, **companions: Transformer) -> Transformer:
    """The same model with companions as attributes, by the names of the settings.

    Raises:
      SettingError: where a companion has another vocabulary.
    """
    together = nnx.merge(*nnx.split(model))
    for name, other in companions.items():
        check_vocabulary(name, "", model.config, other.config)
        setattr(together, name, other)
    return together


def check_vocabulary(name: str, path: str, model: ModelConfig, other: ModelConfig) -> None:
    """Refuses a companion with another vocabulary.

    Raises:
      SettingError: naming the companion and what differs.
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
    """Names of the companions for which no checkpoint is set."""
    return [name for name in settings.companions if not getattr(settings, name)]


def check_companions(model: Transformer, settings: Settings) -> None:
    """Refuses a model that lacks a companion which the decoder needs.

    Raises:
      SettingError: naming the first that is missing.
    """
    for name in settings.companions:
        if not hasattr(model, name):
            raise lacking(settings, name)


def lacking(settings: Settings, name: str) -> SettingError:
    """What to tell a user who has not given a companion."""
    why = f"the decoder {settings.method!r} needs a model here, a run with the same tokenizer"
    return SettingError("decode", name, getattr(settings, name), why)

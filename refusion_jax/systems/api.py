"""`decode(model, prompts, settings)`: every decoder behind one call."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from refusion_jax.decoding import queue
from refusion_jax.decoding.companions import check_companions
from refusion_jax.decoding.decoder import Decoder
from refusion_jax.decoding.queue import Answer
from refusion_jax.decoding.recording import Recorder
from refusion_jax.decoding.requests import Request, check_same_program, prepare
from refusion_jax.decoding.settings import Settings
from refusion_jax.model.transformer import ModelConfig, Transformer
from refusion_jax.runtime.errors import SettingError, UserError
from refusion_jax.runtime.json_input import JsonError, parse_json
from refusion_jax.runtime.settings import Setting, declared
from refusion_jax.systems.registry import decoders, default_system, find_decoder


class DecodeSettings:
    """`DecodeSettings(method, **settings)` makes the settings of a decoder: see its own class for what it can set.

    One set of settings may be used for several decoders: those of another decoder are checked, and left out.
    """

    def __new__(cls, method: str = "", **settings: Any) -> Settings:
        """The settings of a decoder, by default the default system's first.

        Raises:
          SettingError: where no decoder has a setting, or a value is impossible.
        """
        method = method or next(iter(default_system().decoders))
        own, every = find_decoder(method).settings, all_settings()
        for name in [name for name in settings if name not in declared(own)]:
            if name not in every:
                raise SettingError("decode", name, settings[name], f"no decoder has this; known: {', '.join(every)}")
            every[name].check("decode", name, settings.pop(name))
        return own(method=method, **settings)


def all_settings() -> dict[str, Setting]:
    """The settings of all decoders, by name; where their defaults differ, the help of the first one's says so."""
    found: dict[str, dict[str, Setting]] = {}
    for method, decoder in decoders().items():
        for name, own in declared(decoder.settings).items():
            found.setdefault(name, {})[method] = own
    return {name: _first(by_method) for name, by_method in found.items()}


def _first(by_method: dict[str, Setting]) -> Setting:
    first = next(iter(by_method.values()))
    others = [f"{own.default} for {method}" for method, own in by_method.items() if own.default != first.default]
    return dataclasses.replace(first, help=f"{first.help}; unless set, {', '.join(others)}") if others else first


def check_settings(method: str, given: Mapping[str, Any]) -> None:
    """Refuses settings that a decoder does not have.

    Raises:
      SettingError: naming the first, and those that it has.
    """
    own = declared(find_decoder(method).settings)
    for name in given:
        if name not in own:
            raise SettingError("decode", name, given[name], f"the decoder {method!r} has only {', '.join(own)}")


def read_settings(pairs: Sequence[str], flag: str) -> dict[str, Any]:
    """Settings from NAME=VALUE pairs.

    Args:
      pairs: as they were given.
      flag: by which, for messages.

    Raises:
      UserError: where a pair names no setting, or its value is of no type that the setting has.
    """
    known, settings = all_settings(), {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        if name not in known:
            raise UserError(f"{flag}: {name!r} is no setting; known: {', '.join(known)}")
        try:
            settings[name] = (
                text if isinstance(known[name].default, str) else parse_json(text.encode(errors="surrogatepass"))
            )
        except JsonError as error:
            raise UserError(f"{flag}: {text!r} is no number, true or false") from error
    return settings


@dataclasses.dataclass(frozen=True)
class Decoded:
    """The fields of `Answer`, each as a list with one entry a prompt."""

    tokens: list[list[int]]
    commit_order: list[list[int]]
    commit_tokens: list[list[int]]
    forwards: list[int]
    rounds: list[int]
    finish_reason: list[str]


def decode(model: Transformer, prompts: Sequence[Sequence[int] | Request], settings: Settings) -> Decoded:
    """Decodes prompts in batches, on the device from first token to last.

    A prompt's answer does not depend on the prompts around it. One compilation serves all calls with the same sizes,
    whatever the thresholds, temperature, seed and prompts.

    Args:
      model: from `load_model`; for a decoder that needs further models, with them beside it (`with_companions`).
      prompts: token ids, at least one each; or requests, for templates with gaps.
      settings: how to decode, from `DecodeSettings`.

    Raises:
      UserError: where a prompt is empty, holds an id the model does not have, or does not fit in the cache.
    """
    requests = prepare(prompts, settings, model.config)
    answers = dict(stream(model, requests)) if requests else {}
    in_order = [answers[i] for i in range(len(requests))]
    return Decoded(**{f.name: [getattr(a, f.name) for a in in_order] for f in dataclasses.fields(Answer)})


def stream(
    model: Transformer,
    requests: Sequence[Request],
    decoder: Decoder | None = None,
    is_over: Callable[[int, list[int]], bool] | None = None,
    recorder: Recorder | None = None,
) -> Iterator[tuple[int, Answer]]:
    """Decodes requests from `prepare`, one at least, as a queue; yields (index, answer) as they finish.

    Args:
      model: from `load_model`.
      requests: their settings name the decoder and the batch size.
      decoder: sizes to compile for, where several calls are to share them; by default what these requests need.
      is_over: says of (index, tokens so far) whether an answer may end there, as for `queue.stream`.
      recorder: is told what all forwards feed.

    Raises:
      UserError: where the decoder cannot serve them together.
    """
    settings = requests[0].settings
    check_companions(model, settings)
    decoder = decoder or decoder_for(requests, model.config)
    model = model.rounded(settings.weights, settings.cache).with_head_rows(settings.head_rows)
    return queue.stream(model, decoder, requests, settings.batch_size, is_over, recorder)


def decoder_for(requests: Sequence[Request], model: ModelConfig) -> Decoder:
    """The decoder that the requests' settings name, with the least sizes that serve them.

    Raises:
      UserError: where it cannot serve them together.
    """
    check_same_program(requests)
    return find_decoder(requests[0].settings.method).for_requests(requests, model)

"""`decode(model, prompts, settings)`, one function for all decoders."""

import collections
import dataclasses
import difflib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from refusion_jax.cli.errors import SettingError, UserError
from refusion_jax.cli.settings import Setting, declared, scope
from refusion_jax.data.interface import Tokenizer
from refusion_jax.decoding import queue
from refusion_jax.decoding.auxiliary import check_auxiliaries
from refusion_jax.decoding.constrained import Constrained, batch_type
from refusion_jax.decoding.decoder import Decoder
from refusion_jax.decoding.player import Decodings
from refusion_jax.decoding.prompts import to_record
from refusion_jax.decoding.requests import Answer, Request, prepare
from refusion_jax.decoding.settings import Settings
from refusion_jax.decoding.stops import Stops
from refusion_jax.decoding.trajectory import Trajectory
from refusion_jax.distributed.json_files import parse_json
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.one_cpu import for_one_cpu
from refusion_jax.model.shape import ModelConfig
from refusion_jax.systems.registry import decoders, default_decoder, find_decoder

_NO_STOPS = Stops(())


class _Unnamed(str):
    """The name of the default decoder, which nobody has asked for."""


def DecodeSettings(method: str = "", **settings: Any) -> Settings:  # noqa: N802  it stands for the class of each decoder
    """The settings of a decoder, by default of the default system's, which `decode` refuses for models of another.

    The same keywords may be used for several decoders: settings that only other decoders have are checked and dropped.
    SettingError for one that no decoder has, or an impossible value.
    """
    method = method or _Unnamed(default_decoder(None))
    # Decoders cannot be compiled for scalars of numpy or JAX, only for Python's.
    settings = {name: x.item() if getattr(x, "shape", None) == () else x for name, x in settings.items()}
    own, every = find_decoder(method).settings, all_settings()
    for name in [name for name in settings if name not in declared(own)]:
        if name not in every:
            raise SettingError("decode", name, settings[name], f"no decoder has this; known: {', '.join(every)}")
        every[name].check("decode", name, settings.pop(name))
    return own(method=method, **settings)


def all_settings() -> dict[str, Setting]:
    """The settings of all decoders by name; their help says which decoders have them, and what they mean there."""
    found: dict[str, dict[str, Setting]] = {}
    for method, decoder in decoders().items():
        for name, own in declared(decoder.settings).items():
            found.setdefault(name, {})[method] = own
    return {name: _joined(by_method) for name, by_method in found.items()}


def _joined(by_method: dict[str, Setting]) -> Setting:
    """The first decoder's setting, with the help texts of all decoders in one."""
    first, methods_of = next(iter(by_method.values())), collections.defaultdict(list)
    for method, own in sorted(by_method.items(), key=lambda item: item[1].default == first.default):
        default = "" if own.default == first.default else f" (default: {own.default})"
        methods_of[own.help + default].append(method)
    if len(methods_of) == 1 and len(by_method) == len(decoders()):
        return first
    return dataclasses.replace(first, help="; ".join(f"{', '.join(m)}: {text}" for text, m in methods_of.items()))


def own_settings(method: str, given: Mapping[str, Any]) -> Settings:
    """`DecodeSettings` of a decoder, but SettingError for the first setting that it does not have or does not read."""
    own = declared(find_decoder(method).settings)
    for name in given:
        if name not in own:
            raise SettingError("decode", name, given[name], f"the decoder {method!r} has only {', '.join(own)}")
    settings = DecodeSettings(**given | {"method": method})
    for name, other in settings.unread.items():
        if name in given and given[name] != own[name].default:
            settings.refuse(name, f"has no effect with {other}")
    return settings


def read_settings(pairs: Sequence[str], flag: str) -> dict[str, Any]:
    """Settings from NAME=VALUE pairs, given by `flag`; UserError for an unknown name or a value of the wrong type."""
    known, settings = all_settings(), {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            meant = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            raise UserError(f"{flag}: {name!r} is not a setting; {meant}")
        try:
            is_text = isinstance(known[name].default, str)
            settings[name] = text if is_text else parse_json(os.fsencode(text), bool | int | float, flag)
        except UserError as error:
            raise UserError(f"{flag}: {text!r} is not a number, true or false") from error
    return settings


@dataclasses.dataclass(frozen=True)
class Decoded:
    """The fields of `Answer`, each as a list with one entry for each prompt."""

    tokens: list[list[int]]
    commit_order: list[list[int]]
    commit_tokens: list[list[int]]
    forwards: list[int]
    rounds: list[int]
    finish_reason: list[str]


def decode(model: LanguageModel, prompts: Sequence[Sequence[int] | Request], settings: Settings) -> Decoded:
    """Decodes prompts in batches, with the whole loop on the device.

    The answer to a prompt does not depend on the other prompts. Calls with the same sizes share one compilation,
    whatever their thresholds, temperature, seed and prompts.

    Args:
      model: from `load_model`; with auxiliary models if the decoder needs them (`with_auxiliaries`).
      prompts: token ids, at least one each; or requests, for templates with gaps.
      settings: from `DecodeSettings`.

    Raises:
      UserError: if a prompt is empty, has an id outside the vocabulary, or does not fit into the cache.
    """
    requests = prepare(prompts, settings, model.config)
    answers = dict(stream(model, requests)) if requests else {}
    in_order = [answers[i] for i in range(len(requests))]
    return Decoded(**{f.name: [getattr(a, f.name) for a in in_order] for f in dataclasses.fields(Answer)})


def stream(
    model: LanguageModel,
    requests: Sequence[Request],
    decoder: Decoder | None = None,
    watch: Callable[[int, Answer], object] | None = None,
    every: int = queue.LOOK,
    record: Callable[[int, Trajectory], object] | None = None,
) -> Iterator[tuple[int, Answer]]:
    """Decodes a queue of requests from `prepare`, at least one, and yields (index, answer) as answers finish.

    Their settings name the decoder and the batch size; `watch`, `every` and `record` are those of `queue.stream`. By
    default the decoder is that of `decoder_for`; with another one several calls share compiled sizes.
    """
    settings = requests[0].settings
    if isinstance(settings.method, _Unnamed) and settings.method != (fitting := default_decoder(model.trained_by)):
        why = f"and the model was trained with objective={model.trained_by}: give method={fitting!r}, for example"
        raise UserError(f"DecodeSettings: no method is named, {why}")
    check_auxiliaries(model, settings)
    decoder = decoder or decoder_for(requests, model.config)
    model = as_decoded(model, settings)
    return queue.stream(model, decoder, requests, settings.batch_size, watch, every, record, batch_type(decoder))


def as_decoded(model: LanguageModel, settings: Settings) -> LanguageModel:
    """The model with the precision, output head and memory layout for decoding."""
    model = for_one_cpu(model, settings.weights).rounded(settings.weights, settings.cache)
    return model.with_head_rows(settings.head_rows)


def play(
    model: LanguageModel, requests: Sequence[Request], tokenizer: Tokenizer | None, name: str, stops: Stops = _NO_STOPS
) -> Decodings:
    """Decodes requests from `prepare` for the player's page, which calls the system `name`; see `stream`."""
    decodings = Decodings(name, tokenizer)
    for at, answer in stream(model, requests, record=decodings.record):
        kept = to_record(at, answer, tokenizer, stops)["tokens"]
        decodings.add(at, requests[at], answer, len(kept))
    return decodings


def decoder_for(requests: Sequence[Request], model: ModelConfig) -> Decoder:
    """The decoder that the settings of the requests name, with the smallest sizes that serve them.

    For requests with grammars it is a decoder that follows them, for the same models. UserError if it cannot serve the
    requests together.
    """
    settings = requests[0].settings
    decoder = find_decoder(settings.method)
    for request in requests:
        for name in ("method", *sorted(scope(type(settings), "compiled") - {"method"})):
            if getattr(request.settings, name) != getattr(settings, name):
                raise UserError(f"{request.name}: {name} must be the same for all prompts of a call")
        if request.template and not decoder.fills_gaps:
            why = "only writes after what is given; it cannot fill templates"
            raise UserError(f"{request.name}: the decoder {settings.method!r} {why}")
    if any(request.grammar is not None for request in requests):
        return Constrained.of(decoder, requests, model)
    return decoder.for_requests(requests, model)

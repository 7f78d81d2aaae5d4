"""What lies at a path, as for `load_model`: a model's shape, tokenizer, system, decoder, and a stamp of its weights."""

import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging
from etils import epath

from refusion_jax.checkpoints import checksums, run_directory
from refusion_jax.checkpoints.weights import stored_dtype
from refusion_jax.cli.errors import SettingError, UserError, naming
from refusion_jax.cli.settings import scope
from refusion_jax.data.fast_tokenizer import MASK_TOKEN, find_tokenizer_file, load_tokenizer_file
from refusion_jax.data.interface import Tokenizer
from refusion_jax.data.tokenizer import MASK_PIECE
from refusion_jax.decoding.requests import Request
from refusion_jax.decoding.settings import Settings
from refusion_jax.distributed.storage import absolute, opened
from refusion_jax.model import huggingface, huggingface_config, peft
from refusion_jax.model.shape import ModelConfig
from refusion_jax.systems.api import own_settings
from refusion_jax.systems.interface import PLAIN
from refusion_jax.systems.registry import decoders_for, default_decoder, releases, system_of

_END = 1 << 20  # bytes of a file at its beginning, and at its end


@dataclasses.dataclass(frozen=True)
class Location:
    """What a path names: a model of Hugging Face or of a run, perhaps with adapters of `peft` for it."""

    directory: epath.Path  # of Hugging Face, or of the run
    step: epath.Path | None  # of a run: the directory of the step in the path, or of the newest; None: of Hugging Face
    adapters: epath.Path | None  # the path itself, if it is a directory of `peft`; the others are then of their base

    @property
    def base(self) -> epath.Path:
        """The model without the adapters of `peft`; of a run, its step, since the run may save others meanwhile."""
        return self.step or self.directory

    @property
    def path(self) -> epath.Path:
        """The model, with the adapters."""
        return self.adapters or self.base

    @property
    def tokenizer(self) -> epath.Path:
        """The directory of the tokenizer, if it has one; adapters may have their own."""
        return self.adapters if self.adapters and find_tokenizer_file(self.adapters) else self.directory

    @property
    def run(self) -> epath.Path | None:
        """The directory of the run of ours that trained the model; None: it was trained elsewhere."""
        is_own = self.step and not self.adapters and (self.directory / "config.json").exists()
        return self.directory if is_own else None


def locate(path: epath.Path) -> Location:
    """Finds out what a path names, which is as for `load_model`; UserError if it is no model."""
    adapters, path = (path, peft.base_of(path)) if peft.is_peft(path) else (None, path)
    directory, step = (path, None) if huggingface_config.is_huggingface(path) else run_directory.find_step(path)
    return Location(directory, step, adapters)


def read_model_config(path: epath.Path) -> ModelConfig:
    """The shape of the model at a path; UserError if there is none."""
    place = locate(path)
    if place.step:
        return run_directory.read_model_config(place.directory)
    return huggingface_config.read_model_config(place.base, find_tokenizer(path), releases=releases())


def read_dtype(path: epath.Path) -> str:
    """The dtype that holds a model's weights without rounding, "float32" or "bfloat16"; UserError without a model."""
    place = locate(path)
    return stored_dtype(place.base) if place.step else huggingface.read_dtype(place.base)


def load_tokenizer(path: epath.PathLike) -> Tokenizer:
    """The tokenizer of a run or model; UserError if it has none."""
    if (tokenizer := find_tokenizer(epath.Path(path))) is None:
        raise UserError(f"{path} holds no tokenizer.model, tokenizer.json or vocab.json: put its tokenizer there")
    return tokenizer


def find_tokenizer(path: epath.Path, mask_token_id: int | None = None) -> Tokenizer | None:
    """The tokenizer of a run or model, if it has one; by default with the model's mask token."""
    place = locate(path)
    if (file := find_tokenizer_file(place.tokenizer)) is None:
        return None
    if mask_token_id is None and not place.step:
        mask_token_id = huggingface_config.read_config(place.base, releases()).mask_token_id
    elif mask_token_id is None and (place.directory / "model.json").exists():
        mask_token_id = run_directory.read_model_config(place.directory).mask_token_id
    return load_tokenizer_file(file, MASK_PIECE if mask_token_id in (None, -1) else mask_token_id)


def find_own_tokenizer(path: epath.Path) -> epath.Path | None:
    """The file of the tokenizer of a run or model, if there is one."""
    return find_tokenizer_file(locate(path).tokenizer) if path.is_dir() else None


def find_objective(path: epath.Path) -> str | None:
    """The system that trained a model, if known.

    A Hugging Face directory whose config.json names no mask token is a plain language model, as one line says, unless
    its tokenizer has ReFusion's. Another one in the vocabulary, such as Gemma's, need not have been trained.
    """
    place = locate(path)
    if place.adapters and (trained_by := peft.find_objective(place.adapters)):
        return trained_by
    if place.step:
        return run_directory.read_objective(place.directory)
    config = huggingface_config.read_config(place.base, releases())
    if config.refusion_jax.objective or config.mask_token_id is not None:
        return config.refusion_jax.objective
    tokenizer = find_tokenizer(place.base)
    if tokenizer and not tokenizer.adds_mask and tokenizer.name_of(tokenizer.mask_id) == MASK_TOKEN:
        return None
    plain = system_of(default_decoder(PLAIN)).name
    line = "%s/config.json names no mask token: a plain language model, which nobody has adapted; %s decodes it"
    logging.log_first_n(logging.WARNING, line, 1, place.base, plain)
    return plain


def choose_method(checkpoint: epath.Path, method: str | None) -> str:
    """Name of the decoder: the requested one, or the first for the system that trained the model.

    SettingError if the model was not trained for the decoder; of adapters that do not say who trained them, any may be
    requested.
    """
    if (objective := find_objective(checkpoint)) is None:
        return method or default_decoder(None)
    with naming(f"{checkpoint}"):
        default, fitting = default_decoder(objective), decoders_for(objective)
    adapters = locate(checkpoint).adapters
    if method and method not in fitting and (adapters is None or peft.find_objective(adapters)):
        why = f"{checkpoint} was trained with objective={objective}, which decodes with {' or '.join(fitting)}"
        raise SettingError("decode", "method", method, why)
    return method or default


def chosen_settings(checkpoint: epath.Path, given: dict[str, Any]) -> Settings:
    """The given decode settings, for the decoder of `choose_method`; SettingError for settings that it lacks."""
    return own_settings(choose_method(checkpoint, given.get("method")), given)


def weights_stamp(path: epath.PathLike, settings: Settings) -> list[tuple[float | str, ...]]:
    """A stamp that changes whenever the weights do, those of auxiliary models included.

    It has (name, checksum, bytes) for files of our checkpoints, wherever they are; (path, time, bytes) for others,
    and for their configs, which are edited by hand and say what ends a text, among other things.
    """
    places = [path, *filter(None, (getattr(settings, name) for name in settings.auxiliary_models))]
    return [entry for place in places for entry in _stamp(epath.Path(place), _stat)]


def copy_stamp(path: epath.Path) -> str:
    """A text by which hosts tell that they read copies of one model, at little cost.

    It has the checksums that our checkpoints list; of other models the config, and the sizes and both ends of files.
    """
    return json.dumps([*filter(None, _stamp(path, _ends))])


def _stamp(path: epath.Path, stamp: Callable[[epath.Path], tuple[float | str, ...]]) -> list[tuple[float | str, ...]]:
    place = locate(path)
    if place.adapters or not place.step:
        files = sorted(file for file in place.path.iterdir() if file.suffix in (".safetensors", ".json"))
        return [*map(stamp, files), *(_stamp(place.base, stamp) if place.adapters else [])]
    listed = sorted(checksums.listed(place.step).items())
    own = [(name, value, size) for name, (size, value) in listed if name.startswith("params")]
    own = own or [stamp(place.step)]  # an old checkpoint, without checksums
    adapted = run_directory.read_adapters(place.directory)
    with naming(f"{path} holds adapters of another model"):
        return own + (_stamp(adapted[1], stamp) if adapted else [])


def _stat(path: epath.Path) -> tuple[str, float, int]:
    return str(absolute(path)), path.stat().mtime, path.stat().length


def _ends(path: epath.Path) -> tuple[str | int, ...]:
    if path.suffix != ".safetensors" and path.name != "config.json":  # others may name what lies elsewhere on each host
        return ()
    with opened(path) as content:
        first, size = content.read(_END), content.seek(0, os.SEEK_END)
        content.seek(max(0, size - _END))
        return path.name, size, zlib.crc32(content.read(), zlib.crc32(first))


def describe_call(
    path: epath.PathLike, ids: Sequence[object], requests: Sequence[Request], *others: Any
) -> dict[str, str]:
    """What the answers of a call depend on, by name, for its journal; `others` are settings outside the decoder."""
    whole_batch = scope(type(requests[0].settings), "batch")
    settings = [
        {key: x for key, x in dataclasses.asdict(request.settings).items() if key not in whole_batch}
        for request in requests
    ]
    parts = {
        "model": weights_stamp(path, requests[0].settings),
        "prompts": [(id, own.prompt, own.template, own.noise) for id, own in zip(ids, requests, strict=True)],
        "settings": [settings, *others],
    }
    return {name: hashlib.blake2b(json.dumps(x).encode(), digest_size=16).hexdigest() for name, x in parts.items()}

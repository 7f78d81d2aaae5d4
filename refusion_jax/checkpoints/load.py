"""Loads models and tokenizers from runs and from Hugging Face directories."""

import dataclasses
import functools
import hashlib
import json
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath
from flax import nnx

from refusion_jax.checkpoints import checksums, run_directory
from refusion_jax.checkpoints.directory import find_step
from refusion_jax.checkpoints.weights import Reader, checked, open_params, restore_params, stored_dtype
from refusion_jax.cli.errors import SettingError, UserError, check_made, naming
from refusion_jax.cli.settings import declared, scope
from refusion_jax.data.fast_tokenizer import find_tokenizer_file, first_difference, load_tokenizer_file
from refusion_jax.data.interface import Tokenizer
from refusion_jax.data.tokenizer import MASK_PIECE
from refusion_jax.decoding.auxiliary import check_auxiliaries, check_vocabulary, with_auxiliaries
from refusion_jax.decoding.requests import Request
from refusion_jax.decoding.settings import Settings
from refusion_jax.distributed.sharding import make_mesh
from refusion_jax.distributed.storage import absolute
from refusion_jax.model import huggingface, huggingface_config, peft
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.lora import Lora, combine
from refusion_jax.model.shape import OPTIONAL, ModelConfig
from refusion_jax.model.transformer import Transformer, abstract_transformer
from refusion_jax.systems.api import own_settings
from refusion_jax.systems.interface import PLAIN
from refusion_jax.systems.registry import decoders_for, default_decoder, default_system, releases, system_of

# Keys of config.model for its size; `vocab_size` may exceed that of the weights to start from.
SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    "intermediate_size",
)


def load_model(
    path: epath.PathLike,
    dtype: str = "float32",
    mesh: jax.sharding.Mesh | None = None,
    weights: str = "same",
) -> Transformer:
    """Loads a trained model onto one device or a mesh.

    Args:
      path: the directory of a run or its checkpoints/, for the newest checkpoint; the directory of one step; a Hugging
        Face directory of one of `model.families.FAMILIES`, or as the authors of a system released it; or a directory of
        adapters that `peft` wrote.
      dtype: of weights and computation, "float32" or "bfloat16".
      mesh: from `sharding.make_mesh`; the first device by default.
      weights: "same", or "int8": rounded in host memory, so that the devices never hold the unrounded weights.

    Raises:
      UserError: if there is no model that we can read, or the mesh does not fit its weights.
    """
    if (name := dtype if isinstance(dtype, str) else jnp.dtype(dtype).name) not in ("float32", "bfloat16"):
        raise UserError(f"dtype={name}: must be float32 or bfloat16")
    declared(Settings)["weights"].check("decode", "weights", weights)
    mesh = mesh or make_mesh({}, jax.devices()[:1])
    check_made("mesh", mesh, jax.sharding.Mesh, "make_mesh")
    path = epath.Path(path)
    config = read_model_config(path)
    graphdef, target = abstract_transformer(config, dtype, mesh, weights=weights)
    if weights == "same":
        return nnx.merge(graphdef, load_params(path, target))
    try:
        memory = jax.local_devices(backend="cpu")[:1]
    except RuntimeError as error:
        why = "weights are rounded in the host's memory, for JAX a device of its own: JAX_PLATFORMS must name cpu, too"
        raise SettingError("decode", "weights", weights, why) from error
    unrounded, on_host = abstract_transformer(config, dtype, make_mesh({}, memory))
    rounded = nnx.state(nnx.merge(unrounded, load_params(path, on_host)).rounded(weights))
    places = jax.tree.map(lambda x: x.sharding, target)
    return nnx.merge(graphdef, jax.device_put(jax.device_get(nnx.to_pure_dict(rounded)), places))


def load_for(
    path: epath.PathLike, settings: Settings, dtype: str = "float32", mesh: jax.sharding.Mesh | None = None
) -> LanguageModel:
    """`load_model`, with the auxiliary models that a decoder's settings name; all must share one tokenizer."""
    auxiliary = {}
    check_auxiliaries(settings, settings)
    for name in settings.auxiliary_models:
        other = getattr(settings, name)
        check_vocabulary(name, other, read_model_config(epath.Path(path)), read_model_config(epath.Path(other)))
        tokenizers = [find_tokenizer(epath.Path(place)) for place in (path, other)]
        if all(tokenizers) and (token := first_difference(*tokenizers)) is not None:
            raise SettingError("decode", name, other, f"has another tokenizer than {path}: token {token} is other text")
        auxiliary[name] = load_model(other, dtype, mesh, settings.weights)
    return with_auxiliaries(load_model(path, dtype, mesh, settings.weights), **auxiliary)


def is_foreign(path: epath.Path) -> bool:
    """Whether a directory has the format of other software: of Hugging Face, or of `peft` for adapters."""
    return huggingface_config.is_huggingface(path) or peft.is_peft(path)


def newest_step(path: epath.Path) -> epath.Path:
    """The directory of the step that a path names now, while its run may save others; of another kind, the path."""
    return path if is_foreign(path) else find_step(path)[1]


def weights_stamp(path: epath.PathLike, settings: Settings) -> list[tuple[str, float | str, int]]:
    """A stamp that changes whenever the weights do, those of auxiliary models included.

    It has (name, checksum, bytes) for files of our checkpoints, wherever they are; (path, time, bytes) for others,
    and for their configs, which are edited by hand and say what ends a text, among other things.
    """
    places = [path, *filter(None, (getattr(settings, name) for name in settings.auxiliary_models))]
    return [entry for place in places for entry in _stamp(epath.Path(place))]


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


def _stamp(path: epath.Path) -> list[tuple[str, float | str, int]]:
    if is_foreign(path):
        files = sorted(file for file in path.iterdir() if file.suffix in (".safetensors", ".json"))
        own = [(str(absolute(file)), file.stat().mtime, file.stat().length) for file in files]
        return own + (_stamp(peft.base_of(path)) if peft.is_peft(path) else [])
    workdir, step = find_step(path)
    listed = {name: found for name, found in checksums.listed(step).items() if name.startswith("params")}
    own = [(name, value, size) for name, (size, value) in sorted(listed.items())]
    own = own or [(str(absolute(step)), step.stat().mtime, step.stat().length)]  # an old checkpoint, without checksums
    adapted = run_directory.read_adapters(workdir)
    return own + (_stamp(adapted[1]) if adapted else [])


def read_model_config(path: epath.Path) -> ModelConfig:
    """The shape of the model at a path; UserError if there is none."""
    place = _model_place(path)
    if huggingface_config.is_huggingface(place):
        return huggingface_config.read_model_config(place, find_tokenizer(path), releases=releases())
    return run_directory.read_model_config(find_step(place)[0])


def load_params(path: epath.Path, target: dict[str, Any]) -> dict[str, Any]:
    """Weights with the shapes, dtypes and shardings of the target."""
    if huggingface_config.is_huggingface(path):
        return huggingface.load_params(path, target, releases=releases())
    if peft.is_peft(path):
        lora, trained = peft.load(path, target)
        return checked(path, _merge(lora, load_params(peft.base_of(path), target), trained, target))
    adapted = run_directory.read_adapters(find_step(path)[0])
    if adapted is None:
        return restore_params(path, target)
    lora, base = adapted
    if not base.is_dir():
        raise UserError(f"{path} holds adapters of {base}, which is not a directory from here")
    trained = restore_params(path, lora.targets_like(target))
    return _merge(lora, combine(lora.without_adapters(trained), load_params(base, target)), trained, target)


def open_weights(path: epath.PathLike) -> Reader:
    """A reader of one part of a weight at a time, so that a part of a model takes no memory for the rest of it.

    For a run with adapters, or a directory of adapters, all weights are in memory. The path is as for `load_model`.
    """
    path = epath.Path(path)
    target = abstract_transformer(read_model_config(path), "float32", make_mesh({}, jax.devices()[:1]))[1]
    if huggingface_config.is_huggingface(path):
        return huggingface.open_params(path, target, releases=releases())
    if not peft.is_peft(path) and run_directory.read_adapters(find_step(path)[0]) is None:
        return open_params(path, target)
    return reader_of(load_model(path))


def reader_of(model: Transformer) -> Reader:
    """A reader like that of `open_weights`, for a model in memory."""
    params = nnx.to_pure_dict(nnx.state(model))
    return lambda name, part: np.asarray(functools.reduce(operator.getitem, name, params)[part])


def read_trained(path: epath.Path) -> tuple[Lora, dict[str, Any], epath.Path]:
    """(description of the adapters, trained weights, path of the base) of a run; UserError if it has no adapters."""
    adapted = run_directory.read_adapters(find_step(path)[0])
    if adapted is None:
        raise UserError(f"{path} has no low-rank adapters: nothing of --config.lora.rank above 0")
    lora, base = adapted
    config = read_model_config(path)
    _, target = abstract_transformer(config, "float32", make_mesh({}, jax.devices()[:1]))
    return lora, restore_params(path, lora.targets_like(target)), base


def _merge(lora: Lora, params: dict[str, Any], trained: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    places = jax.tree.map(lambda x: x.sharding, target)
    return jax.jit(lora.merge, donate_argnums=0, out_shardings=places)(params, trained)


def _model_place(path: epath.Path) -> epath.Path:
    """The directory of the model: the one that adapters adapt, or the path itself."""
    return peft.base_of(path) if peft.is_peft(path) else path


def read_dtype(path: epath.Path) -> str:
    """The dtype that holds a model's weights without rounding, "float32" or "bfloat16"; UserError without a model."""
    path = _model_place(path)
    return huggingface.read_dtype(path) if huggingface_config.is_huggingface(path) else stored_dtype(path)


def load_tokenizer(path: epath.PathLike) -> Tokenizer:
    """The tokenizer of a run or model; the path is as for `load_model`; UserError if it has none."""
    tokenizer = find_tokenizer(epath.Path(path))
    if tokenizer is None:
        raise UserError(f"{path} holds no tokenizer.model, tokenizer.json or vocab.json: put its tokenizer there")
    return tokenizer


def find_own_tokenizer(path: epath.Path) -> epath.Path | None:
    """The file of the tokenizer of a run or model, if there is one."""
    return find_tokenizer_file(tokenizer_place(path)) if path.is_dir() else None


def check_fits(
    path: epath.Path,
    config: ModelConfig,
    tokenizer: Tokenizer,
    flag: str = "init_from",
    alike: Sequence[str] = (),
) -> None:
    """Refuses weights of a model of another shape, or whose token ids have other meanings.

    `config` is that of the model to be initialized, `tokenizer` that of the data, `flag` the key that names the path.
    Compares the keys in `alike`, by default all keys on which weights depend.
    """
    there, own = read_model_config(path), find_tokenizer(path)
    if own and (token := first_difference(own, tokenizer)) is not None:
        raise UserError(
            f"--config.{flag}={path}: its tokenizer is another one than that of the data (token {token} is "
            f"{own.decode([token])!r} there, {tokenizer.decode([token])!r} here); name it with "
            f"--config.data.tokenizer, and prepare data with it"
        )
    positions = "rope_theta rope_scaling local_rope"
    others = [key for key in OPTIONAL if key != "router_aux_loss_coef"]
    for key in alike or [*SIZES, *positions.split(), *others, "rms_norm_eps", "tie_word_embeddings", "family"]:
        if getattr(there, key) != getattr(config, key):
            raise UserError(f"--config.model.{key}={getattr(config, key)}: {path} has {getattr(there, key)}")
    if alike:
        return
    if there.local_rope and there.max_position_embeddings < config.max_position_embeddings:
        window = there.max_position_embeddings
        raise UserError(f"--config.row_length must be at most {window}, to which local layers of {path} attend")
    is_padded = huggingface_config.is_huggingface(_model_place(path)) and there.vocab_size < config.vocab_size
    if there.vocab_size != config.vocab_size and not is_padded:
        raise UserError(f"--config.model.vocab_size={config.vocab_size}: {path} has {there.vocab_size}")


def find_tokenizer(path: epath.Path, mask_token_id: int | None = None) -> Tokenizer | None:
    """The tokenizer of a run or model, if it has one; by default with the model's mask token."""
    file, model = find_tokenizer_file(tokenizer_place(path)), tokenizer_place(_model_place(path))
    if file is None:
        return None
    if mask_token_id is None and huggingface_config.is_huggingface(model):
        mask_token_id = huggingface_config.read_config(model, releases()).mask_token_id
    elif mask_token_id is None and (model / "model.json").exists():
        mask_token_id = run_directory.read_model_config(model).mask_token_id
    return load_tokenizer_file(file, MASK_PIECE if mask_token_id in (None, -1) else mask_token_id)


def tokenizer_place(path: epath.Path) -> epath.Path:
    """The directory of the tokenizer of a run or model, if any; adapters may have their own."""
    if peft.is_peft(path) and find_tokenizer_file(path):
        return path
    path = _model_place(path)
    return path if huggingface_config.is_huggingface(path) else find_step(path)[0]


def find_objective(path: epath.Path) -> str | None:
    """The system that trained a model, if known; the path is as for `load_model`.

    A Hugging Face directory without a mask token is a plain language model; one line says so.
    """
    if peft.is_peft(path) and (trained_by := peft.find_objective(path)):
        return trained_by
    path = _model_place(path)
    if not huggingface_config.is_huggingface(path):
        return run_directory.read_objective(find_step(path)[0])
    config = huggingface_config.read_config(path, releases())
    if config.refusion_jax.objective or config.mask_token_id is not None:
        return config.refusion_jax.objective
    if (tokenizer := find_tokenizer(path)) and not tokenizer.adds_mask:
        return None
    plain = system_of(default_decoder(PLAIN)).name
    line = "%s has no mask token: a plain language model, which nobody has adapted; %s decodes it"
    logging.log_first_n(logging.WARNING, line, 1, path, plain)
    return plain


def choose_method(checkpoint: epath.Path, method: str | None) -> str:
    """Name of the decoder: the requested one, or the first for the system that trained the model.

    SettingError if the model was not trained for the decoder.
    """
    objective = find_objective(checkpoint)
    if objective is None:
        return method or default_decoder(default_system().name)
    with naming(f"{checkpoint}"):
        default, fitting = default_decoder(objective), decoders_for(objective)
    if method and method not in fitting:
        why = f"{checkpoint} was trained with objective={objective}, which decodes with {' or '.join(fitting)}"
        raise SettingError("decode", "method", method, why)
    return method or default


def chosen_settings(checkpoint: epath.Path, given: dict[str, Any]) -> Settings:
    """The given decode settings, for the decoder of `choose_method`; SettingError for settings that it lacks."""
    return own_settings(choose_method(checkpoint, given.get("method")), given)

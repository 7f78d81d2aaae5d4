"""Loads the weights of models, from runs and from directories of Hugging Face and of `peft`."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx

from refusion_jax.checkpoints.contents import find_objective, find_tokenizer, locate, read_model_config
from refusion_jax.checkpoints.run_directory import find_step, read_adapters
from refusion_jax.checkpoints.weights import Reader, checked, open_params, restore_params
from refusion_jax.cli.errors import SettingError, UserError
from refusion_jax.cli.settings import declared
from refusion_jax.data.fast_tokenizer import first_difference
from refusion_jax.decoding.auxiliary import check_auxiliaries, check_vocabulary, joined
from refusion_jax.decoding.settings import Settings
from refusion_jax.distributed.sharding import local_mesh, make_mesh
from refusion_jax.model import huggingface, peft
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.lora import Lora, combine
from refusion_jax.model.shape import ModelConfig
from refusion_jax.model.transformer import Transformer, abstract_transformer
from refusion_jax.systems.registry import releases


def load_model(
    path: epath.PathLike, dtype: str = "float32", mesh: jax.sharding.Mesh | None = None, weights: str = "same"
) -> Transformer:
    """Loads a trained model, with the name of the system that trained it if known, onto one device or a mesh.

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
    mesh = mesh or local_mesh()
    path = epath.Path(path)
    config = read_model_config(path)
    graphdef, target = abstract_transformer(config, dtype, mesh, weights=weights)
    params = load_params(path, target) if weights == "same" else _load_rounded(path, config, dtype, weights, target)
    model = nnx.merge(graphdef, params)
    model.trained_by = find_objective(path) or ""
    return model


def _load_rounded(path: epath.Path, config: ModelConfig, dtype: str, weights: str, target: dict[str, Any]) -> Any:
    """`load_params`, rounded in host memory."""
    try:
        memory = jax.local_devices(backend="cpu")[:1]
    except RuntimeError as error:
        why = "weights are rounded in the host's memory, for JAX a device of its own: JAX_PLATFORMS must name cpu, too"
        raise SettingError("decode", "weights", weights, why) from error
    unrounded, on_host = abstract_transformer(config, dtype, make_mesh({}, memory))
    rounded = nnx.state(nnx.merge(unrounded, load_params(path, on_host)).rounded(weights))
    places = jax.tree.map(lambda x: x.sharding, target)
    return jax.device_put(jax.device_get(nnx.to_pure_dict(rounded)), places)


def load_for(
    path: epath.PathLike, settings: Settings, dtype: str = "float32", mesh: jax.sharding.Mesh | None = None
) -> LanguageModel:
    """`load_model`, with `load_auxiliaries`."""
    auxiliary = load_auxiliaries(path, settings, dtype, mesh)
    return joined(load_model(path, dtype, mesh, settings.weights), auxiliary)


def load_auxiliaries(
    path: epath.PathLike, settings: Settings, dtype: str = "float32", mesh: jax.sharding.Mesh | None = None
) -> dict[str, Transformer]:
    """The auxiliary models that a decoder's settings name, for the model in `path`.

    SettingError if another system trained one, or if its ids mean something else; it may have fewer or more of them.
    """
    auxiliary = {}
    check_auxiliaries(settings, settings)
    for name, recipe in settings.auxiliary_models.items():
        other = getattr(settings, name)
        places, needed = [epath.Path(path), epath.Path(other)], recipe["objective"]
        tokenizers, why = [find_tokenizer(place) for place in places], ""
        if (trained := find_objective(places[1])) not in (None, needed, settings.method):
            why = f"was trained with objective={trained}; {settings.method} needs a model of {needed}"
        elif not all(tokenizers):
            check_vocabulary(name, other, *map(read_model_config, places))
        elif (token := first_difference(*tokenizers)) is not None:
            why = f"has another tokenizer than {path}: token {token} is other text"
        if why:
            settings.refuse(name, why)
        auxiliary[name] = load_model(other, dtype, mesh, settings.weights)
    return auxiliary


def load_params(path: epath.Path, target: dict[str, Any]) -> dict[str, Any]:
    """Weights with the shapes, dtypes and shardings of the target."""
    place = locate(path)
    if place.adapters:
        lora, trained = peft.load(place.adapters, target, huggingface.names_of(place.base, releases()))
        return checked(path, _merge(lora, load_params(place.base, target), trained, target))
    if not place.step:
        return huggingface.load_params(path, target, releases=releases())
    if (adapted := read_adapters(place.directory)) is None:
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
    place = locate(path)
    if place.adapters or (place.step and read_adapters(place.directory)):
        return reader_of(load_model(path))
    target = abstract_transformer(read_model_config(path), "float32", local_mesh())[1]
    return open_params(path, target) if place.step else huggingface.open_params(path, target, releases=releases())


def reader_of(model: Transformer) -> Reader:
    """A reader like that of `open_weights`, for a model in memory."""
    params = nnx.to_pure_dict(nnx.state(model))
    return lambda name, part: np.asarray(functools.reduce(operator.getitem, name, params)[part])


def read_trained(path: epath.Path) -> tuple[Lora, dict[str, Any], epath.Path]:
    """(description of the adapters, trained weights, path of the base) of a run; UserError if it has no adapters."""
    if (adapted := read_adapters(find_step(path)[0])) is None:
        raise UserError(f"{path} has no low-rank adapters: nothing of --config.lora.rank above 0")
    lora, base = adapted
    target = abstract_transformer(read_model_config(path), "float32", local_mesh())[1]
    return lora, restore_params(path, lora.targets_like(target)), base


def _merge(lora: Lora, params: dict[str, Any], trained: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    places = jax.tree.map(lambda x: x.sharding, target)
    return jax.jit(lora.merge, donate_argnums=0, out_shardings=places)(params, trained)

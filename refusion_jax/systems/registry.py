"""Finds systems by name: every module or package in this folder with a SYSTEM is one.

Other packages add systems by entry points in the group `refusion_jax.systems`, or by `register`, which a config file
may call before `default_config`.
"""

import functools
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Sequence

from refusion_jax import systems as folder
from refusion_jax.decoding.decoder import Decoder
from refusion_jax.runtime.errors import SettingError, UserError
from refusion_jax.runtime.settings import declared
from refusion_jax.systems.interface import System

ENTRY_POINTS = "refusion_jax.systems"

_registered: dict[str, System] = {}


def register(system: System) -> System:
    """Registers a system by its name.

    Raises:
      UserError: where another system has its name, the name of one of its decoders, or its section of the config, or a
        decode setting of the same name and another type.
    """
    for other in systems().values():
        if other is system:
            return system
        if other.name == system.name or (set(other.decoders) & set(system.decoders)):
            raise UserError(f"system {system.name!r}: {other.name!r} has this name or one of its decoders' already")
        if system.section and other.section == system.section:
            raise UserError(f"system {system.name!r}: {other.name!r} has the config section {system.section!r} already")
    _check_settings([*systems().values(), system])
    _registered[system.name] = system
    return system


def unregister(name: str) -> None:
    """Removes a system that was registered."""
    _registered.pop(name)


def systems() -> dict[str, System]:
    """All systems by name: those of this folder, then those of entry points, then registered ones."""
    return _found() | _registered


@functools.cache
def _found() -> dict[str, System]:
    modules = [f"{folder.__name__}.{info.name}" for info in pkgutil.iter_modules(folder.__path__)]
    here = [getattr(importlib.import_module(name), "SYSTEM", None) for name in modules]
    elsewhere = [entry.load() for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)]
    found = [system for system in [*here, *elsewhere] if system]
    _check_settings(found)
    return {system.name: system for system in found}


def _check_settings(some: Sequence[System]) -> None:
    """Refuses decoders with settings of one name, which are one flag, and of different types."""
    kinds = {}
    for method, decoder in ((method, decoder) for system in some for method, decoder in system.decoders.items()):
        for name, own in declared(decoder.settings).items():
            kind = type(own.default).__name__
            first, known = kinds.setdefault(name, (method, kind))
            if kind != known:
                raise UserError(
                    f"--decode.{name}: of type {known} in the decoder {first!r} and {kind} in {method!r}; decoders can "
                    f"share a setting only if it has one type"
                )


def default_system() -> System:
    """The system that is trained and decoded by default."""
    return next(system for system in systems().values() if system.is_default)


def trainable() -> list[str]:
    """Names of the systems that have an objective."""
    return [name for name, system in systems().items() if system.objective]


def find_system(name: str) -> System:
    """The trainable system of this name.

    Raises:
      SettingError: where there is none.
    """
    if name not in trainable():
        raise SettingError("config", "objective", name, f"unknown; known: {', '.join(trainable())}")
    return systems()[name]


def decoders() -> dict[str, type[Decoder]]:
    """All decoders by name."""
    return {name: decoder for system in systems().values() for name, decoder in system.decoders.items()}


def find_decoder(method: str) -> type[Decoder]:
    """The decoder of this name.

    Raises:
      SettingError: where there is none.
    """
    known = decoders()
    if method not in known:
        raise SettingError("decode", "method", method, f"unknown; known: {', '.join(known)}")
    return known[method]


def system_of(method: str) -> System:
    """The system that has a decoder.

    Raises:
      SettingError: where there is no such decoder.
    """
    find_decoder(method)
    return next(system for system in systems().values() if method in system.decoders)


def decoders_for(objective: str) -> list[str]:
    """Names of the decoders for models of a system: its default first, those that need further models last."""
    own = systems()[objective].decoders if objective in systems() else {}
    others = {n: d for system in systems().values() if objective in system.decodes for n, d in system.decoders.items()}
    return [*own, *sorted(others, key=lambda name: len(others[name].settings.companions))]


def loss_terms() -> list[str]:
    """Names of the loss terms of all systems."""
    terms = {}
    for system in systems().values():
        if system.objective:
            defaults = {name: key.default for name, key in system.keys.items()}
            terms |= dict.fromkeys(system.objective(mask_id=0, **defaults).coefficients)
    return list(terms)

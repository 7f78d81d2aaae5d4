"""name -> System. A module or package in this folder that has a SYSTEM is found by being there.

Systems of other packages are found by their entry points in the group `refusion_jax.systems`, or registered by
`register`, as a config file may do before it calls `default_config`.
"""

import functools
import importlib
import importlib.metadata
import pkgutil

from refusion_jax import systems as folder
from refusion_jax.decoding.decoder import Decoder
from refusion_jax.runtime.errors import SettingError, UserError
from refusion_jax.systems.interface import System

ENTRY_POINTS = "refusion_jax.systems"

_registered: dict[str, System] = {}


def register(system: System) -> System:
    """Makes a system known by its name.

    Raises:
      UserError: where another system has the name, or one of its decoders', or its section of the config.
    """
    for other in systems().values():
        if other is system:
            return system
        if other.name == system.name or (set(other.decoders) & set(system.decoders)):
            raise UserError(f"system {system.name!r}: {other.name!r} has this name or one of its decoders' already")
        if system.section and other.section == system.section:
            raise UserError(f"system {system.name!r}: {other.name!r} has the config section {system.section!r} already")
    _registered[system.name] = system
    return system


def unregister(name: str) -> None:
    """Forgets a system that was registered."""
    _registered.pop(name)


def systems() -> dict[str, System]:
    """All systems by name: those of this folder first, then those of entry points, then the registered ones."""
    return _found() | _registered


@functools.cache
def _found() -> dict[str, System]:
    modules = [f"{folder.__name__}.{info.name}" for info in pkgutil.iter_modules(folder.__path__)]
    here = [getattr(importlib.import_module(name), "SYSTEM", None) for name in modules]
    elsewhere = [entry.load() for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)]
    return {system.name: system for system in [*here, *elsewhere] if system}


def default_system() -> System:
    """The system that is trained and decoded unless something else is asked for."""
    return next(system for system in systems().values() if system.is_default)


def trainable() -> list[str]:
    """Names of the systems that have an objective."""
    return [name for name, system in systems().items() if system.objective]


def find_system(name: str) -> System:
    """The system of this name.

    Raises:
      SettingError: where there is none that can be trained.
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
    """Names of the decoders that serve models trained by a system, its default first; last those that need others."""
    own = systems()[objective].decoders if objective in systems() else {}
    others = {n: d for system in systems().values() if objective in system.decodes for n, d in system.decoders.items()}
    return [*own, *sorted(others, key=lambda name: len(others[name].settings.companions))]


def loss_terms() -> list[str]:
    """Names of the terms of all systems' losses."""
    terms = {}
    for system in systems().values():
        if system.objective:
            defaults = {name: key.default for name, key in system.keys.items()}
            terms |= dict.fromkeys(system.objective(mask_id=0, **defaults).coefficients)
    return list(terms)

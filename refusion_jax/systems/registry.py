"""Finds systems by name: every module or package in this folder with a SYSTEM is one.

Other packages add systems by entry points in the group `refusion_jax.systems`, or by `register`, which a config file
may call before `default_config`.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from refusion_jax import systems as folder
from refusion_jax.cli.errors import SettingError, UserError, first_line
from refusion_jax.cli.settings import declared
from refusion_jax.decoding.decoder import Decoder
from refusion_jax.decoding.settings import Settings
from refusion_jax.model.families import Release
from refusion_jax.systems.interface import PLAIN, Objective, System

ENTRY_POINTS = "refusion_jax.systems"

_registered: dict[str, System] = {}


def register(system: System) -> System:
    """Registers a system by its name; UserError if it is incomplete or conflicts with others.

    A registered system with this name and config section is replaced, so that a cell of a notebook can run again.
    """
    others = systems()
    if system.name in _registered and others[system.name].section == system.section:
        del others[system.name]
    if system not in others.values():
        _check(system, others.values())
        if lost := {*system.decodes} - {*others, system.name, PLAIN}:
            raise UserError(f"system {system.name!r}: decodes={min(lost)!r} is not a system")
        _registered[system.name] = system
    return system


def systems() -> dict[str, System]:
    """All systems by name: those of this folder, then those of entry points, then registered ones."""
    return found_everywhere() | _registered


@functools.cache
def found_everywhere() -> dict[str, System]:
    """The systems of this folder and of entry points, which every process finds.

    One that fails is left out, with a line on stderr that names it.
    """
    found = {}
    for place, load in _places():
        try:
            system = load()
            if system is not None:
                _check(system, found.values())
                found[system.name] = system
        except Exception as error:  # noqa: BLE001  whatever the code of a system may raise when it is imported
            print(f"{place} is left out: {type(error).__name__}: {first_line(error)}", file=sys.stderr)
    for name, system in found.items():
        if lost := {*system.decodes} - {*found, PLAIN}:
            print(f"system {name!r}: decodes={min(lost)!r} is not a system", file=sys.stderr)
    return found


def _places() -> Iterator[tuple[str, Callable[[], System | None]]]:
    """(where a system may be, what imports it) for each module of this folder and each entry point."""
    for info in pkgutil.iter_modules(folder.__path__):
        name = f"{folder.__name__}.{info.name}"
        place = f"{info.module_finder.path}/{info.name}{'' if info.ispkg else '.py'}"
        yield place, lambda name=name: getattr(importlib.import_module(name), "SYSTEM", None)
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        yield f"the entry point {entry.name} = {entry.value}", entry.load


def _check(system: System, others: Iterable[System]) -> None:
    """Raises UserError if a system is incomplete or conflicts with others."""
    name = f"system {system.name!r}"
    for part, lacks in _missing(system):
        raise UserError(f"{name}: {part} has no {lacks}")
    if system.objective:
        system.objective(mask_id=0)  # if it cannot be made, its own error says why
    for other in others:
        if other.name == system.name or (set(other.decoders) & set(system.decoders)):
            raise UserError(f"{name}: {other.name!r} has this name or one of its decoders' already")
        if system.is_default and other.is_default:
            raise UserError(f"{name}: {other.name!r} is the default already")
        if system.section and other.section == system.section:
            raise UserError(f"{name}: {other.name!r} has the config section {system.section!r} already")
        for key, kind in _kinds(system).items():
            if (known := _kinds(other).get(key, kind)) is not kind:
                types = f"of type {kind.__name__}, and that of {other.name!r} of type {known.__name__}"
                raise UserError(f"{name}: its --decode.{key} is {types}; both are one flag")


def _missing(system: System) -> Iterator[tuple[str, str]]:
    """(part of a system, what the protocol requires and the part lacks)."""
    if system.objective:
        yield from _lacking("its objective", system.objective, Objective)
    if system.keys and not system.section.isidentifier():
        yield "its config section", "name of letters, digits and underscores"
    for name, decoder in system.decoders.items():
        part = f"its decoder {name!r}"
        yield from _lacking(part, decoder, Decoder)
        yield from _lacking(f"the settings class of {part}", getattr(decoder, "settings", None), Settings)
        if name not in system.references:
            yield part, "reference"
        taken = {f.name for f in dataclasses.fields(Decoder)} - {*declared(Settings)}
        for key, own in declared(decoder.settings).items():
            if key in taken:
                yield f"its --decode.{key}", "name of its own: it is a field of every decoder"
            if not isinstance(own.default, bool | int | float | str):
                yield f"its --decode.{key}", "default that is a number, text or bool"


def _lacking(part: str, owner: Any, base: type) -> Iterator[tuple[str, str]]:
    """What a class lacks of its base class. Without the decorator, settings that it declares would be ignored."""
    if not isinstance(owner, type) or not issubclass(owner, base):
        yield part, f"base class {base.__name__}"
    for member in sorted(getattr(owner, "__abstractmethods__", ())):
        yield part, member
    if any(isinstance(value, dataclasses.Field) for value in vars(owner).values()):
        yield part, "decorator @dataclasses.dataclass(frozen=True)"


def _kinds(system: System) -> dict[str, type]:
    return {name: type(own.default) for d in system.decoders.values() for name, own in declared(d.settings).items()}


def default_system() -> System:
    """The system that is trained and decoded by default."""
    return next(system for system in systems().values() if system.is_default)


def releases() -> dict[str, tuple[Release, ...]]:
    """What the authors of the systems released, by the name of the system."""
    return {name: system.releases for name, system in systems().items()}


def trainable() -> list[str]:
    """Names of the systems that have an objective."""
    return [name for name, system in systems().items() if system.objective]


def find_system(name: str) -> System:
    """The trainable system of this name; SettingError if there is none."""
    if name not in trainable():
        raise SettingError("config", "objective", name, f"unknown; known: {', '.join(trainable())}")
    return systems()[name]


def decoders() -> dict[str, type[Decoder]]:
    """All decoders by name."""
    return {name: decoder for system in systems().values() for name, decoder in system.decoders.items()}


def find_decoder(method: str) -> type[Decoder]:
    """The decoder of this name; SettingError if there is none."""
    return system_of(method).decoders[method]


def system_of(method: str) -> System:
    """The system that has a decoder; SettingError if there is no such decoder."""
    for system in systems().values():
        if method in system.decoders:
            return system
    raise SettingError("decode", "method", method, f"unknown; known: {', '.join(decoders())}")


def decoders_for(objective: str) -> list[str]:
    """Names of the decoders for models of a system: its default first, those that need further models last.

    Its own that need further models are left out: it trains those models. Of other systems, trainable ones come first.
    """
    own = systems()[objective].decoders if objective in systems() else {}
    own = [name for name, decoder in own.items() if not decoder.settings.auxiliary_models]
    some = sorted(systems().values(), key=lambda system: system.objective is None)
    others = {n: d for system in some if objective in system.decodes for n, d in system.decoders.items()}
    return [*own, *sorted(others, key=lambda name: len(others[name].settings.auxiliary_models))]


def default_decoder(objective: str | None) -> str:
    """Name of the first decoder for models of a system, if known, else of the default one; UserError without any."""
    objective = objective or default_system().name
    if names := decoders_for(objective):
        return names[0]
    unknown = "no file in refusion_jax/systems and no entry point has this system"  # perhaps a config file did
    why = "its models do not decode by themselves" if objective in systems() else unknown
    raise UserError(f"objective={objective}: {why}")

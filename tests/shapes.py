"""The checker of shapes that every test runs under: conftest.py imports this before anything of ours."""

import inspect
import sys
from collections.abc import Callable
from typing import Any, get_args

import jaxtyping
from beartype import beartype
from jaxtyping import AbstractArray, install_import_hook


def checked(function: Callable) -> Callable:
    """The function, with its arguments and results checked on every call where annotations say shapes.

    But for what JAX makes of dataclasses: it takes them apart and puts them together again with whatever it has of each
    array: a shape, a sharding, a whole batch of it. What our own code makes of them is checked.
    """
    hints = function.__annotations__
    if not any(map(_says_shape, hints.values())):
        return function
    function.__annotations__ = {name: hint if _says_shape(hint) else Any for name, hint in hints.items()}
    own = beartype(function)
    if function.__name__ != "__init__":
        return own

    def unless_rebuilt(*args, **kwargs):
        caller = sys._getframe(1)
        while caller.f_globals["__name__"].startswith("jaxtyping."):
            caller = caller.f_back
        is_rebuilt = caller.f_globals["__name__"].startswith("jax.")
        return (function if is_rebuilt else own)(*args, **kwargs)

    return unless_rebuilt


def hooked(typechecker: Callable) -> Callable:
    """What jaxtyping's import hook decorates every function and class with: nothing where no shape is said.

    Its own binds the arguments of every call, of which a test makes a quarter of a million, and checks those of a
    function twice: before the call, and again with what it returns.
    """

    def decorate(one: Callable | type) -> Callable | type:
        if _says_none(one):
            return one
        if inspect.isclass(one):
            return _jaxtyped(one, typechecker=typechecker)
        return _jaxtyped(typechecker(one), typechecker=None)

    return decorate


def _says_none(one: Callable | type) -> bool:
    function = one.__init__ if inspect.isclass(one) else one
    return not any(map(_says_shape, getattr(function, "__annotations__", {}).values()))


def _says_shape(hint: Any) -> bool:
    return (inspect.isclass(hint) and issubclass(hint, AbstractArray)) or any(map(_says_shape, get_args(hint)))


_jaxtyped, jaxtyping.jaxtyped = jaxtyping.jaxtyped, hooked
install_import_hook(
    [f"refusion_jax.{room}" for room in ("batch", "model", "decoding", "systems", "training")], f"{__name__}.checked"
)

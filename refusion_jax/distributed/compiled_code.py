"""Caches of compiled programs on disk: native code that runs unchecked, so only where nobody else can write.

A run may have been downloaded, so a cache in its directory is read only if the user asks for it.
"""

import contextlib
import grp
import os
import pwd
import stat
import warnings
from pathlib import Path

import jax
from etils import epath
from jax.experimental.compilation_cache import compilation_cache

from refusion_jax.cli.paths import is_remote
from refusion_jax.distributed.storage import absolute


def keep_compiled(directory: epath.Path, whose: str) -> None:
    """Makes JAX read and write compiled programs in a cache in a directory; a cache set by the user has precedence.

    JAX's key covers the program, the compiler, its flags and the kind of machine (on a CPU its instruction set).
    With `whose` "own" it is in the user's cache directory instead; "shared": there, whoever can write to it; "off".
    """
    if whose == "own":
        keep_for_user()
    if whose != "shared" or jax.config.jax_compilation_cache_dir:
        return
    directory = absolute(directory)
    if not is_remote(directory):
        Path(directory).mkdir(mode=0o700, parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    compilation_cache.reset_cache()  # JAX may have found it missing before


def keep_for_user() -> None:
    """Keeps compiled programs for the next call of a command, in the user's cache directory.

    There are none if it cannot be written, or if somebody else could put code there.
    """
    # On a full disk JAX warns of every program that it cannot store; the next call compiles it again.
    warnings.filterwarnings("ignore", "Error writing persistent compilation cache entry")
    if jax.config.jax_compilation_cache_dir:  # JAX's own setting has precedence
        return
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not home.is_absolute():  # ignored, as the XDG specification demands
        home = Path.home() / ".cache"
    directory = home / "refusion_jax" / "compiled"
    with contextlib.suppress(OSError):
        if is_private(directory):
            keep_compiled(epath.Path(directory), "shared")
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def is_private(directory: Path) -> bool:
    """Whether nobody but this user can put code there."""
    real = Path(os.path.realpath(directory))
    for path in [path for path in (real, *real.parents) if path.exists()]:
        about = path.stat()
        is_sticky = path != real and about.st_mode & stat.S_ISVTX  # others can add, but not replace
        if about.st_uid not in (0, os.geteuid()) or (_others_can_write(about) and not is_sticky):
            return False
    files = [path.lstat() for path in real.iterdir()] if real.is_dir() else []
    return not any(about.st_uid != os.geteuid() or _others_can_write(about) for about in files)


def _others_can_write(about: os.stat_result) -> bool:
    """Whether somebody else can write; group members count, unless it is this user's private group."""
    if about.st_mode & stat.S_IWOTH or not about.st_mode & stat.S_IWGRP:
        return bool(about.st_mode & stat.S_IWOTH)
    try:
        user = pwd.getpwuid(os.geteuid())
        return user.pw_gid != about.st_gid or bool(set(grp.getgrgid(about.st_gid).gr_mem) - {user.pw_name})
    except KeyError:
        return True

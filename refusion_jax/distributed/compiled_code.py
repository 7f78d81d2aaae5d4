"""Caches of compiled programs on disk: native code that runs unchecked, so only where nobody else can write.

A run may have been downloaded, so a cache in its directory is read only if the user asks for it.
"""

import contextlib
import os
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
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = directory.stat()  # whoever could replace the directory would own the new one
        if about.st_uid == os.geteuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            keep_compiled(epath.Path(directory), "shared")
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

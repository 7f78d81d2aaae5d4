"""Allows one training run at a time in a directory.

On a file system this is the operating system's lock (flock) on DIR/lock, which is released when the process ends.
An object store cannot tell a dead holder from a silent one: there the lease, the object DIR/lock, belongs to whoever
wrote it last, and a holder that finds another one's lease before a save stops without saving. The lease is written only
over the generation that was read before (compare and swap), so of two that start at once one is refused.
"""

import contextlib
import datetime
import os
import socket
from collections.abc import Callable, Iterator
from typing import IO

import jax
import tensorstore
from absl import logging
from etils import epath

from refusion_jax.cli.errors import Failure, UserError, refusing
from refusion_jax.cli.paths import is_remote
from refusion_jax.distributed.processes import first_fault
from refusion_jax.distributed.storage import try_lock

FILE = "lock"


@contextlib.contextmanager
def locked(directory: epath.Path) -> Iterator[Callable[[], None]]:
    """Locks a directory for all processes of a run while the block runs; the first process takes the lock.

    Yields `check`, to be called before each save: UserError if a new holder has taken over the directory. A directory
    that another run holds is refused, naming its process and start.
    """
    with contextlib.ExitStack() as stack:
        check, refusal = (lambda: None), None
        if jax.process_index() == 0:
            try:
                check = stack.enter_context(_lease(directory) if is_remote(directory) else file_lock(directory))
            except UserError as error:
                refusal = str(error)
        if refusal := first_fault(refusal):
            raise UserError(refusal)
        yield check


def check_free(directory: epath.Path) -> None:
    """Refuses a local directory that another run holds; writes nothing."""
    if not is_remote(directory) and (directory / FILE).exists():
        with (directory / FILE).open("rb") as file:
            _lock(file, directory, shared=True)


@contextlib.contextmanager
def file_lock(directory: epath.Path) -> Iterator[Callable[[], None]]:
    """As `locked`, for a local directory and one process; does not use JAX, so that it does not take the devices."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / FILE, "a+b", buffering=0) as file:
        _lock(file, directory)
        try:
            file.truncate(0)
            file.write(_this_process())
        except OSError as error:
            raise Failure(f"{directory / FILE} cannot be written: {error.strerror}") from error
        yield lambda: None


def _lock(file: IO, directory: epath.Path, shared: bool = False) -> None:
    if not try_lock(file, directory, shared):
        file.seek(0)
        raise _in_use(directory, file.read())


@contextlib.contextmanager
def _lease(directory: epath.Path) -> Iterator[Callable[[], None]]:
    def swap(content: bytes | None, generation: bytes) -> bytes:
        """Writes or deletes the lease; returns its new generation, empty if it has changed since it was read."""
        return store.write(FILE, content, if_equal=generation).result().generation

    def check() -> None:
        there = store.read(FILE).result()
        if there.stamp.generation != mine:
            new_holder = there.value.decode(errors="replace") or "somebody who has left"
            raise UserError(f"{directory} has been taken over by {new_holder}: this run stops and saves nothing more")

    with refusing(f"--workdir={directory} cannot be written", ValueError):  # all that the store raises
        store = tensorstore.KvStore.open(f"{directory}/").result()
        there = store.read(FILE).result()
        mine = swap(_this_process(), there.stamp.generation)
    if not mine:
        raise _in_use(directory, store.read(FILE).result().value)
    if there.value:
        logging.warning("%s: taking over from %s", directory, there.value.decode(errors="replace"))
    try:
        yield check
    finally:
        with contextlib.suppress(ValueError):
            swap(None, mine)


def _in_use(directory: epath.Path, holder: bytes) -> UserError:
    return UserError(
        f"--workdir={directory} is in use by {holder.decode(errors='replace')}: wait for it, stop it, or name another "
        f"directory"
    )


def _this_process() -> bytes:
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return f"process {os.getpid()} on {socket.gethostname()}, since {since}".encode()

"""One owner of a directory at a time: a lease in DIR/owner.json that its owner renews, locally and in an object store.

A lease is written only over the generation that was read before (a compare and swap), so of two that try one wins. On
the same machine a dead owner is known at once, by its process id; on another, by a heartbeat that has stopped. Whether
it has stopped is judged by watching it, never by comparing clocks.
"""

import contextlib
import datetime
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import tensorstore
from absl import logging
from etils import epath

from refusion_jax.cli.errors import UserError, first_line
from refusion_jax.cli.paths import is_remote
from refusion_jax.distributed.json_input import JsonError, parse_json
from refusion_jax.distributed.proc import boot_id, started
from refusion_jax.distributed.processes import all_agree
from refusion_jax.distributed.storage import absolute, check_file

FILE = "owner.json"
BEAT_SECONDS = 5.0  # between two signs of life
DEAD_SECONDS = 30.0  # without one, after which the directory is taken over


class Owner:
    """Holds the lease of a directory and renews it in a thread, until it is closed."""

    def __init__(self, store: tensorstore.KvStore, generation: bytes, lease: dict[str, Any], where: epath.Path):
        self._store, self._generation, self._lease, self._where = store, generation, lease, where
        self._usurper: str | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="owner", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Refuses to go on where somebody else has taken the directory over, as from a machine that stood still."""
        if self._usurper:
            raise UserError(f"{self._where} has been taken over by {self._usurper}: this one stops and saves nothing")

    def _renew(self) -> None:
        while not self._closing.wait(BEAT_SECONDS):
            try:
                lease = self._lease | {"beat": self._lease["beat"] + 1}
                written = _swap(self._store, lease, self._generation)
                if written is None:
                    if not is_remote(self._where) and not self._where.is_dir():
                        raise OSError(f"{self._where} has vanished")
                    there, generation = _read(self._store)
                    if there and there.get("id") != self._lease["id"]:
                        self._usurper = _describe(there)
                        return
                    written = _swap(self._store, lease, generation)  # it was removed, or our answer was lost
                if written is not None:
                    self._generation, self._lease = written, lease
            except Exception as error:  # noqa: BLE001  the store does not answer now; the next beat tries again
                logging.warning("%s cannot be renewed now: %s", self._where / FILE, first_line(error))

    def close(self) -> None:
        """Gives the directory up."""
        self._closing.set()
        self._thread.join()
        if not self._usurper:
            with contextlib.suppress(Exception):  # it lapses by itself
                self._store.write(FILE, None, if_equal=self._generation).result()


@contextlib.contextmanager
def owned(directory: epath.Path) -> Iterator[Callable[[], None]]:
    """Owns a directory for a block, for all processes of a run together; the first of them holds the lease.

    Yields:
      `check`, which raises UserError where somebody else has taken it over.

    Raises:
      UserError: where somebody else owns it, naming who, and since when.
    """
    owner, refusal = None, None
    if jax.process_index() == 0:
        try:
            owner = acquire(directory)
        except UserError as error:
            refusal = error
    if not all_agree(jax.process_index() > 0 or owner is not None):
        raise refusal or UserError(f"--workdir={directory} is in use: process 0 says by whom")
    try:
        yield owner.check if owner else lambda: None
    finally:
        if owner:
            owner.close()


def acquire(directory: epath.Path) -> Owner:
    """Takes the lease; waits where only time can tell whether its owner lives.

    Raises:
      UserError: where somebody else owns the directory.
    """
    directory = absolute(directory)
    store = _open(directory)
    there, generation = _wait_for_vacancy(store, directory)
    since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    lease = {"id": secrets.token_hex(8), **_this_process(), "since": since, "beat": 0}
    try:
        written = _swap(store, lease, generation)
    except ValueError as error:  # all that the store raises
        raise UserError(f"--workdir={directory} cannot be written: {first_line(error)}") from error
    if written is None:
        there, _ = _read(store)
        raise UserError(_refusal(directory, there or {}))
    return Owner(store, written, lease, directory)


def check_vacant(directory: epath.Path) -> None:
    """Refuses a directory whose owner is seen to live at once; writes nothing and waits for nobody.

    Raises:
      UserError: naming who owns it, and since when.
    """
    if (directory / FILE).exists():
        there, _ = _read(_open(absolute(directory)))
        if there and _is_alive(there):
            raise UserError(_refusal(directory, there))


def _wait_for_vacancy(store: tensorstore.KvStore, directory: epath.Path) -> tuple[dict[str, Any] | None, bytes]:
    there, generation = _read(store)
    if there is None or _is_alive(there) is False:
        return there, generation
    if _is_alive(there):
        raise UserError(_refusal(directory, there))
    logging.warning(
        "%s was owned by %s; waiting up to %.0f s for a sign of life", directory, _describe(there), DEAD_SECONDS
    )
    first, began = generation, time.monotonic()
    while time.monotonic() - began < DEAD_SECONDS:
        time.sleep(min(1.0, DEAD_SECONDS / 10))
        there, generation = _read(store)
        if there is None:
            break
        if generation != first:
            raise UserError(_refusal(directory, there))
    return there, generation


def _refusal(directory: epath.Path, there: dict[str, Any]) -> str:
    return f"--workdir={directory} is in use by {_describe(there)}: wait for it, stop it, or name another directory"


def _describe(lease: dict[str, Any]) -> str:
    return f"process {lease.get('pid', '?')} on {lease.get('host', '?')}, since {lease.get('since', '?')}"


def _open(directory: epath.Path) -> tensorstore.KvStore:
    if is_remote(directory):
        return tensorstore.KvStore.open(f"{directory}/").result()
    with contextlib.suppress(FileNotFoundError):
        check_file(directory / FILE)  # by any other kind of file the store would wait for ever, or fail
    return tensorstore.KvStore.open({"driver": "file", "path": f"{directory}/"}).result()


def _read(store: tensorstore.KvStore) -> tuple[dict[str, Any] | None, bytes]:
    """The lease, None where there is none or it is junk, and the generation of what is there."""
    found = store.read(FILE).result()
    if found.state != "value":
        return None, found.stamp.generation
    try:
        lease = parse_json(found.value)
    except JsonError:
        lease = None
    return lease if isinstance(lease, dict) else None, found.stamp.generation


def _swap(store: tensorstore.KvStore, lease: dict[str, Any], generation: bytes) -> bytes | None:
    """Writes a lease over the generation given; the new one, or None where another is there."""
    return store.write(FILE, json.dumps(lease).encode(), if_equal=generation).result().generation or None


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": os.getpid(),
        "started": started(os.getpid()),  # its id may be given again
    }


def _is_alive(lease: dict[str, Any]) -> bool | None:
    """Whether the owner lives; None where it is on another machine, or this one does not tell."""
    machine = _machine()
    if machine is None or lease.get("machine") != machine or not isinstance(lease.get("pid"), int):
        return None
    return started(lease["pid"]) == lease.get("started")


def _machine() -> str | None:
    """What processes share that see each other's ids: a boot of a machine, and a namespace on it."""
    try:
        boot = boot_id()
        return boot and boot + os.readlink("/proc/self/ns/pid")
    except OSError:
        return None

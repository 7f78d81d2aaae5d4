"""Several processes that train as one: how a process finds its peers, agrees with them, and leaves them.

Nothing has to be told on a TPU pod, under Slurm, Open MPI or in a Kubernetes job: JAX asks the machine. Any other
launcher (launch/local_hosts.sh is one) sets three environment variables for each process: JAX_COORDINATOR_ADDRESS
(host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID.
"""

import contextlib
import hashlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from refusion_jax.cli import command
from refusion_jax.cli.errors import Failure, UserError
from refusion_jax.distributed.peers import Peers, roll_call
from refusion_jax.distributed.preemption import EXIT_CODE

_LOST_SECONDS = 2.0
_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def initialize(seconds: float = 300.0) -> Peers | None:
    """Joins the other processes of this run, if there are any. To be called before anything asks for devices.

    Args:
      seconds: to wait for them.

    Returns:
      The peers to hear of; None where there are none, or the machine's own launcher watches over them.

    Raises:
      UserError: where the environment names some peers, but not enough to find them.
      TimeoutError: where they do not come.
    """
    given = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    if given.keys() & set(_VARIABLES[1:]):
        address, count, index = _explicit(given)
        peers = roll_call(address, count, index, seconds) if count > 1 else None
        jax.distributed.initialize(address, count, index, cluster_detection_method="deactivate")
        return peers
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # on one host of a pod, on its CPU: the pod is not meant
    came = threading.Event()
    threading.Thread(target=_give_up, args=(came, seconds), daemon=True).start()
    try:
        jax.distributed.initialize(initialization_timeout=int(seconds) + 60)
    except ValueError as error:
        if given or "coordinator_address" not in str(error):  # what JAX says where it finds no cluster
            raise UserError(f"the other processes of this run cannot be found: {error}") from error
    finally:
        came.set()
    return None


def _give_up(came: threading.Event, seconds: float) -> None:
    """Ends a process whose peers do not come: JAX would end it with a dump of the machine's stack."""
    if not came.wait(seconds):
        command.explain(
            TimeoutError(f"not all processes of this run came within {seconds:g} s; --peer_seconds waits longer")
        )
        os._exit(EXIT_CODE)


def _explicit(given: dict[str, str]) -> tuple[str, int, int]:
    """Address, number of processes and own index from the environment."""
    for name in _VARIABLES:
        if name not in given:
            raise UserError(f"{name} is not set, but {' and '.join(given)} {'are' if len(given) > 1 else 'is'}")
    address, *numbers = (given[name] for name in _VARIABLES)
    if not all(map(_is_number, numbers)) or int(numbers[1]) >= int(numbers[0]):
        raise UserError(f"JAX_PROCESS_ID={numbers[1]} must be a number from 0 to below JAX_NUM_PROCESSES={numbers[0]}")
    host, _, port = address.rpartition(":")
    if not host or not _is_number(port) or not 0 < int(port) < 65536:
        raise UserError(f"JAX_COORDINATOR_ADDRESS={address} must be host:port, with a port from 1 to 65535")
    return address, *map(int, numbers)


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 10


@contextlib.contextmanager
def together(peer_seconds: float = 300.0) -> Iterator[None]:
    """Runs a block with the other processes; one that fails alone leaves at once, so that nobody waits for it.

    An ordinary exit would wait minutes for peers that wait for us. After a Failure, as of a disk, launchers start all
    of them again.
    """
    try:
        peers = initialize(peer_seconds)
    except TimeoutError as error:  # a machine that is slow to start is no mistake of the input: try again
        command.explain(error)
        sys.exit(EXIT_CODE)
    try:
        yield
        if peers:
            peers.leave()
    except Exception as error:
        if jax.process_count() == 1:
            raise
        if not isinstance(error, UserError):
            time.sleep(_LOST_SECONDS)  # if it is because a peer died, the roll call names it and ends this process
        code = 2 if isinstance(error, UserError) else EXIT_CODE if isinstance(error, Failure) else 1
        traceback.print_exc() if code == 1 else command.explain(error)
        sys.stdout.flush()
        sys.stderr.flush()
        if peers:
            peers.leave(code)
        os._exit(code)
    except SystemExit:  # interrupted before the first step
        if peers:
            peers.leave()
        raise


def fetch(arrays: Any) -> Any:
    """Whole arrays on this host; on every host where several hold parts of them. A collective call then."""
    if all(x.is_fully_addressable for x in jax.tree.leaves(arrays)):
        return jax.device_get(arrays)
    return multihost_utils.process_allgather(arrays, tiled=True)


def all_agree(flag: bool) -> bool:
    """Whether the flag is true on every process."""
    return bool(np.all(multihost_utils.process_allgather(np.array(flag))))


def check_same(what: str, *parts: bytes | str) -> None:
    """Refuses to go on where processes hold different things.

    Args:
      what: the flag at fault, for the message.
      parts: bytes that must be equal everywhere.

    Raises:
      UserError: on all processes.
    """
    if jax.process_count() == 1:
        return
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    mine = np.frombuffer(digest.digest(), np.uint8)
    others = [i for i, d in enumerate(multihost_utils.process_allgather(mine)) if not np.array_equal(d, mine)]
    if not all_agree(not others):
        raise UserError(f"{what} is not the same on all hosts (process {jax.process_index()} differs from {others})")


def check_shared(workdir: epath.Path) -> None:
    """Refuses a directory that the processes do not share: a checkpoint of all hosts needs one that all see.

    Raises:
      UserError: on all processes.
    """
    if jax.process_count() == 1:
        return
    made = [path for path in (workdir, *workdir.parents) if not path.exists()]
    mark = workdir / f".shared.{int(multihost_utils.broadcast_one_to_all(np.int32(os.getpid())))}"
    if jax.process_index() == 0:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text("")
    multihost_utils.sync_global_devices("marked")
    is_shared = all_agree(mark.exists())
    if jax.process_index() == 0:
        mark.unlink()
        for path in [] if is_shared else made:
            path.rmdir()
    if not is_shared:
        raise UserError(
            f"--workdir={workdir} is not one directory for all hosts; give one that they share: gs://BUCKET/DIR, or a "
            f"network file system"
        )

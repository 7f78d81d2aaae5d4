"""Several processes that train as one: how a process finds its peers, agrees with them, and leaves them.

Nothing has to be told on a TPU pod, under Slurm, Open MPI or in a Kubernetes job: JAX asks the machine. Any other
launcher (launch/local_hosts.sh is one) sets three environment variables for each process: JAX_COORDINATOR_ADDRESS
(host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID.
"""

import contextlib
import hashlib
import os
import sys
import traceback
from collections.abc import Iterator

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from refusion_jax.runtime import cli
from refusion_jax.runtime.errors import UserError

_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def initialize() -> None:
    """Joins the other processes of this run, if there are any. To be called before anything asks for devices.

    Raises:
      UserError: where the environment names some peers, but not enough to find them.
    """
    given = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    if given.keys() & set(_VARIABLES[1:]):
        address, count, index = _explicit(given)
        jax.distributed.initialize(address, count, index, cluster_detection_method="deactivate")
        return
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # on one host of a pod, on its CPU: the pod is not meant
    try:
        jax.distributed.initialize()
    except ValueError as error:
        if given or "coordinator_address" not in str(error):  # what JAX says where it finds no cluster
            raise UserError(f"the other processes of this run cannot be found: {error}") from error


def _explicit(given: dict[str, str]) -> tuple[str, int, int]:
    """Address, number of processes and own index from the environment."""
    for name in _VARIABLES:
        if name not in given:
            raise UserError(f"{name} is not set, but {' and '.join(given)} {'are' if len(given) > 1 else 'is'}")
    address, *numbers = (given[name] for name in _VARIABLES)
    if not all(number.isdecimal() for number in numbers) or int(numbers[1]) >= int(numbers[0]):
        raise UserError(f"JAX_PROCESS_ID={numbers[1]} must be a number from 0 to below JAX_NUM_PROCESSES={numbers[0]}")
    if not address.rpartition(":")[2].isdecimal():
        raise UserError(f"JAX_COORDINATOR_ADDRESS={address} must be host:port")
    return address, *map(int, numbers)


@contextlib.contextmanager
def together(peer_seconds: float = 300.0) -> Iterator[None]:
    """Runs a block with the other processes; one that fails alone leaves at once, so that nobody waits for it.

    An ordinary exit would wait minutes for peers that wait for us.
    """
    initialize()
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1:
            raise
        code = cli.explain(error) if isinstance(error, UserError) else 1
        if code == 1:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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

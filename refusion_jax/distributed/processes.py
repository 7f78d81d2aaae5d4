"""Several processes that train as one: how a process finds its peers, agrees with them, and leaves them.

On a TPU pod, under Slurm, Open MPI or in a Kubernetes job nothing must be set: JAX asks the machine. Any other
launcher (launch/local_hosts.sh is one) sets three environment variables for each process: JAX_COORDINATOR_ADDRESS
(host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID.
"""

import contextlib
import ctypes
import hashlib
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from etils import epath
from jax._src.clusters import ClusterEnv
from jax.experimental import multihost_utils

from refusion_jax.cli import command
from refusion_jax.cli.errors import Failure, UserError
from refusion_jax.distributed.preemption import EXIT_CODE
from refusion_jax.distributed.storage import write_file

_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_JAX_GIVES_UP = re.compile(rb"[WEF]\d{4} .*(coordination_service|preemption_sync|JAX distributed service detected)")
_PR_SET_PDEATHSIG = 1  # of prctl(2)


@contextlib.contextmanager
def together(peer_seconds: float = 300.0, lost_seconds: int = 60) -> Iterator[None]:
    """Runs a block together with the other processes of this run, if any; a process that fails alone exits at once.

    After a Failure, such as of a disk, launchers start all of them again. At the beginning it waits for the others for
    `peer_seconds`; one that is silent for `lost_seconds` counts as lost, and this process exits with EXIT_CODE.
    """
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # on the CPU of one host of a pod: the pod is not used
    automatic = (env for env in ClusterEnv._cluster_types if not env.opt_in_only_method)
    if _explicit() or not _is_alone() and any(env.is_env_present() for env in automatic):
        _go_on_in_a_child()
    initialize(peer_seconds, lost_seconds)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if jax.process_count() == 1:
            raise
        if isinstance(error, Exception) and not isinstance(error, UserError):
            time.sleep(lost_seconds + 5)  # if another process was lost, JAX ends this one now
        if isinstance(error, KeyboardInterrupt | UserError | Failure):
            said, code = command.verdict(error)
            command.explain(said)
        else:
            traceback.print_exception(error)
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        if jax.process_index() == 0:
            time.sleep(1.0)  # the others, which may be about to say the same, are aborted when their coordinator goes
        # A normal exit would wait minutes for the others, which wait for this process.
        os._exit(EXIT_CODE if isinstance(error, Failure) else code)


def initialize(peer_seconds: float = 300.0, lost_seconds: int = 60) -> None:
    """Joins the other processes of this run, if any. Must be called before anything uses devices.

    Refuses an environment in which some of the variables are missing, and a port that is in use.
    """
    given = _explicit()
    if not given and _is_alone():
        return
    if given and given[2] == 0:
        # jaxlib 0.10.2 would crash with a segmentation fault.
        check_port(f"JAX_COORDINATOR_ADDRESS={given[0]}", int(given[0].rpartition(":")[2]))
    came = threading.Event()
    threading.Thread(target=_give_up, args=(came, peer_seconds), daemon=True).start()
    try:
        jax.distributed.initialize(
            *(given or ()),
            cluster_detection_method="deactivate" if given else None,
            initialization_timeout=int(peer_seconds) + 60,
            heartbeat_timeout_seconds=lost_seconds,
        )
    except ValueError as error:
        if os.environ.get(_VARIABLES[0]) or "coordinator_address" not in str(error):  # JAX's message for: no cluster
            raise UserError(f"the other processes of this run cannot be found: {error}") from error
    except RuntimeError as error:
        raise UserError(f"JAX_COORDINATOR_ADDRESS={given[0] if given else ''}: {error}") from error
    finally:
        came.set()


def check_port(name: str, port: int) -> None:
    """Refuses a port that this process cannot open; `name` is what asks for it."""
    try:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        raise UserError(f"{name}: the port cannot be opened: {os.strerror(error.errno)}") from error


def _give_up(came: threading.Event, seconds: float) -> None:
    """Ends a process whose peers do not arrive: JAX would abort it with a dump of the machine's stack."""
    if not came.wait(seconds):
        command.explain(
            TimeoutError(f"not all processes of this run came within {seconds:g} s; --peer_seconds waits longer")
        )
        os._exit(EXIT_CODE)


def _go_on_in_a_child() -> None:
    """Returns in a child process; this one waits for it, forwards signals, and exits with its exit code.

    JAX aborts a process that has lost another, with a dump of its stack: the parent turns this into one line and
    EXIT_CODE.
    """
    # Nothing in the process itself can: jaxlib 0.10.2 has a `missed_heartbeat_callback`, but ends with std::bad_cast
    # when it calls one from Python, and by SIGABRT, which a handler may catch, it has written its lines to stderr.
    said, stderr = os.pipe()
    child = os.fork()
    if not child:
        os.setpgid(0, 0)  # Ctrl-C in a terminal then goes only to the parent, which forwards it
        if hasattr(libc := ctypes.CDLL(None), "prctl"):  # Linux
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(stderr, 2)
        os.close(said)
        os.close(stderr)
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: os.kill(child, number))
    os.close(stderr)
    dump = b""
    with open(said, "rb") as lines:
        for line in lines:
            if dump or _JAX_GIVES_UP.match(line):
                dump += line
            else:
                os.write(2, line)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == -signal.SIGABRT and dump:
        time.sleep(1.0)  # so that launchers first see the exit of the process that failed, if it still lives
        command.explain(Failure("another process of this run was lost; start the same command again"))
        os._exit(EXIT_CODE)
    os.write(2, dump)
    os._exit(code if code >= 0 else 128 - code)


def _explicit() -> tuple[str, int, int] | None:
    """(address, number of processes, own index) from the environment; None if it has neither of the numbers."""
    given = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    if not given.keys() & set(_VARIABLES[1:]):
        return None
    for name in _VARIABLES:
        if name not in given:
            raise UserError(f"{name} is not set, but {' and '.join(given)} {'are' if len(given) > 1 else 'is'}")
    address, *numbers = (given[name] for name in _VARIABLES)
    if not all(re.fullmatch("[0-9]{1,9}", number) for number in numbers) or int(numbers[1]) >= int(numbers[0]):
        raise UserError(f"JAX_PROCESS_ID={numbers[1]} must be at least 0 and below JAX_NUM_PROCESSES={numbers[0]}")
    if not re.fullmatch(".+:[0-9]{1,5}", address) or not 0 < int(address.rpartition(":")[2]) < 65536:
        raise UserError(f"JAX_COORDINATOR_ADDRESS={address} must be host:port, with a port from 1 to 65535")
    return address, *map(int, numbers)


def _is_alone() -> bool:
    """Whether this is the only host of a TPU in a container, as on Colab and Kaggle.

    JAX would ask Google's metadata server for the number of slices, which many containers do not reach.
    """
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES") or ","
    return "," not in hosts and not os.environ.get("MEGASCALE_NUM_SLICES")


def fetch(arrays: Any) -> Any:
    """Whole arrays on this host; a collective call, on every host, if several hosts hold parts of them."""
    if all(x.is_fully_addressable for x in jax.tree.leaves(arrays)):
        return jax.device_get(arrays)
    return multihost_utils.process_allgather(arrays, tiled=True)


def all_agree(flag: bool) -> bool:
    """Whether the flag is true on every process."""
    return bool(np.all(multihost_utils.process_allgather(np.array(flag))))


def gather_texts(text: str) -> list[str]:
    """The texts of all processes, in their order, without trailing spaces."""
    content = np.frombuffer(f"{text} ".encode(errors="backslashreplace"), np.uint8)
    longest = int(multihost_utils.process_allgather(np.array(content.size, np.int32)).max())
    padded = np.pad(content, (0, longest - content.size), constant_values=ord(" "))
    return [each.tobytes().decode().rstrip() for each in multihost_utils.process_allgather(padded).reshape(-1, longest)]


def first_fault(fault: str | None) -> str | None:
    """The first fault that any process has, so that all can report it; None if there is none."""
    return next(filter(None, gather_texts(fault or "")), None)


def check_same(what: str, *parts: bytes | str) -> None:
    """Refuses to continue if `parts` differ between processes; `what` is the flag at fault, for the message."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    found = gather_texts(digest.hexdigest())
    if others := [i for i, each in enumerate(found) if each != found[0]]:
        raise UserError(f"{what} is not the same on all hosts (processes {others} differ from process 0)")


def check_shared(workdir: epath.Path) -> None:
    """Refuses a directory that the processes do not share, as a checkpoint of all hosts must be in one place."""
    if jax.process_count() == 1:
        return
    made = [path for path in (workdir, *workdir.parents) if not path.exists()]
    if jax.process_index() == 0:
        write_file(workdir / f".shared.{os.getpid()}", "")
    mark = workdir / f".shared.{int(multihost_utils.broadcast_one_to_all(np.int32(os.getpid())))}"  # written by then
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

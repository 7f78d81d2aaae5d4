"""The machine of this process: its cores, open files, addresses and parent, and how the C library frees memory."""

import contextlib
import ctypes
import glob
import multiprocessing
import os
import resource
import socket
import threading
from collections.abc import Callable

from refusion_jax.cli.errors import UserError

ACCELERATORS = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*", "/dev/kfd")
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # of mallopt(3), which only the GNU C library has


def available_cores() -> int:
    """CPU cores that this process may run on; if the system does not report it, those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def allow_open_files(most: int | None = None) -> int:
    """Raises this process's limit of open files as far as the system allows, at most to `most`, and returns it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limits = [limit for limit in (most, hard) if limit not in (None, resource.RLIM_INFINITY)]
    with contextlib.suppress(ValueError, OSError):  # a system may grant less than it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits, default=hard), hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, where clients can wait until the model is ready; UserError if the address is not free."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host={host}: not an address of this machine") from error
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:  # it listens at once: before that, another process could bind the address, too
        return socket.create_server(address, family=family, dualstack_ipv6=both)
    except OSError as error:
        raise UserError(f"--host={host} --port={port}: {os.strerror(error.errno)}") from error


def end_with_parent(clean_up: Callable[[], None] = lambda: None) -> None:
    """Ends a child of `multiprocessing` as soon as its parent has ended, in any way; elsewhere does nothing."""

    def wait():
        parent.join()
        clean_up()
        os._exit(1)

    if parent := multiprocessing.parent_process():
        threading.Thread(target=wait, daemon=True).start()


def return_freed_memory() -> None:
    """Returns free memory to the kernel, in all heaps, even between blocks in use.

    The GNU C library makes up to eight heaps per core, and each keeps some of the freed memory.
    """
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def keep_freed_memory() -> None:
    """Without an accelerator, keeps freed memory for the next step. To be called before JAX has devices.

    XLA for CPUs allocates the temporary arrays of every step anew. The GNU C library returns large ones to the kernel,
    which clears their pages each time: 14 % of the processor time of a training step of SmolLM2-135M. Arrays that are
    kept go to one heap, since threads' own heaps cannot hold large arrays. The peak of memory does not change. With an
    accelerator the host's memory peaks when checkpoints are written, so freed memory is returned.
    """
    if not any(map(glob.glob, ACCELERATORS)) and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for option, value in ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1)):
            libc.mallopt(option, value)

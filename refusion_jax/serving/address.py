"""The address that a server listens on, and the number of connections to it."""

import contextlib
import os
import resource
import socket

from refusion_jax.cli.errors import UserError

_DESCRIPTORS = 1 << 16  # three quarters of them for clients


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


def most_connections() -> int:
    """The most clients that may be connected; others get status 503, as long as there are descriptors for that.

    The limit of descriptors, one per connection, is raised as far as the system allows.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    with contextlib.suppress(ValueError, OSError):  # a system may grant less than it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4

"""The address that a server listens on."""

import os
import socket

from refusion_jax.cli.errors import UserError


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

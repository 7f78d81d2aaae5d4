"""The address that a server listens on."""

import socket

from refusion_jax.cli.errors import UserError


def listen(host: str, port: int) -> socket.socket:
    """A socket that has the address to itself, before a model is loaded for it; clients wait until that is done.

    Raises:
      UserError: naming the flag, where there is no such address or it is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host={host}: no address of this machine") from error
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen()  # until then another process might bind the address, too
    except OSError as error:
        listening.close()
        raise UserError(f"--host={host} --port={port}: {error.strerror}") from error
    return listening

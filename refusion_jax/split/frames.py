"""Messages between device and server, in frames: length, and the message in MessagePack.

A message is a list: the number of its kind, then its fields in order, as declared here.

The connection is TLS 1.3, which also notices every changed byte. Both sides hold the same PEM file, a private key and
its self-signed certificate: each proves to the other that it has the key, and accepts no other certificate. So what
arrives was sent by this program, and its values are not checked.
"""

import dataclasses
import socket
import ssl
import struct
import typing
from pathlib import Path

import msgpack

from refusion_jax.cli.errors import UserError, refusing

VERSION = 5
_PART = 1 << 16  # bytes sent at once
_HEADER = struct.Struct("!I")  # bytes of the message


@dataclasses.dataclass(frozen=True)
class Hello:
    """The first message of a device."""

    version: int
    stamp: bytes  # of the model's weights, 16 bytes
    layers: int  # of the device; 0: it only measures the link
    codec: str
    session: bytes  # 16 bytes, of the device's choice
    last: int  # number of the last result that it has received; 0 in a new session


@dataclasses.dataclass(frozen=True)
class Welcome:
    """The first message of a server."""

    last: int  # number of the last message that it has processed; 0: the session is new
    fixed: float = 0.0  # where it was measured: seconds of a forward pass through one layer, whatever its tokens
    each: float = 0.0  # further seconds per token


@dataclasses.dataclass(frozen=True)
class Start:
    """Begins with an empty batch of rows."""

    number: int
    rows: int
    capacity: int  # cache entries of a row


@dataclasses.dataclass(frozen=True)
class Admit:
    """The following forward passes fill the caches of new rows."""

    number: int
    rows: int


@dataclasses.dataclass(frozen=True)
class Place:
    """The new rows take these places in the batch, to which the following forward passes belong."""

    number: int
    rows: bytes  # int32; rows past its end are dropped


@dataclasses.dataclass(frozen=True)
class Forward:
    """Hidden states of the tokens of one forward pass, row by row."""

    number: int
    wanted: bool  # whether the device waits for a result
    width: int  # most tokens of a row
    shards: int  # these three: how the forward pass is packed, see model/ragged.py
    tile: int
    tiles: int
    fed: bytes  # int32 of each row: number of its tokens
    length: bytes  # int32 of each row: number of cache entries that they see
    positions: bytes  # int32 of each token
    visible: bytes  # which tokens of its row each one sees, bits of [rows, width, width]; empty: those up to itself
    tokens: bytes  # by the codec


@dataclasses.dataclass(frozen=True)
class Result:
    """The inputs of the output head, for the tokens of a forward pass."""

    number: int
    tokens: bytes


@dataclasses.dataclass(frozen=True)
class Probe:
    """Requests an answer of a given number of bytes, to measure the link."""

    answer: int
    padding: bytes


@dataclasses.dataclass(frozen=True)
class Bye:
    """The device will not come back."""

    number: int


@dataclasses.dataclass(frozen=True)
class Refused:
    """Why the server refuses to continue."""

    why: str


Message = Hello | Welcome | Start | Admit | Place | Forward | Result | Probe | Bye | Refused
_KINDS = typing.get_args(Message)


def pack(message: Message) -> bytes:
    """A message as a frame."""
    body = msgpack.packb([_KINDS.index(type(message)), *vars(message).values()])
    return _HEADER.pack(len(body)) + body


def send(connection: socket.socket, message: Message) -> int:
    """Sends a message, and returns its number of bytes. The connection's timeout applies per _PART bytes."""
    frame = memoryview(pack(message))
    for at in range(0, len(frame), _PART):
        connection.sendall(frame[at : at + _PART])
    return len(frame)


def receive(connection: socket.socket) -> tuple[Message, int]:
    """(the next message, its bytes); UserError if it is none, ConnectionError if the connection ends."""
    (length,) = _HEADER.unpack(_read(connection, _HEADER.size))
    body = _read(connection, length)
    with refusing("a malformed message"):
        number, *fields = msgpack.unpackb(body)
        return _KINDS[number](*fields), _HEADER.size + length


def _read(connection: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        some = connection.recv(min(size - len(content), 1 << 20))  # as much memory as has arrived
        if not some:
            raise ConnectionError("the other side has closed the connection")
        content += some
    return bytes(content)


def secured(key: Path, is_server: bool) -> ssl.SSLContext:
    """TLS with holders of the same PEM file, a private key and its self-signed certificate; else UserError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(key)
        context.load_verify_locations(key)
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"--key={key}: no PEM file of a private key and its certificate ({error.strerror or error}); "
            f"make one: openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 "
            f"-subj /CN=split -keyout {key} -out {key}, and give it to both sides"
        ) from error
    return context


def address_of(text: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT; UserError for anything else."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise UserError(f"--server={text[:80]}: must be HOST:PORT, such as 127.0.0.1:9000")
    return host.strip("[]"), int(port)

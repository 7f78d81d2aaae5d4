"""Serves the last layers of a model to devices that hold the first ones.

  python -m refusion_jax.split server --checkpoint=runs/quickstart --key=split.pem --port=9000

Each device says how many layers it has, and how hidden states cross the link; the layers after those are loaded when
the first such device connects. Only holders of --key can connect. The server ends on SIGINT or SIGTERM; devices that
reach it again within their --patience decode their unfinished answers again.
"""

import functools
import resource
import signal
import sys
from pathlib import Path

from absl import flags
from etils import epath

from refusion_jax.checkpoints.contents import read_model_config
from refusion_jax.checkpoints.load import open_weights
from refusion_jax.cli import command
from refusion_jax.cli.errors import UserError
from refusion_jax.distributed.compiled_code import keep_for_user
from refusion_jax.distributed.host import listen
from refusion_jax.split import frames
from refusion_jax.split.service import LayerService


def define_flags(own: flags.FlagValues) -> None:
    """The flags of this side."""
    define_shared(own)
    flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0: on all of them", flag_values=own)
    flags.DEFINE_integer("port", 9000, "Port to listen on; 0: any that is free", 0, 65535, flag_values=own)
    flags.DEFINE_float("memory", 4.0, "GiB for the caches of all devices", 0.001, 2**20, flag_values=own)


def define_shared(own: flags.FlagValues) -> None:
    """The flags of both sides."""
    text = functools.partial(flags.DEFINE_string, flag_values=own)
    text("checkpoint", None, command.CHECKPOINT)
    text("key", None, "PEM file of a private key and its self-signed certificate, the same on both machines")
    choices = ["same", "int8", "int4"]
    for name, what in (("weights", "weights"), ("cache", "keys and values")):
        flags.DEFINE_enum(name, "same", choices, f"Type of this side's {what}; same: as --dtype", flag_values=own)
    dtypes = ["float32", "bfloat16"]
    flags.DEFINE_enum("dtype", "float32", dtypes, "Type of weights, cache and computation", flag_values=own)


def main(own: flags.FlagValues) -> None:
    """Serves until the process is ended."""
    check_given(own, "checkpoint", "key")
    tls = frames.secured(Path(own.key), is_server=True)
    listening = listen(own.host, own.port)
    keep_for_user()
    read, config = open_weights(own.checkpoint), read_model_config(epath.Path(own.checkpoint))
    service = LayerService(read, config, int(own.memory * 2**30), own.dtype, own.weights, own.cache)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    command.say(f"serving the last layers of {own.checkpoint} at {own.host}:{listening.getsockname()[1]}")
    try:
        service.listen(listening, tls)
    finally:
        command.say(f"at most {peak_memory():.0f} MiB of memory")


def peak_memory() -> float:
    """The peak memory of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def check_given(own: flags.FlagValues, *names: str) -> None:
    """Raises UserError, naming them, if required flags are missing."""
    if missing := [name for name in names if own[name].value is None]:
        raise UserError(f"--{' and --'.join(missing)}: needed; --help explains")

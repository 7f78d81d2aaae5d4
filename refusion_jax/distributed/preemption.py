"""Preemption, by a signal or a maintenance notice of Google's machines, and how all hosts agree on what to do.

Every host saves the same step, once, and exits with EXIT_CODE, at which the scripts in launch/ start the run again.
A second INT, HUP or QUIT (Ctrl-C again) ends the process at once; further TERMs, which schedulers send, are ignored.
"""

import os
import signal
import threading
import time
import types
import urllib.request
from pathlib import Path

import jax
from absl import logging
from jax.experimental import multihost_utils

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: not an error of the input, try again
POLL_SECONDS = 5.0

# Values of the metadata server that announce the end of the machine (a live migration does not).
_NOTICES = {"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE", "preempted": "TRUE"}

_IMPATIENT = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class PreemptionRequested(Exception):  # noqa: N818  not an error
    """Raised by `Preemption.check`."""


class Preemption:
    """Listens from its creation. Until `training` is set, a signal ends the process at once: nothing is lost."""

    def __init__(self):
        self.training = False
        self._requested = False
        self._asked = 0
        if not jax.distributed.is_initialized():  # otherwise JAX listens, and informs the other hosts
            signal.signal(signal.SIGTERM, self._hear)
        for number in _IMPATIENT:
            if signal.getsignal(number) != signal.SIG_IGN:  # as set by nohup
                signal.signal(number, self._hear)
        if server := _metadata_server():
            threading.Thread(target=watch_maintenance, args=(server,), name="maintenance", daemon=True).start()

    def _hear(self, number: int, frame: types.FrameType | None) -> None:
        if not self.training:
            os.write(2, b"interrupted: there was nothing to save; start it again\n")
            os._exit(EXIT_CODE)  # an exception would be dropped if Python is collecting garbage
        if self._requested and number in _IMPATIENT:
            os.write(2, b"left at once; the same command resumes from the newest whole checkpoint\n")
            os._exit(128 + number)
        if number in _IMPATIENT and jax.distributed.is_initialized():
            os.kill(os.getpid(), signal.SIGTERM)  # JAX informs the other hosts
        self._requested = True

    def reached(self) -> bool:
        """Whether to save and exit after this step; the same step on all hosts. Must be called at every step."""
        if jax.distributed.is_initialized():
            self._asked += 1  # not the step: after a signal before the first call, JAX says yes only at 1
            return multihost_utils.reached_preemption_sync_point(self._asked)
        return self._requested

    def check(self) -> None:
        """Raises PreemptionRequested if this process must exit, to end work between two steps that may be left undone.

        Several processes continue: they can only agree at a step.
        """
        if self._requested and not jax.distributed.is_initialized():
            raise PreemptionRequested


def _metadata_server() -> str | None:
    """Address of the metadata server, on Google's machines that have one."""
    if host := os.environ.get("GCE_METADATA_HOST"):
        return host
    product = Path("/sys/class/dmi/id/product_name")
    is_google = product.exists() and product.read_text().startswith("Google")
    return "metadata.google.internal" if is_google else None


def watch_maintenance(server: str) -> None:
    """Waits for a maintenance notice, then sends SIGTERM to this process and returns.

    A notice that already exists at the beginning is ignored: the run has just been started in spite of it, and the
    machine sends another SIGTERM before it goes down.
    """
    before = {key: _ask(server, key) for key in _NOTICES}
    while True:
        time.sleep(POLL_SECONDS)
        for key, notice in _NOTICES.items():
            now = _ask(server, key)
            if now == notice and before[key] not in (notice, None):
                logging.warning("%s says %s: saving and leaving", key, now)
                os.kill(os.getpid(), signal.SIGTERM)
                return
            before[key] = now or before[key]


def _ask(server: str, key: str) -> str | None:
    url = f"http://{server}/computeMetadata/v1/instance/{key}"
    try:
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        with urllib.request.urlopen(request, timeout=POLL_SECONDS) as answer:
            return answer.read().decode().strip()
    except OSError:
        return None

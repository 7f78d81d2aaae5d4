"""Chat templates, which are untrusted programs, rendered in a separate process with resource limits."""

import json
import os
import select
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from refusion_jax.runtime.errors import UserError

SECONDS = 5.0  # of processor time, for one conversation
_PATIENCE = 60.0  # seconds on the clock, on however busy a machine
_BYTES = 1 << 30  # of address space; Python and jinja2 take 60 MB of it
_CHARACTERS = 1 << 24  # of one conversation

_ENDINGS = {signal.SIGPROF: "it takes too much time", signal.SIGKILL: "it takes too much time"}


class ChatTemplate:
    """A jinja2 template with limits on its time, memory and output."""

    def __init__(self, source: str, origin: str):
        """Compiles it.

        Args:
          source: of the template.
          origin: the file it comes from, for messages.

        Raises:
          UserError: where it is no template, or takes more than it may.
        """
        self._source, self._origin = source, origin
        self._lock = threading.Lock()
        self._process: _Process | None = None
        with self._lock:
            self._start()

    def render(self, **variables: Any) -> str:
        """The text of a conversation.

        Args:
          **variables: what the template may use, made of what JSON knows.

        Raises:
          UserError: where the template fails, or takes more than it may.
        """
        with self._lock:
            if self._process is None or self._process.owner != os.getpid():  # ended, or of the process that forked us
                self._start()
            return self._ask(variables, "fails")

    def _start(self) -> None:
        self._process = _Process()
        limits = {"seconds": SECONDS, "bytes": _BYTES, "characters": _CHARACTERS}
        self._ask({"template": self._source, **limits}, "cannot be read")

    def _ask(self, question: dict[str, Any], what: str) -> str:
        answer = self._process.ask(json.dumps(question).encode() + b"\n")
        if answer is None:
            why = _ENDINGS.get(self._process.end(), "its process crashed")
            self._process = None
        else:
            why = answer.get("error")
        if why is not None:
            raise UserError(f"{self._origin}: the chat template {what}: {why}")
        return answer["text"]


class _Process:
    """The child process and its pipes; it ends when this object is garbage-collected."""

    def __init__(self):
        self.owner = os.getpid()
        there_in, here_out = os.pipe()
        here_in, there_out = os.pipe()
        program = str(Path(__file__).with_name("chat_child.py"))
        self._pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", program],
            {},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, there_in, 0),
                (os.POSIX_SPAWN_DUP2, there_out, 1),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
        )
        os.close(there_in)
        os.close(there_out)
        self._in, self._out = here_in, here_out
        self.end = weakref.finalize(self, _end, self._pid, here_in, here_out)

    def ask(self, line: bytes) -> dict[str, Any] | None:
        """The answer of the process; None if it has ended, or was killed because it took too long."""
        answer, until = bytearray(), time.monotonic() + _PATIENCE
        try:
            while line:
                line = line[os.write(self._out, line) :]
        except BrokenPipeError:
            return None
        while not answer.endswith(b"\n"):
            if not select.select([self._in], [], [], max(0.0, until - time.monotonic()))[0]:
                os.kill(self._pid, signal.SIGKILL)
                return None
            if not (block := os.read(self._in, 1 << 20)):
                return None
            answer += block
        return json.loads(answer)


def _end(pid: int, *files: int) -> int:
    """Ends the process by closing its pipes. Returns the signal that had ended it before, or 0."""
    for file in files:
        os.close(file)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) * -1
    except ChildProcessError:  # of the process that forked us
        return 0

"""Templates, which are untrusted programs, rendered in a separate process with resource limits."""

import json
import os
import signal
import sys
import threading
import time
import weakref
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

SECONDS = 5.0  # of processor time, for one text
_PATIENCE = 60.0  # seconds on the clock, on however busy a machine
_BYTES = 1 << 30  # of address space; Python and jinja2 take 60 MB of it
_CHARACTERS = 1 << 22  # of one text, a million tokens

_ENDINGS = {signal.SIGPROF: "it takes too much time", signal.SIGKILL: "it takes too much time"}


class TemplateError(ValueError):
    """Why a template gives no text: what comes behind "the template"."""


class Templates:
    """Renders jinja2 templates of one dialect, with limits on time, memory and output of each text."""

    def __init__(self, dialect: Literal["chat", "task"]):
        """Starts nothing yet.

        Args:
          dialect: how they are read, see `template_child.dialect`.
        """
        self._dialect = dialect
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def compile(self, template: str) -> None:
        """Compiles a template, and renders nothing.

        Raises:
          TemplateError: where it is no template, or takes more than it may.
        """
        self._ask({"template": template, "variables": None}, "cannot be read")

    def render(self, template: str, variables: dict[str, Any]) -> str:
        """The text of a template.

        Args:
          template: its source.
          variables: what it may use; values that JSON does not know are texts to it.

        Raises:
          TemplateError: where it fails, or takes more than it may.
        """
        return self._ask({"template": template, "variables": variables}, "fails")

    def _ask(self, question: dict[str, Any], what: str) -> str:
        line = json.dumps(question, default=str).encode() + b"\n"
        with self._lock:
            if self._process is None or self._process.owner != os.getpid():  # ended, or of the process that forked us
                limits = {"seconds": SECONDS, "bytes": _BYTES, "characters": _CHARACTERS}
                self._process = _Process({"dialect": self._dialect, **limits})
            answer = self._process.ask(line)
            if answer is None:
                answer = {"error": _ENDINGS.get(self._process.end(), "its process crashed")}
                self._process = None
        if "error" in answer:
            raise TemplateError(f"{what}: {answer['error']}")
        return answer["text"]


class _Process:
    """The child process and its pipes; it ends when this object is garbage-collected."""

    def __init__(self, limits: dict[str, Any]):
        self.owner = os.getpid()
        there_in, here_out = os.pipe()
        here_in, there_out = os.pipe()
        program = str(Path(__file__).with_name("template_child.py"))
        self._pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", program, json.dumps(limits)],
            {},
            setsigmask=[],
            setsigdef=[signal.SIGPROF],  # that of its timer; libtpu, once it is loaded, ignores it
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
            if not wait([self._in], max(0.0, until - time.monotonic())):
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

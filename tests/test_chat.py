"""Conversations at a terminal and through a pipe, with real processes."""

import contextlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from conftest import FORKS, ROOT, environment, run
from helpers import tiny_qwen3

from refusion_jax import DecodeSettings, Request, decode, load_model, load_tokenizer

HELP = re.compile(r"/settings  .*?a space before it\.\r?\n", re.DOTALL)
LOG = r"W\d{4} .*\n"
IN_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """A model with a chat template, which reads 256 tokens."""
    path = tmp_path_factory.mktemp("chat") / "model"
    tiny_qwen3(path)
    return path


def chat(checkpoint, lines: list[str], *flags: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a chat that gets these lines through a pipe."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with FORKS.start("chat", [f"--checkpoint={checkpoint}", *flags], environment(1), **pipes) as process:
        out, err = process.communicate("".join(f"{text}\n" for text in lines).encode())
    return process.returncode, out.decode(), err.decode()


class Terminal:
    """What a user does at a terminal, and sees there."""

    def __init__(self, process: subprocess.Popen):
        self._process, self.log = process, ""

    def ask(self, keys: str, until: str = r"\n> $") -> str:
        """Types, and returns what is shown until there is something, by default the next prompt.

        Left out are colors, movements of the cursor, and JAX's log, which is kept.
        """
        self._process.stdin.write(keys.encode())
        self._process.stdin.flush()
        seen, plain, log = b"", "", []
        while not re.search(until, plain):
            assert (more := self._process.stdout.read1()), plain
            seen += more
            plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode(errors="ignore"))
            plain, log = re.sub(LOG, "", plain), re.findall(LOG, plain)
        self.log += "".join(log)
        return plain


@contextlib.contextmanager
def terminal(checkpoint, *flags: str) -> Iterator[Terminal]:
    """A chat at a terminal of its own, which the user ends well."""
    line = [sys.executable, "-c", IN_A_TERMINAL, sys.executable, "-m", "refusion_jax.chat"]
    env = environment(1) | {"TERM": "xterm", "JAX_LOG_COMPILES": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*line, f"--checkpoint={checkpoint}", *flags], cwd=ROOT, env=env, **pipes) as process:
        timer = threading.Timer(600, process.kill)  # or what is never shown would be waited for
        timer.start()
        try:
            yield Terminal(process)
            assert process.wait(timeout=300) == 0
        finally:
            timer.cancel()
            process.kill()


def test_turns_have_the_history_that_fits_by_the_chat_template(talker):
    """And are sampled as the turn of that number; /undo and /new take turns back; what can never fit ends it."""
    said = [f"What is the number {i}?" for i in range(7)]
    lines = [x for text in (*said, said[-1], said[0]) for x in (text, "/help")]
    lines[-4:-4], lines[-2:-2] = ["/undo"], ["/new"]
    sizes = {"max_new_tokens": 16, "cache_length": 160, "temperature": 0.7, "seed": 5, "slot_size": 4}
    code, out, err = chat(talker, [*lines, "x " * 200], *(f"--decode.{name}={x}" for name, x in sizes.items()))
    assert code == 2, err
    *notes, error = err.splitlines()
    assert re.fullmatch("error: the turn: has .* tokens; at most 144 fit before 16 more", error)
    *answers, rest = HELP.split(out)
    assert rest == ""
    assert answers[-2:] == [answers[-3], answers[0]]

    tokenizer, turns, prompts, dropped = load_tokenizer(talker), [], [], 0
    for text, answer in zip(said, answers, strict=False):
        turns.append(("user", text))
        fits = lambda first: len(tokenizer.encode_prompts([tuple(turns[first:])])[0]) <= 160 - 16  # noqa: B023, E731
        dropped = next(first for first in range(0, len(turns), 2) if fits(first))
        prompts += tokenizer.encode_prompts([tuple(turns[dropped:])])
        turns.append(("assistant", answer.removesuffix("\n")))
    assert notes[-1] == f"turns left out from here on, as they do not fit: the first {dropped // 2}"
    settings = DecodeSettings(**sizes)
    requests = [Request(prompt, noise=number, settings=settings) for number, prompt in enumerate(prompts)]
    expected = [tokenizer.decode(tokens) + "\n" for tokens in decode(load_model(talker), requests, settings).tokens]
    assert answers[: len(expected)] == expected


@pytest.mark.thorough
def test_a_model_without_a_template_is_asked_each_turn_alone(trained_run, tmp_path):
    flags = ["--decode.max_new_tokens=16", "--decode.slot_size=4"]
    code, out, err = chat(
        trained_run, ["Sort 7 3 9.", "/help", "", "Quote ann fig bob.", "/set temperature=-1"], *flags
    )
    assert code == 2, err
    note, error = err.splitlines()
    assert note == f"{trained_run} has no chat template: it is asked each turn alone, as by `generate --prompt`"
    assert error.startswith("error: --decode.temperature=-1: must be at least 0")
    (tmp_path / "in.jsonl").write_text('{"prompt": "Sort 7 3 9."}\n{"prompt": "Quote ann fig bob."}\n')
    lines, _ = run("generate", f"--checkpoint={trained_run}", f"--input={tmp_path}/in.jsonl", *flags)
    texts = [json.loads(line)["text"] + "\n" for line in lines.splitlines()]
    assert HELP.split(out) == texts


@pytest.mark.thorough
def test_a_terminal_shows_slots_as_they_fill_and_is_never_left_by_mistake(talker):
    config = json.loads((talker / "config.json").read_text())
    (talker / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    with terminal(talker, "--decode.max_new_tokens=4000", "--decode.method=sequential") as user:
        user.ask("")
        assert "Compiling jit(_run)" in user.log
        user.log = ""
        assert "error: /set: asks for 9000 tokens" in user.ask("/set max_new_tokens=9000\n")
        assert "error: /set slot_size: is compiled in; start" in user.ask("/set slot_size=2\n")
        assert "error: /sett: unknown; /help lists" in user.ask("/sett\n")

        user.ask("What is the number?\n", until=r"[^\s░]░")  # a text that ends in masks
        stopped = user.ask("\x03")
        assert re.search(r"[^░]\r\n\(\d+ forwards, [\d.]+ s, stopped\)\r\n> $", stopped)

        user.ask("/set max_new_tokens=16\n")
        assert "\nmax_new_tokens=16  Maximum number of tokens" in user.ask("/settings\n")
        answer = user.ask("It is the number.\n")
        assert "░" * 16 in answer
        assert re.search(r"[^░]\r\n\(16 forwards, [\d.]+ s, cut at max_new_tokens\)\r\n> $", answer)
        assert not re.search(r"Compiling jit\((?!_release)", user.log)  # which may be compiled a little later
        user.ask("\x03\n")  # the end of a line, as readline may sleep through a signal that comes with its prompt
        user.ask("/sett\n", until=r"error: /sett.*\n> $")
        user.ask("\x04", until="")

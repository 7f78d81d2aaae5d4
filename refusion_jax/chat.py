"""Chats with a trained model over several turns, and shows slots as they fill.

  python -m refusion_jax.chat --checkpoint=runs/quickstart
  echo 'Sort 7 3 9 1.' | python -m refusion_jax.chat --checkpoint=runs/quickstart

At a terminal, an answer shows committed tokens as text and every other position as ░. Ctrl-C stops it and keeps its
text up to the first ░; Ctrl-D ends the chat; /help lists the commands. If stdin or stdout is not a terminal, each line
of stdin is a turn, and the answers go to stdout.

The turns so far are rendered with the model's chat template. When they and an answer no longer fit into the cache, the
oldest are left out. A model without a template sees each turn on its own, as with `generate`. Turn i, from 0, is
sampled with the noise of (--decode.seed, i): the same turns get the same answers.

Everything is compiled at the start, so that no turn waits for it: the cache has room for --decode.cache_length tokens
of turns and answer (by default what the model reads, at most 4,096), and an answer has at most --decode.max_new_tokens
(by default 256, or half of that room).
"""

import contextlib
import queue
import sys
import time

from absl import flags
from etils import epath
from rich.console import Console

from refusion_jax.checkpoints.contents import chosen_settings, load_tokenizer, read_model_config
from refusion_jax.checkpoints.load import load_for
from refusion_jax.cli import command
from refusion_jax.cli.errors import Failure, UserError, check_characters, first_line
from refusion_jax.cli.settings import declared
from refusion_jax.data.interface import Tokenizer
from refusion_jax.decoding.requests import Request
from refusion_jax.decoding.settings import TokenIds
from refusion_jax.distributed.compiled_code import keep_for_user
from refusion_jax.distributed.sharding import local_mesh
from refusion_jax.serving.engine import Engine, Job, sized
from refusion_jax.serving.terminal import Screen, printable
from refusion_jax.systems.api import all_settings, own_settings, read_settings

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, command.CHECKPOINT)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of weights, cache and computation")
_TENSOR = flags.DEFINE_integer("mesh.tensor", 1, "Split heads and weights over this many devices", lower_bound=1)
_OWN = {name: own for name, own in all_settings().items() if name != "batch_size"}
command.define_settings(_OWN, defaults={"max_new_tokens": 256, "cache_length": 4096})
_ROOM = 4096  # tokens of prompt and answer: the cache takes memory, and on a CPU time, for each
_HELP = """\
/settings           shows the settings of decoding
/set NAME=VALUE     changes some of them, from the next answer on
/undo               forgets the last turn and its answer
/new                forgets all turns
/help               shows this
Ctrl-C stops an answer, Ctrl-D ends the chat. A turn that is to begin with / needs a space before it."""


class Chat:
    """A conversation with a model."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, eos_id: int, is_terminal: bool):
        self._engine, self._tokenizer, self._eos_id, self._is_terminal = engine, tokenizer, eos_id, is_terminal
        self._settings = engine.settings
        self._turns: list[tuple[str, str]] = []  # (role, text), alternately of the user and the model
        self._first = 0  # index of the first turn that still fits

    def say(self, line: str) -> None:
        """Answers a line: a turn, or a command."""
        name, _, rest = line.partition(" ")
        if not line.startswith("/"):
            self._ask(line)
        elif name == "/help":
            print(_HELP, flush=True)
        elif name == "/settings":
            for own in sorted(self._settings.changeable):
                print(f"{own}={getattr(self._settings, own)}  {declared(type(self._settings))[own].help}", flush=True)
        elif name == "/set":
            self._set(rest.split())
        elif name in ("/undo", "/new"):
            del self._turns[-2 if name == "/undo" else 0 :]
            self._first = min(self._first, len(self._turns))
        else:
            raise UserError(f"{name}: unknown; /help lists what there is")

    def _set(self, pairs: list[str]) -> None:
        """Changes settings of later answers; refuses those of scope "compiled"."""
        if not pairs:
            raise UserError("/set: needs NAME=VALUE; /settings shows the names")
        changes = read_settings(pairs, "/set")
        kept = {name: own for name, own in vars(self._settings).items() if name not in self._settings.unread}
        changed = own_settings(self._settings.method, kept | changes)
        for name in sorted(changes.keys() - self._settings.changeable):
            raise UserError(f"/set {name}: is compiled in; start again with --decode.{name}={changes[name]}")
        self._engine.check(Request([self._eos_id], settings=changed, name="/set"))
        self._settings = changed

    def _ask(self, text: str) -> None:
        """Answers a turn; one that does not fit, even alone, is refused and not added to the conversation."""
        check_characters(text, "the turn")
        turns = [*self._turns, ("user", text)]
        first = self._first if self._tokenizer.has_chat_template else len(self._turns)
        room = self._engine.settings.cache_length - self._settings.new_tokens
        while True:
            (ids,) = self._tokenizer.encode_prompts([tuple(turns[first:])])
            if len(ids) <= room or first == len(self._turns):
                break
            first += 2
        self._engine.check_prompt(ids, "the turn", self._settings.new_tokens)
        asked = Request(ids, settings=self._settings, noise=len(self._turns) // 2, name="the turn")
        request = self._engine.check(asked)
        if self._tokenizer.has_chat_template and first > self._first:
            note = f"turns left out from here on, as they do not fit: the first {first // 2}"
            print(note, file=sys.stderr, flush=True)
            self._first = first
        self._turns = [*turns, ("assistant", self._decode(request))]

    def _decode(self, request: Request) -> str:
        """Shows an answer while it is decoded, and returns its text."""
        reports, began, is_watched = queue.SimpleQueue(), time.monotonic(), self._is_terminal
        job = Job(request, lambda *news: reports.put(news) or True, reports.put, is_watched, by_forward=is_watched)
        screen = Screen(request, self._tokenizer, self._eos_id, is_shown=is_watched)
        try:
            with screen:
                self._engine.submit([job])
                while screen.finish_reason is None:
                    news = reports.get()
                    if isinstance(news, Exception):
                        raise Failure(f"the decoder has failed: {first_line(news)}") from news
                    screen.show(*news)
        except KeyboardInterrupt:
            job.is_over = True
            if not self._is_terminal:
                raise
        print(printable(screen.text) if self._is_terminal else screen.text, flush=True)
        end = {None: ", stopped", "length": ", cut at max_new_tokens", "stop": ""}[screen.finish_reason]
        if self._is_terminal:
            count = f"{screen.forwards} forward{'s' * (screen.forwards != 1)}"
            print(f"({count}, {time.monotonic() - began:.1f} s{end})", flush=True)
        return screen.text


def main() -> None:
    if _CHECKPOINT.value is None:
        raise UserError("--checkpoint=DIR is needed; --help explains")
    checkpoint = epath.Path(_CHECKPOINT.value)
    settings = chosen_settings(checkpoint, command.given())
    config, tokenizer = read_model_config(checkpoint), load_tokenizer(checkpoint)
    settings = sized(settings, config, _ROOM)
    eos_id = TokenIds.of(settings, config).eos_id
    mesh = local_mesh(tensor=_TENSOR.value)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    keep_for_user()
    if not tokenizer.has_chat_template:
        note = "has no chat template: it is asked each turn alone, as by `generate --prompt`"
        print(f"{checkpoint} {note}", file=sys.stderr, flush=True)
    with Console().status("loading and compiling") if is_terminal else contextlib.nullcontext():
        engine = Engine(load_for(checkpoint, settings, _DTYPE.value, mesh), settings, rows=1)
        engine.start()
    try:
        if engine.failure:
            raise Failure(f"the decoder has failed: {first_line(engine.failure)}") from engine.failure
        talk(Chat(engine, tokenizer, eos_id, is_terminal), is_terminal)
    finally:
        engine.close()


def talk(chat: Chat, is_terminal: bool) -> None:
    """Reads turns until there are no more; UserError if one cannot be answered, which at a terminal is only printed."""
    if not is_terminal:
        for line in filter(str.strip, sys.stdin):
            chat.say(line.rstrip("\r\n"))
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  lets the user edit turns, and recall earlier ones
    print("/help lists commands, Ctrl-D ends the chat", flush=True)
    while True:
        try:
            line = input("> ")
            if line.strip():
                chat.say(line)
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return
        except UserError as error:
            command.explain(error)


if __name__ == "__main__":
    command.run(main)

"""The process that renders templates, which are untrusted programs, under resource limits of the kernel.

Run as a file by `templates.py`; imports nothing of this package. Its argument is a JSON object {"dialect", "seconds",
"bytes", "characters"}. Reads one JSON object a line, {"template", "variables"}, where variables are null if the
template is only to be compiled; answers each by a line, {"text"} or {"error"}.
"""

import functools
import json
import re
import resource
import signal
import sys

import jinja2
import jinja2.sandbox

_KEPT = 64  # compiled templates


def dialect(name: str) -> jinja2.Environment:
    """How templates are read: "chat" as transformers does, "task" as lm_eval does.

    Of what transformers offers a chat template, `strftime_now` is missing: a prompt would change from day to day.
    Templates ask whether it is defined.
    """
    if name == "chat":
        made = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        made.filters["tojson"] = _to_json
        made.globals["raise_exception"] = _refuse
        return made
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    made.filters["regex_replace"] = lambda text, pattern, repl, count=0: re.sub(pattern, repl, text, count=count)
    return made


def _to_json(value: object, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """As it is; jinja2's own filter escapes what HTML would read."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: object) -> None:
    """A template's own complaint of the conversation that it is given."""
    raise ValueError(str(message))


def render(template: jinja2.Template, variables: dict, most: int) -> str:
    """Renders a text of at most `most` characters."""
    pieces, length = [], 0
    for piece in template.generate(**variables):
        pieces.append(piece)
        length += len(piece)
        if length > most:
            raise ValueError(f"it gives more than {most:,} characters")
    text = "".join(pieces)
    text.encode()  # of half of a surrogate pair, too, it says what is wrong
    return text


def main() -> None:
    """Answers requests until stdin is closed."""
    limits = json.loads(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limits["bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiled = functools.lru_cache(_KEPT)(dialect(limits["dialect"]).from_string)
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, limits["seconds"])  # of processor time; its end ends the process
        try:
            asked = json.loads(line)
            template = compiled(asked["template"])  # this evaluates its constants, which may take forever
            variables = asked["variables"]
            answer = {"text": "" if variables is None else render(template, variables, limits["characters"])}
        except MemoryError:
            answer = {"error": f"it needs more than {limits['bytes'] >> 20} MiB of memory"}
        except RecursionError:
            answer = {"error": "it is nested too deeply"}
        except Exception as error:  # noqa: BLE001  a program by strangers may raise anything
            answer = {"error": " ".join(str(error).split())[:300] or type(error).__name__}
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

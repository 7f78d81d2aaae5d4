"""The process that renders a chat template, which is an untrusted program, under resource limits of the kernel.

Run as a file by `chat_template.py`; imports nothing of this package. Reads one JSON object a line: first
{"template", "seconds", "bytes", "characters"}, then {"messages", ...}; answers each by a line, {"text"} or {"error"}.
"""

import json
import resource
import signal
import sys

import jinja2
import jinja2.sandbox


def compile_template(source: str) -> jinja2.Template:
    """Compiles a template. This evaluates its constants, which may take forever."""
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return sandbox.from_string(source)


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
    template, limits = None, {}
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        try:
            if template is None:
                limits = {name: asked[name] for name in ("seconds", "bytes", "characters")}
                resource.setrlimit(resource.RLIMIT_AS, (limits["bytes"],) * 2)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.setitimer(signal.ITIMER_PROF, limits["seconds"])  # of processor time; its end ends the process
            if template is None:
                template, answer = compile_template(asked["template"]), {"text": ""}
            else:
                answer = {"text": render(template, asked, limits["characters"])}
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

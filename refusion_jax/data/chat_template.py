"""Chat templates: how a tokenizer writes a conversation.

A template is a jinja2 program. It is rendered as transformers does, in jinja2's sandbox.
"""

import datetime
import functools
import json
import re
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox

from refusion_jax.cli.errors import refusing

_DAY = datetime.date(2025, 7, 1)
_GENERATION = re.compile(r"({%[-+]?\s*(?:end)?)generation\b")  # without effect on the text, like {% with %}


class ChatTemplate:
    """A compiled template.

    `strftime_now` always returns the same day, since prompts must not change from day to day; for templates that ask
    whether it is defined, it is not.
    """

    def __init__(self, source: str, origin: str):
        """Compiles it; UserError if it is not a template."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # jinja2's escapes HTML
        environment.globals["raise_exception"] = _refuse
        if "strftime_now is" not in source:
            environment.globals["strftime_now"] = _DAY.strftime
        with refusing(f"{origin}: the chat template cannot be read"):
            self._template = environment.from_string(_GENERATION.sub(r"\1with", source))

    def render(self, **variables: Any) -> str:
        """The text of a conversation; UserError if the template fails."""
        with refusing("the chat template fails"):
            return self._template.render(**variables)


def _refuse(message: object) -> NoReturn:
    """Lets a template reject the conversation that it is given."""
    raise jinja2.TemplateError(str(message))

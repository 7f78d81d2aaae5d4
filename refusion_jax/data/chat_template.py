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

from refusion_jax.cli.errors import UserError, first_line

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
        try:
            self._template = environment.from_string(_GENERATION.sub(r"\1with", source))
        except Exception as error:  # noqa: BLE001  jinja2 lets Python compile it, and evaluates constants
            raise UserError(f"{origin}: the chat template cannot be read: {first_line(error)}") from error

    def render(self, **variables: Any) -> str:
        """The text of a conversation; UserError if the template fails."""
        try:
            return self._template.render(**variables)
        except Exception as error:  # noqa: BLE001  a program may raise anything
            raise UserError(f"the chat template fails: {first_line(error)}") from error


def _refuse(message: object) -> NoReturn:
    """Lets a template reject the conversation that it is given."""
    raise jinja2.TemplateError(str(message))

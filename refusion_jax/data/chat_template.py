"""Chat templates: how a tokenizer writes a conversation."""

from typing import Any

from refusion_jax.cli.errors import UserError
from refusion_jax.data.templates import TemplateError, Templates


class ChatTemplate:
    """A jinja2 template with limits on its time, memory and output, see `Templates`."""

    def __init__(self, source: str, origin: str):
        """Compiles it.

        Args:
          source: of the template.
          origin: the file it comes from, for messages.

        Raises:
          UserError: where it is no template, or takes more than it may.
        """
        self._source, self._origin = source, origin
        self._templates = Templates("chat")
        try:
            self._templates.compile(source)
        except TemplateError as error:
            raise UserError(f"{origin}: the chat template {error}") from error

    def render(self, **variables: Any) -> str:
        """The text of a conversation.

        Args:
          **variables: what the template may use, made of what JSON knows.

        Raises:
          UserError: where the template fails, or takes more than it may.
        """
        try:
            return self._templates.render(self._source, variables)
        except TemplateError as error:
            raise UserError(f"{self._origin}: the chat template {error}") from error

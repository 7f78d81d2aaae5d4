"""Base classes of decoders that continue a prompt on a cache: compiled sizes, and the state of the decoding loop.

Such decoders only append to what is given; they fill no templates. Each has a subclass of `Continuer`, with the width
of its forwards and its own `init` and `step`, and, where it carries more state, one of `Continuation`.

Axes: B rows, T tokens.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Key

from refusion_jax.decoding.cache import Cache
from refusion_jax.decoding.decoder import Decoder
from refusion_jax.decoding.requests import (
    Layout,
    Places,
    Request,
    check_no_templates,
    most_new_tokens,
    prefill_chunk,
    text_capacity,
)
from refusion_jax.decoding.sampling import Record
from refusion_jax.decoding.settings import Settings, TokenIds, TracedSettings
from refusion_jax.model.transformer import ModelConfig, Transformer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Continuation:
    """The state of the decoding loop; decoders that need more fields subclass it."""

    cache: Cache
    record: Record
    places: Places
    keys: Key[Array, "B"]
    settings: TracedSettings
    active: Bool[Array, "B"]
    forwards: Int32[Array, "B"]

    @property
    def rounds(self) -> Int32[Array, "B"]:
        """Every forward counts as a round."""
        return self.forwards


_State = TypeVar("_State", bound=Continuation)


@dataclasses.dataclass(frozen=True)
class Continuer(Decoder):
    """A decoder's compiled sizes."""

    settings: ClassVar[type[Settings]] = Settings
    copies_prefix: ClassVar[bool] = True

    ids: TokenIds
    width: int  # tokens of a row that one forward feeds
    new_tokens: int  # at most, in a row
    cache_length: int
    chunk: int  # given tokens per forward of the prefill

    @classmethod
    def for_requests(cls, requests: Sequence[Request], model: ModelConfig) -> Self:
        """A decoder with the smallest sizes that serve all of these requests.

        Raises:
          UserError: for templates, as the text after a gap could not be seen.
        """
        check_no_templates(requests)
        width = cls.width_for(requests)
        return cls(
            ids=TokenIds.of(requests[0].settings, model),
            width=width,
            new_tokens=most_new_tokens(requests),
            cache_length=text_capacity(requests) + width,
            chunk=prefill_chunk(requests),
        )

    @classmethod
    def width_for(cls, requests: Sequence[Request]) -> int:
        """Tokens of a row that one forward has to feed to serve these requests."""
        raise NotImplementedError

    def scored(self, model: Transformer, rows: int) -> int:
        """No more places of a row than it decodes."""
        return super().scored(model, rows) * min(self.width, self.new_tokens) // self.width

    def lay_out(self, requests: Sequence[Request]) -> Layout:
        """Given tokens, places to decode and settings of some requests."""
        return Layout.of(requests, self.cache_length, self.new_tokens)

    def start(self, state: type[_State], layout: Layout, keys: Key[Array, "B"], cache: Cache, **own: Any) -> _State:
        """The initial state of some rows.

        Args:
          state: class of the state.
          layout: given tokens and places to decode.
          keys: one per row.
          cache: filled with what is given.
          **own: further fields of the class.
        """
        zeros = jnp.zeros_like(layout.given.length)
        return state(
            cache=cache,
            record=Record.empty(len(zeros), self.new_tokens + self.width),
            places=layout.places,
            keys=keys,
            settings=layout.settings,
            active=zeros == 0,
            forwards=zeros,
            **own,
        )


def cut_after_eos(
    is_new: Bool[Array, "B T"],
    tokens: Int32[Array, "B T"],
    at: Int32[Array, "B T"],
    end: Int32[Array, "B"],
    eos_id: int,
) -> tuple[Bool[Array, "B T"], Int32[Array, "B"]]:
    """Cuts new tokens after the first EOS among them: (which tokens are still new, where each text ends).

    Args:
      is_new: tokens about to be written.
      tokens: only new ones count.
      at: their indices in the text.
      end: the maximal length of each text so far.
      eos_id: id of the end-of-text token.
    """
    end = jnp.min(jnp.where(is_new & (tokens == eos_id), at + 1, end[:, None]), axis=1)
    return is_new & (at < end[:, None]), end

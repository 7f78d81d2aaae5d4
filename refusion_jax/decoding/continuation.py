"""What decoders share that continue a prompt on a cache: the sizes that are compiled in, and what the loop carries.

They write behind what is given alone. A decoder has a subclass of `Continuer`, which says how wide its forwards are,
and one of `Continuation`, with what else it carries from forward to forward; how it writes is what makes it itself.

Axes: B rows, T tokens.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Key

from refusion_jax.decoding.cache import Cache
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
from refusion_jax.decoding.settings import RowSettings, Settings, TokenIds
from refusion_jax.model.transformer import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Continuation:
    """All that the decoding loop carries; a decoder that needs more has a subclass of its own."""

    cache: Cache
    record: Record
    places: Places
    keys: Key[Array, "B"]
    settings: RowSettings
    active: Bool[Array, "B"]
    forwards: Int32[Array, "B"]

    @property
    def rounds(self) -> Int32[Array, "B"]:
        """Every forward is one."""
        return self.forwards


_State = TypeVar("_State", bound=Continuation)


@dataclasses.dataclass(frozen=True)
class Continuer:
    """The sizes that are compiled in."""

    settings: ClassVar[type[Settings]] = Settings
    row_settings: ClassVar[type[RowSettings]] = RowSettings

    ids: TokenIds
    width: int  # tokens of a row that one forward feeds
    new_tokens: int  # of a row, at most
    cache_length: int
    chunk: int  # given tokens that one forward of the prefill takes

    @classmethod
    def for_requests(cls, requests: Sequence[Request], model: ModelConfig) -> Self:
        """The least sizes that serve all of these requests.

        Raises:
          UserError: for templates, which need what is not seen from before a gap.
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
        """Tokens of a row that one forward feeds, to serve these requests."""
        raise NotImplementedError

    def lay_out(self, requests: Sequence[Request]) -> Layout:
        """Given tokens, the places behind them and settings of some requests."""
        return Layout.of(requests, self.cache_length, self.new_tokens, self.row_settings)

    def start(self, state: type[_State], layout: Layout, keys: Key[Array, "B"], cache: Cache, **own: Any) -> _State:
        """Rows of which nothing is written.

        Args:
          state: the decoder's own.
          layout: what is given and where to write.
          keys: one a row.
          cache: of what is given.
          **own: fields of the subclass.
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


def cut_behind_eos(
    is_new: Bool[Array, "B T"],
    tokens: Int32[Array, "B T"],
    at: Int32[Array, "B T"],
    end: Int32[Array, "B"],
    eos_id: int,
) -> tuple[Bool[Array, "B T"], Int32[Array, "B"]]:
    """(which tokens are still new, where texts end) once an EOS among the new ones ends its text behind itself.

    Args:
      is_new: tokens about to be written.
      tokens: of which the new ones count.
      at: their indices.
      end: how long the texts may be so far.
      eos_id: the end of text.
    """
    end = jnp.min(jnp.where(is_new & (tokens == eos_id), at + 1, end[:, None]), axis=1)
    return is_new & (at < end[:, None]), end

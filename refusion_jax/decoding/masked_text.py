"""Shared parts of the decoders of masked text, which fill the masks of a text in any order by bidirectional forwards.

In every forward such a decoder takes a window of the text, proposes a token for each mask in it, and commits some of
them. The decoders differ in how they choose these.

Axes: B rows, C text length, N places to decode, K places of a window, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, Key

from refusion_jax.cli.errors import UserError
from refusion_jax.decoding.requests import Layout, Request
from refusion_jax.decoding.sampling import Record, mask_logits, sample
from refusion_jax.decoding.settings import TokenIds
from refusion_jax.model.transformer import ModelConfig

# Default and help of the setting `shift`, which decoders have that serve models of several systems; see `is_shifted`.
SHIFT = "auto", "Whether the token at j is read from the logits at j - 1: yes | no | auto (what a run's model says; no)"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskedText:
    """The state of the decoding loop; decoders that need more fields subclass it."""

    layout: Layout
    keys: Key[Array, "B"]
    text: Int32[Array, "B C"]  # the mask token wherever nothing is committed
    length: Int32[Array, "B"]  # of the text
    record: Record
    active: Bool[Array, "B"]
    forwards: Int32[Array, "B"]

    @property
    def rounds(self) -> Int32[Array, "B"]:
        """Every forward counts as a round."""
        return self.forwards

    @classmethod
    def start(cls, layout: Layout, keys: Key[Array, "B"], ids: TokenIds, at_once: int, **own: Any) -> Self:
        """The initial state of some rows.

        Args:
          layout: given tokens and places to decode.
          keys: one a row.
          ids: of the special tokens.
          at_once: the largest K; the record needs room for that many extra entries.
          **own: further fields of the subclass.
        """
        B, C = layout.given.tokens.shape
        given = layout.given
        at = jnp.where(jnp.arange(C)[None] < given.length[:, None], given.positions, C)  # filler is dropped
        zeros = jnp.zeros((B,), jnp.int32)
        return cls(
            layout=layout,
            keys=keys,
            text=put(jnp.full((B, C), ids.mask_id, jnp.int32), at, given.tokens),
            length=given.length + layout.places.count,
            record=Record.empty(B, layout.places.position.shape[1] + at_once),
            active=zeros == 0,
            forwards=zeros,
            **own,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window:
    """Consecutive places to decode, in text order."""

    position: Int32[Array, "B K"]  # in the text
    may_end: Bool[Array, "B K"]  # an EOS may be written there
    is_in: Bool[Array, "B K"]  # the other entries are padding
    masked: Bool[Array, "B K"]  # in the window and not yet committed

    @property
    def size(self) -> Int32[Array, "B"]:
        """Number of places without padding."""
        return jnp.sum(self.is_in, axis=1)


def window(s: MaskedText, ids: TokenIds, size: int, first: Int32[Array, "B"], length: Int32[Array, "B"]) -> Window:
    """The window of places first .. first + length - 1, padded to K = size."""
    places, offset = s.layout.places, jnp.arange(size)[None]
    at = first[:, None] + offset
    is_in = (offset < length[:, None]) & (at < places.count[:, None])
    at = jnp.minimum(at, places.position.shape[1] - 1)
    position, may_end = (jnp.take_along_axis(x, at, axis=1) for x in (places.position, places.may_end))
    return Window(position, may_end, is_in, is_in & (jnp.take_along_axis(s.text, position, axis=1) == ids.mask_id))


def propose(
    logits: Float32[Array, "B K V"], s: MaskedText, w: Window, ids: TokenIds
) -> tuple[Int32[Array, "B K"], Float32[Array, "B K V"], Float32[Array, "B K V"]]:
    """Proposes a token for every place of a window: the most probable, or with a temperature a sampled one.

    Returns:
      (the tokens, logits of the real vocabulary, logits of the tokens that may be chosen).
    """
    real, choosable = mask_logits(logits, w.may_end, ids)
    keys, settings = jax.tree.map(
        lambda x: jnp.broadcast_to(x[:, None], w.position.shape),
        (jax.vmap(jax.random.fold_in)(s.keys, s.forwards), s.layout.settings),
    )
    return sample(choosable, w.masked, keys, w.position, settings), real, choosable


def ranks(confidence: Float32[Array, "B K"], w: Window) -> Int32[Array, "B K"]:
    """The rank of each mask of a window, 0 for the most confident; ties in text order."""
    order = jnp.argsort(-jnp.where(w.masked, confidence, -jnp.inf), axis=1, stable=True)
    return jnp.argsort(order, axis=1, stable=True)


def even_share(size: Int32[Array, "B"], steps: Int32[Array, "B"], step: Int32[Array, "B"]) -> Int32[Array, "B"]:
    """How many of `size` masks a step commits, of `steps` in all; the first size % steps steps commit one more."""
    return size // steps + (step < size % steps)


def commit(
    s: MaskedText,
    w: Window,
    chosen: Int32[Array, "B K"],
    committed: Bool[Array, "B K"],
    ids: TokenIds,
    took_part: Bool[Array, "B"] | None = None,
) -> MaskedText:
    """The state after a forward that commits some masks of a window. Rows that are settled become inactive.

    Args:
      s: the state before.
      w: the window.
      chosen: a token for each of its places.
      committed: which of them to commit; places that are not masked are ignored.
      ids: of the special tokens.
      took_part: the active rows that this forward served; by default all active rows.
    """
    took_part = s.active if took_part is None else took_part
    committed = committed & w.masked & took_part[:, None]
    text = put(s.text, jnp.where(committed, w.position, s.text.shape[1]), chosen)
    return dataclasses.replace(
        s,
        text=text,
        record=s.record.append_where(committed, chosen, w.position),
        active=s.active & ~is_settled(text, s.layout, ids),
        forwards=s.forwards + took_part,
    )


def is_settled(text: Int32[Array, "B C"], layout: Layout, ids: TokenIds) -> Bool[Array, "B"]:
    """Whether no mask is left before the first EOS, or none at all: the answer cannot change any more."""
    places = layout.places
    index = jnp.arange(places.position.shape[1])[None]
    tokens = jnp.take_along_axis(text, places.position, axis=1)

    def first(token):
        found = (tokens == token) & (index < places.count[:, None])
        return jnp.min(jnp.where(found, index, index.shape[1]), axis=1)

    return (first(ids.mask_id) == index.shape[1]) | (first(ids.eos_id) < first(ids.mask_id))


def has_ended(record: Record, ids: TokenIds) -> Bool[Array, "B"]:
    """Whether an EOS was committed."""
    is_real = jnp.arange(record.tokens.shape[1])[None] < record.count[:, None]
    return jnp.any(is_real & (record.tokens == ids.eos_id), axis=1)


def put(text: Int32[Array, "B C"], at: Int32[Array, "B K"], tokens: Int32[Array, "B K"]) -> Int32[Array, "B C"]:
    """The text with tokens written at these indices; indices outside the text are dropped."""
    return jax.vmap(lambda text, at, tokens: text.at[at].set(tokens, mode="drop"))(text, at, tokens)


def is_shifted(choice: str, model: ModelConfig) -> bool:
    """Whether the token at j is read from the logits at j - 1; choice is "yes", "no", or "auto": as the model says."""
    return model.shifted if choice == "auto" else choice == "yes"


def check_first(requests: Sequence[Request]) -> None:
    """Refuses texts that begin with a gap, of which a shifted model cannot write the first token.

    Raises:
      UserError: naming the request.
    """
    for request in requests:
        if min(start for start, _, _ in request.gaps) == 0:
            raise UserError(
                f"{request.name}: begins with a gap, and this model reads a token from the one before it; give at "
                f"least one token first"
            )

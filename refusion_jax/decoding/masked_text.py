"""What decoders of masked text share: a text of given tokens and masks, seen whole by a model, filled in any order.

A decoder looks at some places of the text in every forward, proposes a token for each mask there, and commits those it
chooses; how it chooses is what makes it itself.

Axes: B rows, C text length, N places to decode, K places looked at, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, Key

from refusion_jax.batch.visibility import BIDIRECTIONAL, Visibility
from refusion_jax.decoding.requests import Layout, Request
from refusion_jax.decoding.sampling import Record, mask_logits, sample
from refusion_jax.decoding.settings import TokenIds
from refusion_jax.model.transformer import ModelConfig, Transformer
from refusion_jax.runtime.errors import UserError

# Default and help of the setting `shift`, of decoders that serve models of several systems; see `is_shifted`.
SHIFT = "auto", "Whether the token at j is read from the logits at j - 1: yes | no | auto (what a run's model says; no)"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskedText:
    """All that the decoding loop carries; a decoder that needs more has a subclass of its own."""

    layout: Layout
    keys: Key[Array, "B"]
    text: Int32[Array, "B C"]  # masks where nothing is committed
    length: Int32[Array, "B"]  # of the text
    record: Record
    active: Bool[Array, "B"]
    forwards: Int32[Array, "B"]

    @property
    def rounds(self) -> Int32[Array, "B"]:
        """Every forward is one."""
        return self.forwards

    @classmethod
    def start(cls, layout: Layout, keys: Key[Array, "B"], ids: TokenIds, at_once: int, **own: Any) -> Self:
        """Rows of which nothing is written.

        Args:
          layout: what is given and where to write.
          keys: one a row.
          ids: what the special tokens are.
          at_once: K at most; the record has room for so many more.
          **own: fields of the subclass.
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
    """Some of the places to decode, in text order."""

    position: Int32[Array, "B K"]  # in the text
    may_end: Bool[Array, "B K"]  # an EOS may be written there
    is_in: Bool[Array, "B K"]  # ; the others are filler
    masked: Bool[Array, "B K"]  # in and not committed yet

    @property
    def size(self) -> Int32[Array, "B"]:
        """Places that are no filler."""
        return jnp.sum(self.is_in, axis=1)


def window(s: MaskedText, ids: TokenIds, size: int, first: Int32[Array, "B"], length: Int32[Array, "B"]) -> Window:
    """The places first .. first + length - 1 of those to decode, K = size of them at most."""
    places, offset = s.layout.places, jnp.arange(size)[None]
    at = first[:, None] + offset
    is_in = (offset < length[:, None]) & (at < places.count[:, None])
    at = jnp.minimum(at, places.position.shape[1] - 1)
    position, may_end = (jnp.take_along_axis(x, at, axis=1) for x in (places.position, places.may_end))
    return Window(position, may_end, is_in, is_in & (jnp.take_along_axis(s.text, position, axis=1) == ids.mask_id))


def denoise(model: Transformer, s: MaskedText, position: Int32[Array, "B K"], shifted: bool) -> Float32[Array, "B K V"]:
    """One forward over the whole text: logits of the tokens at some positions.

    Args:
      model: the transformer.
      s: the texts.
      position: of each.
      shifted: whether the token at j is read from the logits at j - 1.
    """
    index = jnp.arange(s.text.shape[1])[None]
    seen = Visibility.of(BIDIRECTIONAL, (index < s.length[:, None]).astype(jnp.int32))
    hidden = model.hidden(s.text, jnp.broadcast_to(index, s.text.shape), seen)
    at = jnp.maximum(position - shifted, 0)  # the first place of a text is filler: see `check_first`
    return model.logits(jnp.take_along_axis(hidden, at[:, :, None], axis=1))


def propose(
    logits: Float32[Array, "B K V"], s: MaskedText, w: Window, ids: TokenIds
) -> tuple[Int32[Array, "B K"], Float32[Array, "B K V"], Float32[Array, "B K V"]]:
    """A token for every place of a window: the best, or with a temperature a drawn one.

    Returns:
      (the tokens, logits of the real vocabulary, logits of what may be chosen).
    """
    real, choosable = mask_logits(logits, w.may_end, ids)
    keys, settings = jax.tree.map(
        lambda x: jnp.broadcast_to(x[:, None], w.position.shape),
        (jax.vmap(jax.random.fold_in)(s.keys, s.forwards), s.layout.settings),
    )
    return sample(choosable, w.masked, keys, w.position, settings), real, choosable


def ranks(confidence: Float32[Array, "B K"], w: Window) -> Int32[Array, "B K"]:
    """0 for the most confident mask of a window, and so on; equal ones in text order."""
    order = jnp.argsort(-jnp.where(w.masked, confidence, -jnp.inf), axis=1, stable=True)
    return jnp.argsort(order, axis=1, stable=True)


def even_share(size: Int32[Array, "B"], steps: Int32[Array, "B"], step: Int32[Array, "B"]) -> Int32[Array, "B"]:
    """What a step commits of `size` masks in `steps` steps; the first size % steps of them do one more."""
    return size // steps + (step < size % steps)


def commit(
    s: MaskedText,
    w: Window,
    chosen: Int32[Array, "B K"],
    committed: Bool[Array, "B K"],
    ids: TokenIds,
    took_part: Bool[Array, "B"] | None = None,
) -> MaskedText:
    """The state behind a forward that commits some masks of a window; a row ends where all is settled.

    Args:
      s: the state before.
      w: the window.
      chosen: a token for each of its places.
      committed: which of them are written; those that are no masks are not.
      ids: what the special tokens are.
      took_part: the active rows that the forward was for; by default all.
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
    """No mask is left, or none before an EOS, so that the answer cannot change any more."""
    places = layout.places
    index = jnp.arange(places.position.shape[1])[None]
    tokens = jnp.take_along_axis(text, places.position, axis=1)

    def first(token):
        found = (tokens == token) & (index < places.count[:, None])
        return jnp.min(jnp.where(found, index, index.shape[1]), axis=1)

    return (first(ids.mask_id) == index.shape[1]) | (first(ids.eos_id) < first(ids.mask_id))


def has_ended(record: Record, ids: TokenIds) -> Bool[Array, "B"]:
    """An EOS was committed."""
    is_real = jnp.arange(record.tokens.shape[1])[None] < record.count[:, None]
    return jnp.any(is_real & (record.tokens == ids.eos_id), axis=1)


def put(text: Int32[Array, "B C"], at: Int32[Array, "B K"], tokens: Int32[Array, "B K"]) -> Int32[Array, "B C"]:
    """The text with tokens put at indices; those outside the text are dropped."""
    return jax.vmap(lambda text, at, tokens: text.at[at].set(tokens, mode="drop"))(text, at, tokens)


def is_shifted(choice: str, model: ModelConfig) -> bool:
    """Whether the token at j is read from the logits at j - 1: "yes", "no", or "auto" for what the model says."""
    return model.shifted if choice == "auto" else choice == "yes"


def check_first(requests: Sequence[Request]) -> None:
    """Refuses texts of which a shifted model would have to write the first token: nothing stands before it.

    Raises:
      UserError: naming the request.
    """
    for request in requests:
        if min(start for start, _, _ in request.gaps) == 0:
            raise UserError(
                f"{request.name}: begins with a gap, and this model reads a token from the one before it; give at "
                f"least one token first"
            )

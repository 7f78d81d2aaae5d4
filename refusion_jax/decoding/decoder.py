"""The interface between the queue and decoders: `Decoder`, and the state that it carries from pass to pass.

Decoders that continue a prompt on a cache have a base class, `Continuer`, and add the width of their passes and their
own `init` and `step`. Unless they say otherwise, they only append to what is given: they do not see text after a gap.

Axes: R requests admitted at once, B rows of the batch, T tokens, C cache entries, V vocabulary.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32, Key

from refusion_jax.batch.rows import row_index
from refusion_jax.cli.errors import UserError
from refusion_jax.cli.settings import scope
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding.requests import (
    PREFILL_CHUNK,
    ROUNDING,
    Layout,
    Places,
    Request,
    most_new_tokens,
    rounded_up,
    text_capacity,
)
from refusion_jax.decoding.sampling import Record, mask_logits, probability, put, sample, select
from refusion_jax.decoding.settings import Settings, TokenIds, TracedSettings
from refusion_jax.decoding.trajectory import tell
from refusion_jax.distributed.sharding import shard_count_here
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.key_values import KeyValues
from refusion_jax.model.shape import ModelConfig

LAST_TOKEN, SLOT_MASK = "last token", "slot mask"


class Proposal(NamedTuple):
    """A token for every place that is read."""

    token: Int32[Array, "B T"]  # the most probable one or, with a temperature, a sample
    real: Float32[Array, "B T V"]  # logits of the real vocabulary
    choosable: Float32[Array, "B T V"]  # logits of the tokens that may be chosen

    @property
    def probability(self) -> Float32[Array, "B T"]:
        return probability(self.real, self.token)


@struct.dataclass
class RowState:
    """What a batch carries from pass to pass; decoders add fields in a subclass.

    The first axis of every array is the batch; in `KeyValues` it is the second, after the layers. In a state of all
    zeros every row is finished.
    """

    record: Record  # what was committed, in order
    places: Places
    settings: TracedSettings
    keys: Key[Array, "B"]
    active: Bool[Array, "B"]  # rows that are not finished
    forwards: Int32[Array, "B"]  # forward passes of the row; the prefill is not counted
    ids: TokenIds = struct.field(pytree_node=False)

    @property
    def rounds(self) -> Int32[Array, "B"]:
        """Number of plans followed; for decoders that do not plan, of forward passes."""
        return self.forwards

    @property
    def forward_keys(self) -> Key[Array, "B"]:
        """Keys of the next forward pass, for tokens that may be rejected: a place is then sampled anew."""
        return jax.vmap(jax.random.fold_in)(self.keys, self.forwards)

    def choosable(self, logits: Float32[Array, "B T V"], places: Int32[Array, "B T"]) -> Float32[Array, "B T V"]:
        """Logits of tokens for these places of the text, -inf for those that may not be chosen there."""
        return mask_logits(logits, self.places.may_end(places), self.ids)[1]

    def sampled(self, logits: Float32[Array, "B T V"], places: Int32[Array, "B T"]) -> Int32[Array, "B T"]:
        """The token that is taken at each place; with a temperature, its noise depends on row and place alone."""
        choosable = self.choosable(logits, places)
        return sample(choosable, jnp.ones_like(places, bool), self.keys, places, self.settings)

    def propose(
        self, logits: Float32[Array, "B T V"], places: Int32[Array, "B T"], is_read: Bool[Array, "B T"]
    ) -> Proposal:
        """Proposes a token for each place that is read, and records them as the plan of this forward pass."""
        real, choosable = mask_logits(logits, self.places.may_end(places), self.ids)
        proposal = Proposal(sample(choosable, is_read, self.forward_keys, places, self.settings), real, choosable)
        tell(proposal.token, places, is_read, proposal.probability)
        return proposal


State = TypeVar("State", bound=RowState)


def map_state(of_rows: Callable, of_entries: Callable, *states: State) -> State:
    """Maps one function over the arrays of states whose first axis is the batch, another over their `KeyValues`."""

    def of(x, *rest):
        return of_entries(x, *rest) if isinstance(x, KeyValues) else of_rows(x, *rest)

    return jax.tree.map(of, *states, is_leaf=lambda x: isinstance(x, KeyValues))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder(abc.ABC):
    """A decoding algorithm with its compiled sizes: a frozen, hashable dataclass, static under `jit`."""

    settings: ClassVar[type[Settings]]
    # Whether `init` fills `state.cache` by `cache.prefill(model, layout.given, self.chunk)`: a common prefix of
    # requests is then computed once, and copied.
    copies_prefix: ClassVar[bool] = False
    fills_gaps: ClassVar[bool] = True  # whether it takes templates; otherwise it only writes after what is given
    # What predicts the next token of a text: LAST_TOKEN, or SLOT_MASK, the same except for the first token of a slot,
    # which a mask at its place predicts. Empty: the models do not write left to right, and grammars are refused.
    next_token: ClassVar[str] = ""
    # Tokens fed per forward -> tokens committed per forward, as `bench headline --budget=small` counted.
    typical: ClassVar[dict[float, float]] = {1.0: 1.0}

    ids: TokenIds
    width: int  # most tokens of a row in one forward pass
    new_tokens: int  # most new tokens of a row
    cache_length: int = 0  # entries of a row's cache; 0 without one
    chunk: int = 0  # most given tokens of a row in one forward pass of the prefill; 0 without one

    @classmethod
    def sized(cls, requests: Sequence[Request], model: ModelConfig, width: int, **own: Any) -> Self:
        """A decoder with the given sizes, and with what every decoder takes from the requests and the model.

        Fields that are named as a setting of scope "compiled" take its value. After a prefill, the cache has room for
        the longest text and one more forward pass, unless another length is given.
        """
        settings = requests[0].settings
        assert settings, "requests are prepared"
        names = {f.name for f in dataclasses.fields(cls)} & scope(type(settings), "compiled")
        common = {name: getattr(settings, name) for name in names}
        common |= {"ids": TokenIds.of(settings, model), "new_tokens": most_new_tokens(requests), "width": width}
        if cls.copies_prefix:
            common["chunk"] = min(PREFILL_CHUNK, rounded_up(max(len(request.given[0]) for request in requests)))
            common["cache_length"] = text_capacity(requests) + width
        return cls(**common | own)

    @classmethod
    @abc.abstractmethod
    def for_requests(cls, requests: Sequence[Request], model: ModelConfig) -> Self:
        """A decoder with the smallest sizes that serve all of these requests, at least one; UserError if it cannot."""

    @classmethod
    def settings_for(cls, fed: float, new_tokens: int, slot_size: int = 8) -> dict[str, Any]:
        """The settings with which `fed` tokens, one of `typical`, are fed per forward; none if there is no choice."""
        return {}

    def lay_out(self, requests: Sequence[Request]) -> Layout:
        """The requests as a tree of numpy arrays with leading axis R; runs on the host."""
        return Layout.of(requests, self.cache_length or self.width, Places.of(requests, self.new_tokens))

    @abc.abstractmethod
    def init(self, model: LanguageModel, layout: Layout, keys: Key[Array, "R"]) -> RowState:
        """The initial state of new rows, with their given tokens prefilled; runs inside `jit`.

        The layout comes from `lay_out`, as jax arrays; all randomness comes from the keys.
        """

    def start(self, kind: type[State], layout: Layout, keys: Key[Array, "B"], at_once: int = 0, **own: Any) -> State:
        """The initial state of rows, of this kind, with the fields that it adds to `RowState`.

        One forward pass commits at most `at_once` tokens of a row, by default as many as it computes: the record needs
        room for that many extra entries.
        """
        zeros = jnp.zeros_like(layout.given.length)
        record = Record.empty(len(zeros), self.new_tokens + (at_once or self.width))
        return kind(record, layout.places, layout.settings, keys, zeros == 0, zeros, self.ids, **own)

    def start_text(
        self, kind: type[State], layout: Layout, keys: Key[Array, "B"], at_once: int = 0, **own: Any
    ) -> State:
        """`start` with two more fields: `text` [B, C], masks where nothing is given, and `length` [B] of the text."""
        tokens, positions, given = map(jnp.asarray, (layout.given.tokens, layout.given.positions, layout.given.length))
        B, C = tokens.shape
        at = jnp.where(jnp.arange(C)[None] < given[:, None], positions, C)  # filler is dropped
        text = put(jnp.full((B, C), self.ids.mask_id, jnp.int32), at, tokens)
        return self.start(kind, layout, keys, at_once, text=text, length=given + layout.places.count, **own)

    @abc.abstractmethod
    def step(self, model: LanguageModel, state: RowState) -> RowState:
        """One forward pass of the whole batch, and each row's next state; that of finished rows is ignored."""

    def next_state(self, model: LanguageModel, state: RowState) -> RowState:
        """The state from `step`, and for finished rows, except for keys and values, the one before.

        UserError if its structure, shapes or dtypes are not those of the state before.
        """
        after, name = self.step(model, state), f"{type(self).__module__}.{type(self).__name__}.step"
        old, new = map(jax.tree.leaves_with_path, (state, after))
        if [path for path, _ in new] != [path for path, _ in old]:
            raise UserError(f"{name}: returns {type(after).__name__}, not a state like the one it was given")
        for (path, was), (_, is_now) in zip(old, new, strict=True):
            if (is_now.dtype, is_now.shape) != (was.dtype, was.shape):
                field = f"state{jax.tree_util.keystr(path)}"
                raise UserError(f"{name}: {field} was {jax.typeof(was)}, and is {jax.typeof(is_now)}")
        return map_state(functools.partial(select, state.active), lambda entries, _: entries, after, state)

    def scored(self, model: LanguageModel, rows: int) -> int:
        """Places of a shard whose logits exist at once, for a batch of `rows` rows; under `jax.set_mesh`."""
        return rows // shard_count_here("batch") * self.width

    @property
    def prefix_block(self) -> int:
        """Size of blocks of given tokens that depend on no tokens of later blocks; see `prefixes`."""
        return ROUNDING


@struct.dataclass
class Continuation(RowState):
    """The state of a decoder with a cache."""

    cache: kv.Cache

    def next_places(self, count: int) -> Int32[Array, "B {count}"]:
        """The next places of texts without gaps, in order; each is predicted by the token before it."""
        first = jnp.asarray(self.places.position)[:, :1] + self.record.count[:, None]
        return first + jnp.arange(count)[None]

    def commit(
        self, cache: kv.Cache, tokens: Int32[Array, "B T"], places: Int32[Array, "B T"], count: Int32[Array, "B"]
    ) -> tuple["Continuation", Int32[Array, "B"]]:
        """Commits the first `count` of these tokens, up to an EOS and the last place: (the next state, their number).

        Commits as many of the cache entries that the forward pass has written.
        """
        count = jnp.minimum(count, self.places.count - self.record.count)
        ends = (tokens == self.ids.eos_id) & (jnp.arange(tokens.shape[1])[None] < count[:, None])
        has_end = jnp.any(ends, axis=1)
        count = jnp.where(has_end, jnp.argmax(ends, axis=1) + 1, count)
        record = self.record.append(tokens, places, count)
        after = dataclasses.replace(
            self,
            cache=kv.commit(cache, count),
            record=record,
            active=~has_end & (record.count < self.places.count),
            forwards=self.forwards + 1,
        )
        return after, count


@struct.dataclass
class FilledText(Continuation):
    """The state of decoders that fill the masks of a text."""

    text: Int32[Array, "B C"]  # the mask token wherever nothing is filled
    length: Int32[Array, "B"]  # maximal length; an EOS, once filled, shortens it

    @property
    def masks(self) -> Bool[Array, "B C"]:
        """The places that are still to be filled; a prompt may hold mask tokens as well."""
        index, first = row_index(self.text), jnp.asarray(self.places.position)[:, :1]
        return (self.text == self.ids.mask_id) & (index >= first) & (index < self.length[:, None])

    def fill(
        self, cache: kv.Cache, is_new: Bool[Array, "B T"], tokens: Int32[Array, "B T"], places: Int32[Array, "B T"]
    ) -> "FilledText":
        """The state after a forward pass that fills new tokens, up to the first EOS among them."""
        length = jnp.min(jnp.where(is_new & (tokens == self.ids.eos_id), places + 1, self.length[:, None]), axis=1)
        is_new &= places < length[:, None]
        after = dataclasses.replace(
            self,
            cache=cache,
            record=self.record.append_where(is_new, tokens, places),
            text=put(self.text, jnp.where(is_new, places, self.text.shape[1]), tokens),
            length=length,
            forwards=self.forwards + 1,
        )
        return dataclasses.replace(after, active=jnp.any(after.masks, axis=1))


class Continuer(Decoder):
    """A decoder that continues a prompt on a cache."""

    settings: ClassVar[type[Settings]] = Settings
    copies_prefix: ClassVar[bool] = True
    fills_gaps: ClassVar[bool] = False

    @classmethod
    def for_requests(cls, requests: Sequence[Request], model: ModelConfig) -> Self:
        return cls.sized(requests, model, width=cls.width_for(requests))

    @classmethod
    def width_for(cls, requests: Sequence[Request]) -> int:
        """Number of tokens of a row in one forward pass."""
        raise NotImplementedError

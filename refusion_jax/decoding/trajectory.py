"""What each forward pass of a decoding plans and verifies: recorded on the device, if the caller asks for it.

Decoders report plans and drafts by calling `tell` in their `step`. While the step is traced inside `collect` they are
recorded; elsewhere `tell` does nothing, and the compiled program is the same as without it.

Axes: L forward passes, B rows, T places.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, ArrayLike, Bool, Float32, Int32, Shaped


class Told(NamedTuple):
    """What one call of `tell` reports."""

    tokens: Int32[Array, "B T"]
    places: Int32[Array, "B T"]  # in the text; -1: this entry is unused
    chances: Float32[Array, "B T"] | None  # probabilities of planned tokens; None: the tokens are drafts


@struct.dataclass
class Trajectory:
    """Some forward passes, in order; on the host, the trajectory of a single row has no axis B.

    All numbers are in one array, so that a forward pass writes once and the host fetches once.
    """

    # N numbers: of the forward pass, from 1 (0: nothing was decoded); of the tokens committed before it; the tokens and
    # places of its drafts; tokens, places and probabilities of its plan, the latter as their bits.
    entries: Int32[ArrayLike, "*L B N"]
    drafts: int = struct.field(pytree_node=False)

    @classmethod
    def of(cls, number: Int32[Array, "B"], committed: Int32[Array, "B"], told: Sequence[Told]) -> "Trajectory":
        drafts = [one for one in told if one.chances is None]
        plans = [one for one in told if one.chances is not None]
        columns = [number[:, None], committed[:, None]]
        columns += [x.tokens for x in drafts] + [x.places for x in drafts]
        columns += [x.tokens for x in plans] + [x.places for x in plans]
        columns += [jax.lax.bitcast_convert_type(x.chances, jnp.int32) for x in plans]
        return cls(jnp.concatenate(columns, axis=1), sum(x.tokens.shape[1] for x in drafts))


_collected: contextvars.ContextVar[list[Told] | None] = contextvars.ContextVar("collected", default=None)


@contextlib.contextmanager
def collect() -> Iterator[list[Told]]:
    """Collects what a decoder reports by `tell` while its step is traced inside."""
    token = _collected.set([])
    try:
        yield _collected.get()
    finally:
        _collected.reset(token)


def tell(
    tokens: Int32[Array, "B *T"],
    places: Int32[Array, "B *T"],
    where: Bool[Array, "B *T"],
    chances: Float32[Array, "B *T"] | None = None,
) -> None:
    """Reports the drafts that this forward pass verifies or, with `chances`, the tokens that it predicts at masks, and
    their probabilities, whether or not it commits them."""
    if (told := _collected.get()) is None:
        return

    def flat(x: Shaped[Array, "B *T"]) -> Shaped[Array, "B _"]:
        return jnp.broadcast_to(x, tokens.shape).reshape(len(tokens), -1)

    told.append(Told(flat(tokens), flat(jnp.where(where, places, -1)), None if chances is None else flat(chances)))


@dataclasses.dataclass(frozen=True)
class Forward:
    """One forward pass of a row, on the host."""

    committed: int = 0  # tokens, before it
    drafts: dict[int, int] = dataclasses.field(default_factory=dict)  # place -> token that it fed
    plan: dict[int, tuple[int, float]] = dataclasses.field(default_factory=dict)  # place -> token, probability


def forwards_of(parts: Sequence[Trajectory]) -> dict[int, Forward]:
    """Forwards of a row by number. A pass that the row sat out has the number of the next one, which overwrites it."""
    found = {}
    for part in parts:
        D, P = part.drafts, (part.entries.shape[1] - 2 - 2 * part.drafts) // 3
        for row in part.entries[part.entries[:, 0] > 0]:
            tokens, places, plan, planned, bits = np.split(row[2:], np.cumsum([D, D, P, P]))
            fed, some = places >= 0, planned >= 0
            guesses = zip(plan[some].tolist(), bits[some].view(np.float32).tolist(), strict=True)
            found[int(row[0])] = Forward(
                committed=int(row[1]),
                drafts=dict(zip(places[fed].tolist(), tokens[fed].tolist(), strict=True)),
                plan=dict(zip(planned[some].tolist(), guesses, strict=True)),
            )
    return found

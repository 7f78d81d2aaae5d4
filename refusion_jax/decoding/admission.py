"""The arrays of an admission: the requests that are prefilled together, and the rows of the batch that they get.

Axes: R requests admitted at once, B rows of the batch, M blocks of a text.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import struct
from jaxtyping import ArrayLike, Int32, UInt32

from refusion_jax.decoding.decoder import Decoder
from refusion_jax.decoding.prefixes import Prefixes
from refusion_jax.decoding.requests import Request

_NONE = Prefixes(0, 1)


@struct.dataclass
class Newcomers:
    """Requests to be admitted, padded with copies whose row is B, outside the batch, so that they are dropped."""

    rows: Int32[ArrayLike, "R"]
    layout: Any  # from `Decoder.lay_out`: arrays with leading axis R
    seeds: UInt32[ArrayLike, "R"]
    noise: UInt32[ArrayLike, "R"]  # see `Request.noise`
    known: Int32[ArrayLike, ""]  # leading given tokens of each request whose keys and values are in the store ..
    copied: Int32[ArrayLike, "R M"]  # .. at these places
    written: Int32[ArrayLike, "R M"]  # where its new blocks are to be stored


def newcomers(
    requests: dict[int, Request],
    R: int,
    B: int,
    decoder: Decoder,
    store: Prefixes = _NONE,
    blocks: Sequence[list[bytes]] = (),
) -> Newcomers:
    """The requests to admit, by row of the batch, padded to R; all begin with equally many blocks of the store."""
    some = list(requests.values())
    some += some[:1] * (R - len(some))
    blocks = [*blocks, *[[]] * (R - len(blocks))]
    known = store.known(blocks[0])
    copied, written = store.use(blocks, known, decoder.cache_length // store.size if store.count else 0)
    return Newcomers(
        rows=np.array([*requests, *[B] * (R - len(requests))], np.int32),
        layout=decoder.lay_out(some),
        seeds=np.array([request.settings.seed for request in some], np.uint32),
        noise=np.array([request.noise for request in some], np.uint32),
        known=np.int32(known * store.size),
        copied=copied,
        written=written,
    )

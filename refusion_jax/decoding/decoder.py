"""What the queue asks of a decoder, and of the state that it carries from forward to forward.

Axes: R requests admitted at once, B rows of the batch.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, Self

from jaxtyping import Array, Bool, Int32, Key

from refusion_jax.decoding.requests import Request
from refusion_jax.decoding.sampling import Record
from refusion_jax.decoding.settings import Settings, TokenIds
from refusion_jax.model.transformer import ModelConfig, Transformer


class State(Protocol):
    """All that the decoding loop carries: a dataclass of arrays, registered with JAX.

    Every array leads with the batch axis, but those of `KeyValues`, which lead with the layers and have it second. A
    state of zeros is one of finished rows.
    """

    record: Record  # what was committed, in order
    forwards: Int32[Array, "B"]  # forwards that the row took part in; the prefill is not counted
    rounds: Int32[Array, "B"]  # plans followed, or forwards where a decoder does not plan

    @property
    def active(self) -> Bool[Array, "B"]:
        """Rows that are not done."""
        ...


class Decoder(Protocol):
    """A way of decoding, with the sizes that are compiled in.

    A frozen, hashable dataclass: the static argument of the jitted loop.
    """

    settings: ClassVar[type[Settings]]

    ids: TokenIds
    width: int  # tokens a row that one forward feeds, at most
    cache_length: int  # entries of a row's cache; 0 without one

    @classmethod
    def for_requests(cls, requests: Sequence[Request], model: ModelConfig) -> Self:
        """The least sizes that serve all of these requests, one at least.

        Raises:
          UserError: where the decoder cannot serve a request.
        """
        ...

    def lay_out(self, requests: Sequence[Request]) -> Any:
        """The requests as a tree of numpy arrays that all lead with axis R; runs on the host."""
        ...

    def init(self, model: Transformer, layout: Any, keys: Key[Array, "R"]) -> State:
        """Rows about to take their first forward, what is given already prefilled; runs inside `jit`.

        Args:
          model: the transformer.
          layout: from `lay_out`, as jax arrays.
          keys: one a request; all randomness comes from them.
        """
        ...

    def step(self, model: Transformer, state: State) -> State:
        """One forward of the whole batch, and what each row makes of it. Rows that are done must not change."""
        ...

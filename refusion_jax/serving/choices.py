"""What a client asks for, one answer at a time, as all who deal with an answer read it."""

import dataclasses

from refusion_jax.decoding.requests import Request
from refusion_jax.decoding.stops import Stops
from refusion_jax.serving.engine import Engine


@dataclasses.dataclass(frozen=True)
class Choice:
    """One answer that a client wants."""

    prompt: list[int]  # as the model reads it
    added: int  # leading tokens of it that the client did not send: 1 for a BOS, or 0
    text: str | None  # that the prompt was given as
    request: Request | None  # checked; None where no token is to be decoded
    limit: int  # tokens of the answer, at most
    stops: Stops
    engine: Engine  # that decodes it

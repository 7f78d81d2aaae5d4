"""What users write, for the type checker; it is not run. Where an error must be found stands `type: ignore`."""

import dataclasses
from typing import ClassVar, assert_type

from jaxtyping import Array, Key

from refusion_jax import Decoded, DecodeSettings, Request, decode, load_model, load_tokenizer, log_likelihood
from refusion_jax.batch.batch import Batch
from refusion_jax.batch.rows import Rows
from refusion_jax.batch.visibility import CAUSAL, Pattern
from refusion_jax.data.interface import Tokenizer
from refusion_jax.decoding.settings import Settings
from refusion_jax.model.transformer import Transformer
from refusion_jax.systems.interface import Objective, System

model = load_model("runs/quickstart", dtype="float32")
assert_type(model, Transformer)
assert_type(load_tokenizer("runs/quickstart"), Tokenizer)
settings = DecodeSettings("refusion", max_new_tokens=64, slot_size=8, temperature=0.0)
assert_type(settings, Settings)
out = decode(model, [[3, 7, 9], Request([3], template=([7], 5))], settings)
assert_type(out, Decoded)
assert_type(out.tokens, list[list[int]])
assert_type(out.finish_reason, list[str])
assert_type(log_likelihood(model, [[1]], [[2, 3]], slot_size=8, order="left_to_right"), list[float])

decode(model, "text", settings)  # type: ignore[arg-type]
decode(model, [[1]], "refusion")  # type: ignore[arg-type]
print(out.text)  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class Own(Objective):
    """An objective of a user's own."""

    coefficients: ClassVar[dict[str, float]] = {"ar": 1.0}
    pattern: ClassVar[Pattern] = CAUSAL

    mask_id: int

    def corrupt(self, rows: Rows, keys: Key[Array, "B"]) -> Batch:
        raise NotImplementedError


system = System(name="own", objective=Own, decoders={}, references={})
System(name="own", objective=Own(0), decoders={}, references={})  # type: ignore[arg-type]

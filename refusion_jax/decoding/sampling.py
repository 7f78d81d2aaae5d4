"""From logits to tokens and probabilities, and the record of what was committed.

Axes: B rows, T tokens, V vocabulary, G new tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp

from refusion_jax.decoding.settings import Static


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Record:
    """Committed tokens in the order of commitment; entries at or behind `count` mean nothing."""

    tokens: jax.Array  # [B, G + T] int32
    offsets: jax.Array  # [B, G + T] int32, each token's place in the answer
    count: jax.Array  # [B] int32

    @classmethod
    def empty(cls, rows: int, capacity: int) -> "Record":
        zeros = jnp.zeros((rows, capacity), jnp.int32)
        return cls(zeros, zeros, jnp.zeros((rows,), jnp.int32))

    def append(self, tokens: jax.Array, offsets: jax.Array, count: jax.Array) -> "Record":
        """Adds the first `count` [B] of tokens and offsets [B, T]; needs room for all T."""
        write = jax.vmap(lambda buffer, new, at: jax.lax.dynamic_update_slice_in_dim(buffer, new, at, axis=0))
        return Record(
            write(self.tokens, tokens, self.count), write(self.offsets, offsets, self.count), self.count + count
        )


def mask_logits(logits: jax.Array, static: Static) -> tuple[jax.Array, jax.Array]:
    """(logits of the real vocabulary, logits of what may be chosen): mask and pad count in softmax, but never win.

    The authors' code can choose the mask token; here it cannot, nor padding.

    Args:
      logits: [B, T, V] float32.
      static: names the tokens.
    """
    ids = jnp.arange(logits.shape[-1])[None, None]
    real = jnp.where(ids < static.num_tokens, logits, -jnp.inf)
    return real, jnp.where((ids == static.mask_id) | (ids == static.pad_id), -jnp.inf, real)


def sample(logits: jax.Array, keys: jax.Array, temperature: jax.Array) -> jax.Array:
    """Draws a token at every place: argmax at temperature 0, else Gumbel-max, which is softmax(logits / temperature).

    Args:
      logits: [B, T, V] float32.
      keys: [B] PRNG keys; a row's draw depends on its own key only.
      temperature: float32 scalar; at 0 no noise is drawn.

    Returns:
      [B, T] int32.
    """

    def perturb(logits):
        return logits + temperature * jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)

    noisy = jax.lax.cond(temperature > 0, perturb, lambda logits: logits, logits)
    return jnp.argmax(noisy, axis=-1).astype(jnp.int32)


def probability(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """softmax(logits)[tokens], from [B, T, V] float32 and [B, T] int32: [B, T] float32."""
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return jnp.exp(chosen - jax.nn.logsumexp(logits, axis=-1))

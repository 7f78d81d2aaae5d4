"""How probable texts are: the likelihood of each system, many texts a forward.

A system says by which forward a text is scored (`systems.likelihood.Feed`); here feeds are packed into rows, run, and
summed up again. A text's likelihood does not depend on the texts around it.

Axes: B rows of a forward, T tokens of a row, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from refusion_jax.data.fast_tokenizer import FastTokenizer
from refusion_jax.data.packing import PackedRows
from refusion_jax.data.prepared import PreparedRows
from refusion_jax.data.tokenizer import Tokenizer
from refusion_jax.decoding.queue import mesh_of
from refusion_jax.model.transformer import KeyValues, Transformer
from refusion_jax.runtime.errors import UserError
from refusion_jax.systems.likelihood import Feed, next_token_feed
from refusion_jax.systems.refusion.likelihood import slot_feed

_SHORTEST = 256  # tokens of a row, at least: short texts are packed
_LOGITS = 2**26  # of a forward, at most: 256 MiB


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """Of one continuation."""

    nats: float  # log p(continuation | prompt); where several orders were drawn, the mean over them
    error: float  # standard error of that mean; 0 for one order
    is_greedy: bool  # every token was the most probable one


def log_likelihood(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    slot_size: int = 8,
    order: str | Sequence[int] = "left_to_right",
    **more: object,
) -> list[float]:
    """log p(continuation | prompt) in nats, one float each: exact, for the given order of slots.

    Args:
      model: from `load_model`.
      prompts, continuations: token ids; a prompt may be empty where the model writes slots.
      slot_size: tokens a slot; left-to-right models have none.
      order: "left_to_right", "random" (drawn anew for each text), or a list of slots by their number in the text.
      more: `orders`, `seed` and `method` of `likelihoods`.

    Raises:
      UserError: where a text holds an id the model does not have, or is longer than the model reads, or an order does
        not name every slot once.
    """
    return [scored.nats for scored in likelihoods(model, prompts, continuations, slot_size, order, **more)]


def likelihoods(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    slot_size: int = 8,
    order: str | Sequence[int] = "left_to_right",
    *,
    orders: int = 1,
    seed: int = 0,
    method: str = "refusion",
    keys: Sequence[int] | None = None,
) -> list[Likelihood]:
    """`log_likelihood` with its error over random orders, and whether the continuation is the greedy one.

    Args:
      model, prompts, continuations, slot_size, order: of `log_likelihood`.
      orders: how many random orders of each text are averaged.
      seed: of the random orders.
      method: of decoding, as in DecodeSettings; "ar" scores left to right, token by token.
      keys: a number for each text, on which its random orders depend; by default 0, 1, ...
    """
    texts = _checked(model, prompts, continuations, slot_size, order, orders)
    keys = range(len(texts)) if keys is None else keys
    draws = orders if order == "random" and method != "ar" else 1
    feeds = []
    for number, (prompt, continuation) in enumerate(texts):
        for draw in range(draws if len(continuation) else 0):
            if method == "ar":
                feeds.append((number, next_token_feed(prompt, continuation, f"text {number}")))
                continue
            slots = _order(order, -(-len(continuation) // slot_size), (seed, keys[number], draw))
            mask = model.config.mask_token_id
            feeds.append((number, slot_feed(prompt, continuation, slot_size, slots, mask, f"text {number}")))
    nats, greedy = [[] for _ in texts], [True] * len(texts)
    for (number, _), (value, is_greedy) in zip(feeds, score(model, [feed for _, feed in feeds]), strict=True):
        nats[number].append(value)
        greedy[number] &= is_greedy
    return [_averaged(values or [0.0], is_greedy) for values, is_greedy in zip(nats, greedy, strict=True)]


def held_out_bits(
    model: Transformer,
    tokenizer: Tokenizer | FastTokenizer,
    rows: PackedRows | PreparedRows,
    limit: int | None = None,
    **how: object,
) -> dict[str, object]:
    """Bits per byte of all responses, given their prompts, in the first `limit` rows of a data set.

    Args:
      model: from `load_model`.
      tokenizer: that made the rows.
      rows: the data set.
      limit: rows; None: all.
      how: slot_size, order, orders, seed and method of `likelihoods`.
    """
    prompts, responses = [], []
    for index in range(min(len(rows), limit or len(rows))):
        row = rows[index]
        for segment in range(1, int(row["segment_ids"].max()) + 1):
            here = row["segment_ids"] == segment
            prompts.append(row["tokens"][here & ~row["is_response"]])
            responses.append(row["tokens"][here & row["is_response"]])
            if how.get("method") == "ar" and not len(prompts[-1]):  # nothing predicts the first token
                prompts[-1], responses[-1] = responses[-1][:1], responses[-1][1:]
    scored = likelihoods(model, prompts, responses, **how)
    nats, tokens = sum(s.nats for s in scored), sum(map(len, responses))
    size = sum(len(tokenizer.decode(response.tolist()).encode()) for response in responses)
    error = sum(s.error**2 for s in scored) ** 0.5
    return {
        "eval_bits_per_byte": -nats / size / math.log(2),
        "eval_bits_per_byte_error": error / size / math.log(2),
        "eval_nats_per_token": -nats / tokens,
        "documents": len(scored),
        "tokens": tokens,
        "bytes": size,
        **how,
    }


def _averaged(values: list[float], is_greedy: bool) -> Likelihood:
    error = float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return Likelihood(float(np.mean(values)), error, is_greedy)


def _checked(model, prompts, continuations, slot_size, order, orders) -> list[tuple[np.ndarray, np.ndarray]]:
    if isinstance(order, str) and order not in ("left_to_right", "random"):
        raise UserError(f"order={order}: must be left_to_right, random, or a list of slots")
    for name, value in (("slot_size", slot_size), ("orders", orders)):
        if value < 1:
            raise UserError(f"{name}={value}: must be at least 1")
    c, texts = model.config, []
    for number, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True)):
        ids = np.array([*prompt, *continuation], np.int32)
        if len(ids) and not 0 <= ids.min() <= ids.max() < c.num_tokens:
            raise UserError(f"text {number}: holds an id outside 0 to {c.num_tokens - 1}")
        if len(ids) > c.max_position_embeddings:
            raise UserError(
                f"text {number}: has {len(ids)} tokens, and the model reads {c.max_position_embeddings}: shorten it"
            )
        texts.append((ids[: len(prompt)], ids[len(prompt) :]))
    return texts


def _order(order: str | Sequence[int], slots: int, draw: tuple[int, ...]) -> np.ndarray:
    if order == "random":
        return np.random.default_rng(draw).permutation(slots)
    return np.arange(slots) if order == "left_to_right" else np.asarray(order, np.int64)


def score(model: Transformer, feeds: Sequence[Feed]) -> list[tuple[float, bool]]:
    """(sum of weight * log p(label), whether every label is the most probable token) of each feed."""
    if not feeds:
        return []
    longest = max(map(len, feeds))
    T = max(_SHORTEST, 1 << (longest - 1).bit_length())
    B = max(1, min(_LOGITS // (T * model.config.vocab_size), -(-sum(map(len, feeds)) // T)))
    B = 1 << (B.bit_length() - 1)
    graphdef, params = nnx.split(model)
    results: list = [None] * len(feeds)
    with jax.set_mesh(mesh_of(model)):
        for rows in _batched(_packed([len(feed) for feed in feeds], T), B):
            arrays = _lay_out(feeds, rows, B, T)
            log_p, is_best = jax.device_get(_log_probabilities(graphdef, params, arrays))
            for row, numbers in enumerate(rows):
                at = 0
                for number in numbers:
                    feed, here = feeds[number], slice(at, at + len(feeds[number]))
                    labelled = feed.weights > 0
                    total = np.sum(np.where(labelled, log_p[row, here], 0.0) * feed.weights, dtype=np.float64)
                    results[number] = float(total), bool(is_best[row, here][labelled].all())
                    at += len(feed)
    return results


def _packed(lengths: Sequence[int], T: int) -> list[list[int]]:
    """Rows of at most T tokens, as numbers of feeds: the longest first, each into the first row that has room."""
    rows, room = [], np.zeros(len(lengths), np.int64)
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        row = int(np.argmax(room[: len(rows)] >= lengths[number])) if rows else 0
        if not rows or room[row] < lengths[number]:
            row = len(rows)
            rows.append([])
            room[row] = T
        rows[row].append(number)
        room[row] -= lengths[number]
    return rows


def _batched(rows: list[list[int]], size: int) -> Iterator[list[list[int]]]:
    for at in range(0, len(rows), size):
        yield rows[at : at + size]


def _lay_out(feeds: Sequence[Feed], rows: list[list[int]], B: int, T: int) -> dict[str, np.ndarray]:
    """[B, T] int32 each: tokens, positions, rank, group and labels of the feeds in rows, and their segments."""
    arrays = {
        name: np.zeros((B, T), np.int32) for name in ("tokens", "positions", "rank", "group", "labels", "segment")
    }
    for row, numbers in enumerate(rows):
        at = 0
        for segment, number in enumerate(numbers, 1):
            feed = feeds[number]
            here = slice(at, at + len(feed))
            for name in ("tokens", "positions", "rank", "group", "labels"):
                arrays[name][row, here] = getattr(feed, name)
            arrays["segment"][row, here] = segment
            at += len(feed)
    return arrays


@functools.partial(jax.jit, static_argnums=0)
def _log_probabilities(graphdef, params, a: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """([B, T] float32 log p(label), [B, T] bool whether it is the most probable token)."""
    model = nnx.merge(graphdef, params)
    c, (B, _) = model.config, a["tokens"].shape
    none = jnp.zeros((c.num_hidden_layers, B, 0, c.num_key_value_heads, c.head_dim), model.dtype)
    query, key = ({name: x[(..., None) if q else (slice(None), None)] for name, x in a.items()} for q in (True, False))
    visible = (
        (query["segment"] == key["segment"])
        & (key["rank"] <= query["rank"])
        & ((key["group"] == 0) | (key["group"] == query["group"]))
    )
    logits, _ = model.extend(a["tokens"], a["positions"], KeyValues(none, none), jnp.zeros(B, jnp.int32), visible)
    logits = jnp.where(jnp.arange(c.vocab_size)[None, None] < c.num_tokens, logits, -jnp.inf)
    own = jnp.take_along_axis(logits, a["labels"][..., None], axis=-1)[..., 0]
    return own - jax.nn.logsumexp(logits, axis=-1), own >= jnp.max(logits, axis=-1)

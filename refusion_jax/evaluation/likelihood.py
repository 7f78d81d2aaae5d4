"""Likelihood of texts, many texts per forward.

The system defines the forward pass that scores a text (`systems.interface.ScoredTokens`). Here they are packed into
rows, run, and summed for each text. The likelihood of a text does not depend on the other texts.

Axes: B rows of a forward pass, T tokens of a row, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from refusion_jax.batch.visibility import Visibility
from refusion_jax.cli.errors import UserError
from refusion_jax.cli.settings import declared
from refusion_jax.data.interface import Tokenizer
from refusion_jax.data.packing import fit
from refusion_jax.decoding.requests import check_tokens, whole_numbers
from refusion_jax.distributed import sharding
from refusion_jax.distributed.processes import fetch
from refusion_jax.evaluation.hosts import exchange, own_share
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.shape import ModelConfig
from refusion_jax.systems.interface import ScoredText, ScoredTokens, System
from refusion_jax.systems.registry import default_decoder, system_of

_SHORTEST = 256  # least tokens per row; short texts are packed
_TOKENS = 2**14  # most tokens per forward and device
_LOGITS = 2**26  # logits held at a time, approximately: 256 MiB
_BLOCK = 64  # least tokens per row for which logits are computed at a time
_BOUND_DRAWS = 64  # default number of draws for a bound


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """The likelihood of one continuation."""

    nats: float  # log p(continuation | prompt), the mean over draws
    error: float  # standard error of that mean; 0 for one draw
    is_greedy: bool  # whether every token is the most probable one
    is_bound: bool  # whether nats is a lower bound of log p (up to the error)


def log_likelihood(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    slot_size: int = 8,
    order: str | Sequence[int] = "left_to_right",
    **more: object,
) -> list[float]:
    """log p(continuation | prompt) in nats, one float each: exact, for the given order of slots.

    For masked diffusion models it is a lower bound, estimated by Monte Carlo. UserError if a text has an id outside the
    vocabulary or is too long, or if an order does not name every slot once.

    Args:
      model: from `load_model`.
      prompts, continuations: token ids; a prompt may be empty unless the model is left to right.
      slot_size: tokens per slot, for models that have slots.
      order: "left_to_right", "random" (drawn for each text), or a list of slot indices.
      more: `draws`, `seed` and `method` of `likelihoods`.
    """
    return [scored.nats for scored in likelihoods(model, prompts, continuations, slot_size, order, **more)]


def likelihoods(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    slot_size: int = 8,
    order: str | Sequence[int] = "left_to_right",
    *,
    draws: int = 0,
    seed: int = 0,
    method: str = "",
    keys: Sequence[int] | None = None,
) -> list[Likelihood]:
    """`log_likelihood` with its standard error, and whether the continuation is the greedy one.

    Args:
      draws: number of random orders, or of draws for a bound, to average; 0: 1 order, or 64 draws.
      seed: of the draws.
      method: a decoder of the model's system; by default that of the system that trained it, if the checkpoint says so.
      keys: a number for each text that seeds its draws; by default 0, 1, ...
    """
    system = system_of(method := method or default_decoder(model.trained_by))
    if system.scoring is None:
        raise UserError(f"the likelihood of {system.name} models is not known")
    order = order if isinstance(order, str) else whole_numbers("order", order, "slot indices")
    _check_least("draws", draws, 0)
    texts = _texts(model, method, prompts, continuations, slot_size, order, seed, keys)
    draws = _used(system, slot_size, order, draws).get("draws", 1)
    nats, greedy = np.zeros((len(texts), draws)), np.ones((len(texts), draws), bool)
    for at, fed, (log_p, is_best, *_) in _scored(model, system, texts, draws):
        nats[at] = np.sum(np.where(fed.weights > 0, log_p, 0.0) * fed.weights, dtype=np.float64)
        greedy[at] = is_best[fed.weights > 0].all()
    errors = np.std(nats, axis=1, ddof=1) / draws**0.5 if draws > 1 else np.zeros(len(texts))
    found = zip(nats.mean(axis=1).tolist(), errors.tolist(), greedy.all(axis=1).tolist(), strict=True)
    return [Likelihood(*each, system.scoring.is_bound) for each in found]


def held_out_bits(
    model: LanguageModel, tokenizer: Tokenizer, rows: Iterable[Mapping[str, np.ndarray]], method: str, **how: object
) -> dict[str, object]:
    """Bits per byte of all responses, given their prompts, in rows of a data set: tokens, segment_ids and is_response.

    All hosts call this with the same arguments, and each scores a share. `how` has slot_size, order, draws and
    seed of `likelihoods`. Returns eval_bits_per_byte, eval_bits_per_byte_is_bound, their components, and the settings
    on which they depend; nothing if the rows have no text.
    """
    system = system_of(method)
    prompts, responses = documents(rows, system.scoring.needs_prompt)
    size = sum(_bytes_of(*texts, tokenizer) for texts in zip(prompts, responses, strict=True))
    if not size:
        return {}
    own = own_share(model, len(prompts))
    scored = likelihoods(model, [prompts[i] for i in own], [responses[i] for i in own], keys=own, method=method, **how)
    scored = [Likelihood(*each) for each in exchange(model, [*map(dataclasses.astuple, scored)], len(prompts))]
    nats, tokens = sum(s.nats for s in scored), sum(map(len, responses))
    error = sum(s.error**2 for s in scored) ** 0.5
    return {
        "eval_bits_per_byte": -nats / size / math.log(2),
        "eval_bits_per_byte_is_bound": scored[0].is_bound,
        "eval_bits_per_byte_error": error / size / math.log(2),
        "eval_nats_per_token": -nats / tokens,
        "segments": len(scored),  # as in a manifest: a text longer than a row has several
        "tokens": tokens,
        "bytes": size,
        "method": method,
        **_used(system, **how),
    }


def _bytes_of(prompt: np.ndarray, response: np.ndarray, tokenizer: Tokenizer) -> int:
    """The length of a response in bytes. It may be cut within a character, which `decode` replaces by U+FFFD."""
    ids = response.tolist()
    # Whether it goes on after a row or its first token, so that its first space is its own, which `decode` may strip.
    goes_on = len(prompt) < 2 and (prompt.tolist() or [-1]) != [tokenizer.bos_id]
    text = tokenizer.continuation(ids) if goes_on else tokenizer.decode(ids)
    return sum(len(tokenizer.spelling(id)) for id in ids) if "\ufffd" in text else len(text.encode())


def _used(
    system: System,
    slot_size: int = 8,
    order: str | Sequence[int] = "left_to_right",
    draws: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """The settings of `likelihoods`, besides the method, on which the value depends; one draw if not said."""
    has_slots = any("slot_size" in declared(decoder.settings) for decoder in system.decoders.values())
    used = {"slot_size": slot_size, "order": order} if has_slots else {}
    if system.scoring.is_bound:
        return used | {"draws": draws or _BOUND_DRAWS, "seed": seed}
    if has_slots and order == "random":
        return used | {"draws": draws or 1, "seed": seed}
    return used


def spread(count: int, of: int) -> list[int]:
    """Evenly spaced indices of a set: packing puts long documents first, so the first rows are not representative."""
    return [number * of // count for number in range(count)]


def documents(
    rows: Iterable[Mapping[str, np.ndarray]], needs_prompt: bool
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(prompts, responses) of all documents in packed rows of tokens, segment_ids and is_response [T] each.

    If the model cannot predict the first token of a text, that token becomes the prompt of documents without one.
    """
    prompts, responses = [], []
    for row in rows:
        for segment in range(1, int(row["segment_ids"].max()) + 1):
            here = row["segment_ids"] == segment
            prompts.append(row["tokens"][here & ~row["is_response"]])
            responses.append(row["tokens"][here & row["is_response"]])
            if needs_prompt and not len(prompts[-1]):
                prompts[-1], responses[-1] = responses[-1][:1], responses[-1][1:]
    return prompts, responses


def longest_scored(config: ModelConfig, method: str) -> int:
    """The most tokens of a prompt and its continuation; the last token is not input of a left-to-right model."""
    scoring = system_of(method).scoring
    return config.max_position_embeddings + bool(scoring and scoring.needs_prompt)


def _texts(
    model: LanguageModel,
    method: str,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    slot_size: int,
    order: str | Sequence[int] = "left_to_right",
    seed: int = 0,
    keys: Sequence[int] | None = None,
) -> list[ScoredText]:
    """The arguments of `likelihoods`, checked; the `draw` of each text is without the number of the draw."""
    if isinstance(order, str) and order not in ("left_to_right", "random"):
        raise UserError(f"order={order}: must be left_to_right, random, or a list of slots")
    _check_least("slot_size", slot_size, 1)
    _check_least("seed", seed, 0)
    if len(prompts) != len(continuations):
        raise UserError(f"continuations: {len(continuations)} of them, for {len(prompts)} prompts")
    c, texts = model.config, []
    for number, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True)):
        name, key = f"text {number}", number if keys is None else keys[number]
        prompt, continuation = (whole_numbers(name, given) for given in (prompt, continuation))
        if ids := prompt + continuation:
            check_tokens(name, ids, c.num_tokens)
        if len(ids) > longest_scored(c, method):
            raise UserError(
                f"{name}: has {len(ids)} tokens, and the model reads {c.max_position_embeddings}: shorten it"
            )
        arrays = np.array(prompt, np.int32), np.array(continuation, np.int32)
        texts.append(ScoredText(*arrays, slot_size, order, c.mask_token_id, draw=(seed, key), name=name))
    return texts


def _check_least(name: str, value: object, least: int) -> None:
    if not isinstance(value, int | np.integer) or value < least:
        raise UserError(f"{name}={value}: must be at least {least}, a whole number")


@dataclasses.dataclass(frozen=True)
class TokenScore:
    """The likelihood of one token of a text."""

    log_p: float  # nats, given what is committed before it
    best: list[tuple[int, float]]  # the most probable tokens in its place and their log p, the best first


def token_scores(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    method: str,
    slot_size: int,
    top: int = 1,
) -> list[list[TokenScore]]:
    """The terms of `log_likelihood` with slots in text order: for each text, one per token of its continuation.

    `top` is how many of the most probable tokens are told; programs are compiled for it. Raises UserError as
    `log_likelihood`, and if the likelihood of single tokens is not known.
    """
    system = system_of(method)
    if system.scoring is None or system.scoring.is_bound:
        raise UserError(f"the likelihood of a token is not known for {system.name} models")
    texts = _texts(model, method, prompts, continuations, slot_size)
    scores: list[list[TokenScore]] = [[] for _ in texts]
    for (number, _), fed, (log_p, _, *best) in _scored(model, system, texts, top=top):
        labelled = np.flatnonzero(fed.weights)
        in_text_order = labelled[np.argsort(fed.places[labelled])]
        scores[number] = [
            TokenScore(float(log_p[i]), [*zip(*(x[i].tolist() for x in best), strict=True)]) for i in in_text_order
        ]
    return scores


def _scored(
    model: LanguageModel, system: System, texts: Sequence[ScoredText], draws: int = 1, top: int = 0
) -> Iterator[tuple[tuple[int, int], ScoredTokens, list[np.ndarray]]]:
    """((number of a text, draw), what is fed, its `log_probabilities`), for all texts of `_texts` but empty ones."""
    fed = {}
    for number, text in enumerate(texts):
        for draw in range(draws if len(text.continuation) else 0):
            fed[number, draw] = system.scoring.forward(dataclasses.replace(text, draw=(*text.draw, draw)))
    if not fed:
        return
    places, items = zip(*fed.items(), strict=True)
    longest, mesh = max(map(len, items)), model.mesh
    T = math.lcm(max(_SHORTEST, 1 << (longest - 1).bit_length()), sharding.shard_count(mesh, "length"))
    shards = sharding.shard_count(mesh, "batch")
    B = max(1, min(_TOKENS // T, -(-sum(map(len, items)) // (T * shards))))
    B = shards << (B.bit_length() - 1)
    graphdef, params = nnx.split(model)
    packed = fit([len(item) for item in items], T)
    for rows in (packed[at : at + B] for at in range(0, len(packed), B)):
        with jax.set_mesh(mesh):
            arrays = fetch(log_probabilities(graphdef, params, _lay_out(items, rows, B, T), top))
        for row, numbers in enumerate(rows):
            at = 0
            for number in numbers:
                yield places[number], items[number], [x[row, at : at + len(items[number])] for x in arrays]
                at += len(items[number])


def _lay_out(items: Sequence[ScoredTokens], rows: list[list[int]], B: int, T: int) -> dict[str, np.ndarray]:
    """The items in rows as [B, T] arrays: tokens, positions, rank, group, labels, segment int32, weights float32."""
    integers = ("tokens", "positions", "rank", "group", "labels", "segment")
    arrays = {name: np.zeros((B, T), np.int32) for name in integers} | {"weights": np.zeros((B, T), np.float32)}
    for row, numbers in enumerate(rows):
        own = [items[number] for number in numbers]
        of_row = {name: np.concatenate([getattr(item, name) for item in own]) for name in arrays.keys() - {"segment"}}
        of_row["segment"] = np.repeat(np.arange(1, len(own) + 1), [*map(len, own)])
        for name, values in of_row.items():
            arrays[name][row, : len(values)] = values
    return arrays


@functools.partial(jax.jit, static_argnums=(0, 3))
def log_probabilities(graphdef: nnx.GraphDef, params: Any, a: dict[str, jax.Array], top: int) -> tuple[jax.Array, ...]:
    """Scores the arrays of `_lay_out`: log p(label) and whether it is the most probable token, [B, T] each.

    Then the `top` most probable tokens, the best first, and their log p, [B, T, top] each.
    """
    model, (B, T) = nnx.merge(graphdef, params), a["tokens"].shape
    c = model.config
    x = model.hidden(a["tokens"], a["positions"], Visibility(a["segment"], a["rank"], a["group"]))
    blocks = min(T // _BLOCK, 1 << max(B * T * c.vocab_size // _LOGITS, 1).bit_length() - 1)  # divides T

    def block(block):
        x, labels = block
        logits = model.logits(x)
        logits = jnp.where(jnp.arange(c.vocab_size)[None, None] < c.num_tokens, logits, -jnp.inf)
        own = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        total, most = jax.nn.logsumexp(logits, axis=-1), jnp.max(logits, axis=-1)
        best, ids = jax.lax.top_k(logits, min(top, c.num_tokens))
        return own - total, own >= most, ids, best - total[..., None]

    def split(x):
        return x.reshape(B, blocks, T // blocks, *x.shape[2:]).swapaxes(0, 1)

    results = jax.lax.map(block, (split(x), split(a["labels"])))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(B, T, *x.shape[3:]), results)

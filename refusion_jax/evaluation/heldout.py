"""Held-out loss: the objective on rows that are never trained on.

The noise of a row depends only on the row, so that evaluations can be compared between steps, runs and numbers of
devices. The objective sees the whole set as one batch, with weights normalized over all of it, which is then run part
by part: so the loss is exact, whatever the size of the last part.

Axes: N rows of the set, padded with empty ones to whole batches of B; T row length.
"""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from etils import epath
from flax import nnx
from jax.sharding import Mesh

from refusion_jax.batch.batch import Batch, is_labelled, weigh
from refusion_jax.batch.rows import Rows, noise_keys
from refusion_jax.checkpoints.load import load_model
from refusion_jax.cli.errors import UserError
from refusion_jax.config import make_objective
from refusion_jax.data.dataset import prepared_paths, read_rows
from refusion_jax.data.interface import RowSource, Tokenizer
from refusion_jax.data.loader import local_rows
from refusion_jax.data.manifest import is_prepared
from refusion_jax.distributed import sharding
from refusion_jax.distributed.processes import check_same
from refusion_jax.evaluation.likelihood import held_out_bits, spread
from refusion_jax.model.transformer import Transformer
from refusion_jax.systems.interface import Objective
from refusion_jax.systems.registry import decoders_for, system_of

_MOST, _NONE = 16, 2**31 - 1  # values of a diagnostic for which losses are reported, at most; stands for no value
BITS = ("eval_bits_per_byte", "eval_bits_per_byte_is_bound")
_SEED = 0  # the same for every run, for comparison
_ROWS, _TOKENS = 8, 2**14  # most per forward and device, unless a run sets it


def _keys(rows: Rows) -> jax.Array:
    """[N] PRNG keys for the noise of each row."""
    return noise_keys(_SEED, jnp.int32(0), rows.tokens.shape[0])


def _distinct(batch: Batch) -> dict[str, jax.Array]:
    """The _MOST lowest values of each integer diagnostic among labelled tokens, padded with _NONE."""
    counts = {name: x for name, x in batch.diagnostics.items() if jnp.issubdtype(x.dtype, jnp.integer)}
    counted = is_labelled(batch)
    return {name: jnp.unique(jnp.where(counted, x, _NONE), size=_MOST, fill_value=_NONE) for name, x in counts.items()}


def _groups(diagnostics: dict[str, jax.Array], values: dict[str, list[int]]) -> dict[str, jax.Array]:
    """Groups of tokens by a batch's diagnostics, [N, T] bool: one for each value of a count or quarter of a share.

    Diagnostics are [N, T] each: int32 counts, whose `values` are given, or float32 shares from 0 to 1.
    """
    groups = {}
    for name, x in diagnostics.items():
        if name in values:
            groups |= {f"{name}_{value}": x == value for value in values[name]}
        else:
            quarter = jnp.clip(jnp.ceil(4 * x), 1, 4)
            groups |= {f"{name}_{25 * i}": quarter == i for i in range(1, 5)}
    return groups


def make_loss(
    config: ml_collections.ConfigDict, rows: Rows, graphdef: nnx.GraphDef, objective: Objective
) -> Callable[[dict], dict[str, jax.Array]]:
    """Builds (weights) -> float32 scalars: eval_loss, its terms, and the mean of each term by group.

    The rows, [N, T], are those of `place`. The objective's corruption is compiled here, to find values of diagnostics.
    """
    parts = rows.tokens.shape[0] // config.batch_size * config.accumulation
    everywhere = sharding.sharding(rows.tokens.sharding.mesh)
    values = jax.jit(lambda rows: _distinct(objective.batch(rows, _keys(rows))), out_shardings=everywhere)
    sizes = {name: sorted({*x.tolist()} - {_NONE}) for name, x in jax.device_get(values(rows)).items()}

    def evaluate(params: dict, rows: Rows) -> dict[str, jax.Array]:
        batch = objective.batch(rows, _keys(rows))
        groups = {} if batch.combine else _groups(batch.diagnostics, sizes)  # `combine` has no means over tokens

        def part(_, some):
            batch, groups = some
            model = nnx.merge(graphdef, params)
            ce, _ = model.cross_entropy(batch)
            sums = {
                f"{name}_{group}": (jnp.sum(weight * ce * member), jnp.sum(weight * member))
                for name, weight in batch.weights.items()
                for group, member in groups.items()
            }
            return None, (weigh(ce, batch), sums)

        terms_and_sums = jax.lax.scan(part, None, sharding.split_batch((batch, groups), parts))[1]
        terms, sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), terms_and_sums)
        means = {name: total / weight for name, (total, weight) in sums.items()}  # 0/0: NaN
        loss = sum(objective.coefficients[name] * term for name, term in terms.items())
        return {"eval_loss": loss} | {f"eval_loss_{name}": value for name, value in (terms | means).items()}

    jitted = jax.jit(evaluate, out_shardings=everywhere)
    return lambda params: jitted(params, rows)


def evaluate_model(
    config: ml_collections.ConfigDict, model: Transformer, sets: list[RowSource]
) -> dict[str, float | None]:
    """The held-out loss of a trained model, as logged in training; None for groups without documents.

    The loss does not depend on the batch size, which is chosen for the devices here. The config is that of the model's
    run, with the row_length and eval.rows of the sets.
    """
    mesh, config = model.mesh, config.copy_and_resolve_references()
    objective = make_objective(config, model.config.mask_token_id, model.config.eos_token_id)
    if objective.reads:
        model = nnx.clone(model)
        model.target_model = load_model(objective.reads, str(model.dtype), mesh)
    graphdef, params = nnx.split(model)
    rows = max(1, min(_ROWS, _TOKENS // config.row_length))
    config.update({"batch_size": rows * sharding.shard_count(mesh, "batch"), "accumulation": 1})
    with jax.set_mesh(mesh):
        loss = make_loss(config, place(config, pick(config, sets), mesh), graphdef, objective)
        values = jax.device_get(loss(nnx.to_pure_dict(params)))
    return {name: float(value) if np.isfinite(value) else None for name, value in values.items()}


def find_held_out(config: ml_collections.ConfigDict, tokenizer: Tokenizer) -> list[RowSource]:
    """The held-out sets of a run, if any: eval.path (UserError if unusable), else those prepared with its data."""
    if config.eval.path:
        paths = prepared_paths(config.eval.path, "eval.path") or [config.eval.path]
        return [read_rows(config, path, tokenizer, "eval.path") for path in paths]
    paths = [str(epath.Path(part.strip()) / "held_out") for part in config.data.path.split(",")]
    return [read_rows(config, path, tokenizer, "data.path") for path in paths if is_prepared(path)]


def make_held_out(
    config: ml_collections.ConfigDict, tokenizer: Tokenizer, graphdef: nnx.GraphDef, objective: Objective, mesh: Mesh
) -> Callable[[dict], dict[str, Any]] | None:
    """(weights) -> held-out losses and, where known, bits per byte of responses; None if a run has no such rows."""
    sets = find_held_out(config, tokenizer)
    if not sets:
        return None
    picked = pick(config, sets)
    loss = make_loss(config, place(config, picked, mesh), graphdef, objective)
    method = next(iter(decoders_for(config.objective)), "")  # as `evaluate` chooses it

    def evaluate(params: dict) -> dict[str, Any]:
        values = jax.device_get(loss(params))
        if not method or system_of(method).scoring is None:
            return values
        rows, model = (source[index] for source, index in picked), nnx.merge(graphdef, params)
        bits = held_out_bits(model, tokenizer, rows, method=method, draws=1)
        return values | {name: bits[name] for name in BITS if bits.get(name)}

    return evaluate


def pick(config: ml_collections.ConfigDict, sets: list[RowSource]) -> list[tuple[RowSource, int]]:
    """(set, index) of eval.rows evenly spaced rows, the sets taking turns; UserError if empty, or if hosts differ."""
    check_same("what --config.eval.path holds", *(rows.fingerprint() for rows in sets))
    most = config.eval.rows or max(map(len, sets))
    places = [(number, i) for i in range(most) for number, rows in enumerate(sets) if i < len(rows)]
    places = places[: config.eval.rows or None]
    if not places:
        raise UserError(f"--config.eval.path={config.eval.path}: holds no row to evaluate on")
    shares = collections.Counter(number for number, _ in places)
    indices = {number: spread(share, len(sets[number])) for number, share in shares.items()}
    return [(sets[number], indices[number][i]) for number, i in places]


def place(config: ml_collections.ConfigDict, picked: list[tuple[RowSource, int]], mesh: Mesh) -> Rows:
    """The rows of `pick` on the devices, padded to [N, T]; each host reads only its own."""
    shape = -(-len(picked) // config.batch_size) * config.batch_size, config.row_length
    where = sharding.sharding(mesh, "batch", "length")
    empty = {name: np.zeros(config.row_length, np.int32) for name in ("tokens", "segment_ids")}
    empty["is_response"] = np.zeros(config.row_length, np.bool_)
    own = [picked[i][0][picked[i][1]] if i < len(picked) else empty for i in local_rows(where, shape)]
    parts = {name: np.stack([row[name] for row in own]) for name in empty}
    return Rows(**{name: jax.make_array_from_process_local_data(where, x, shape) for name, x in parts.items()})

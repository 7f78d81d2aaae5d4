"""Decodes and scores tasks during training, as `evaluate` does, with the weights in place.

All hosts decode together: the batch is split over the training mesh, so that no weights are copied, and every host gets
all answers. Only the scores are written. Sampling is a function of (seed, task, problem), so that scores of different
steps can be compared.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np
from flax import nnx

from refusion_jax.cli.errors import naming
from refusion_jax.config import read_decode
from refusion_jax.data.interface import Tokenizer
from refusion_jax.distributed.processes import check_same
from refusion_jax.distributed.sharding import MESH_AXES
from refusion_jax.evaluation import benchmark
from refusion_jax.evaluation.harness import EvaluatedModel
from refusion_jax.training.program import Program

_SAMPLES = 5  # answers of each task that are kept


class TaskScores:
    """The tasks of a run and their decode settings."""

    def __init__(self, config: ml_collections.ConfigDict, tokenizer: Tokenizer, program: Program):
        """Loads the tasks; refuses tasks that are unknown, cannot be decoded, or differ between hosts."""
        e = config.eval
        self._tokenizer, self._graphdef = tokenizer, program.graphdef
        self._method, self._settings = read_decode(config)
        self._plan = benchmark.Plan(
            tasks=[name.strip() for name in e.tasks.split(",")],
            include_path=Path(e.include_path) if e.include_path else None,
            task_data=Path(e.task_data) if e.task_data else None,
            limit=e.limit or None,
            allow_code_execution=e.allow_code_execution,
            flags="--config.eval.",
        )
        self._tasks = benchmark.load_tasks(self._plan)
        self.check(program.state.weights)

    def check(self, params: dict) -> None:
        """Refuses requests that do not fit into the memory next to weights, given as arrays or shapes."""
        with naming(f"--config.eval.tasks={','.join(self._plan.tasks)}"):
            asked = benchmark.check_requests(self._model(params), self._plan, self._tasks)
        check_same("what --config.eval.tasks asks", asked)

    def __call__(self, params: dict, alive: Callable[[], None]) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """(`scores_of`, `samples_of`) of answers; `alive` is called after each, and can stop it by raising."""
        with naming(f"--config.eval.tasks={','.join(self._plan.tasks)}"):
            results = benchmark.run_tasks(self._model(params, alive), self._plan, self._tasks)
        return scores_of(results), samples_of(results)

    def _model(self, params: dict, alive: Callable[[], None] = lambda: None) -> EvaluatedModel:
        model = nnx.merge(self._graphdef, for_decoding(params))
        has_template = self._tokenizer.has_chat_template
        how = {"method": self._method, "flags": self._settings, "chat": has_template, "alive": alive}
        return EvaluatedModel(model, self._tokenizer, name="the model in training", played=_SAMPLES, **how)


def for_decoding(params: dict) -> dict:
    """The weights on a mesh whose `sequence` axis is merged into `data`, as decoding cannot split rows.

    No weight moves, as none is split over `sequence`.
    """
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    if mesh.shape["sequence"] == 1:
        return params
    grid = np.moveaxis(mesh.devices, MESH_AXES.index("sequence"), 2)  # next to `data`, to merge them
    sizes = mesh.shape | {"data": mesh.shape["data"] * mesh.shape["sequence"], "sequence": 1}
    grid = grid.reshape([sizes[axis] for axis in MESH_AXES])
    other = jax.sharding.Mesh(grid, MESH_AXES, axis_types=mesh.axis_types)

    def place(x: Any) -> Any:
        where = jax.sharding.NamedSharding(other, x.sharding.spec)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        shards = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, where, shards)

    return jax.tree.map(place, params)


def scores_of(results: dict[str, Any]) -> dict[str, float]:
    """The scores in lm_eval's results, named as in metrics.jsonl: eval_TASK_METRIC or eval_TASK_METRIC_FILTER."""
    scores = {}
    for task, metrics in results["results"].items():
        for name, value in metrics.items():
            metric, _, kind = name.partition(",")
            if kind and "stderr" not in metric and isinstance(value, int | float):
                scores[f"eval_{task}_{metric}" + ("" if kind == "none" else f"_{kind}")] = float(value)
    for task, decoding in results["decoding"]["tasks"].items():
        for name in ("tokens_per_forward", "mean_tokens", "truncated_share"):
            if decoding[name] is not None:  # without a forward pass there is no rate: the prefill wrote all answers
                scores[f"eval_{task}_{name}"] = float(decoding[name])
    return scores


def samples_of(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The first answers of each task that generates text: task, problem (number), asked, answered, right, scene.

    A page can play the scene, see decoding/player.py.
    """
    found = []
    for task in results["decoding"]["tasks"]:
        samples = {sample["doc_id"]: sample for sample in results["samples"][task]}  # one per problem, not per filter
        for problem, sample in sorted(samples.items())[:_SAMPLES]:
            texts = {"asked": sample["arguments"][0][0], "answered": sample["resps"][0][0], "right": sample["target"]}
            texts = {name: str(text) for name, text in texts.items()}
            found.append({"task": task, "problem": problem, "scene": sample["decoding"][0].get("scene")} | texts)
    return found

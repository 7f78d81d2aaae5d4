"""Estimates how fast the recorded decoding of the trained models would be with 8B parameters on TPUs.

The feeds of every decoder are recorded one prompt at a time, at all its points near its best accuracy: a small batch is
bound by reading the weights, where the most tokens a forward are best, and a large one by arithmetic, where the least
places are. A decoder that speculates is recorded with and without as many speculative tokens as such chips compute for
free. At each batch size the fastest recording counts. The rest is arithmetic (planning/feeds.py), with one token a
forward for the same answers as the baseline. Prompts and answers are as short as in the problems, so attention takes
little time.
"""

import json
from typing import Any

from refusion_jax.benchmarks.decode import shape_of
from refusion_jax.benchmarks.headline.plan import Budget, Point
from refusion_jax.data.interface import Tokenizer
from refusion_jax.data.problems import Problem
from refusion_jax.decoding.recording import Recorder, Recording
from refusion_jax.decoding.requests import prepare
from refusion_jax.distributed.chips import find_chip, free_tokens
from refusion_jax.distributed.json_input import build
from refusion_jax.distributed.sharding import MESH_AXES
from refusion_jax.model.transformer import Transformer
from refusion_jax.planning.feeds import Target
from refusion_jax.planning.feeds_report import price_all
from refusion_jax.systems.api import stream

MODEL = "8b"
TOPOLOGIES = {"v5e:2x4": 8, "v5p:2x2x1": 4}  # number of chips, all of which share the heads


def record(
    problems: list[Problem], point: Point, budget: Budget, model: Transformer, tokenizer: Tokenizer
) -> dict[str, Any]:
    """{"recordings": the feeds at a point, one prompt at a time, without and with speculative tokens}."""
    prompts = tokenizer.encode_prompts([problem.query for problem in problems[: budget.timed]])
    free = max(free_tokens(0, find_chip(topology).device_kind) for topology in TOPOLOGIES)
    recordings, plain = [], point.settings(budget.new_tokens, batch_size=1)
    for settings in dict.fromkeys(plain.looking_ahead(tokens) for tokens in (0, free)):
        recorder = Recorder(settings)
        for _ in stream(model, prepare(prompts, settings, model.config), recorder=recorder):
            pass
        recordings.append(json.loads(recorder.recording().as_json()))
    return {"recordings": recordings}


def prices(recorded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The estimates for a decoder: for each topology and batch size, the fastest of its recordings and its settings.

    Args:
      recorded: its records, one for each point, with "recordings".
    """
    recordings = [(own["settings"], build(Recording, content)) for own in recorded for content in own["recordings"]]
    about = {key: recorded[0][key] for key in ("system", "decoder", "start")}
    found = []
    for topology, chips in TOPOLOGIES.items():
        mesh = dict.fromkeys(MESH_AXES, 1) | {"tensor": chips}
        target = Target(shape_of(MODEL), "bfloat16", find_chip(topology), mesh)
        ways = [
            [priced | {"settings": settings} for priced in price_all(recording, target)]
            for settings, recording in recordings
        ]
        best = [max(same, key=lambda record: record["tokens_per_second"]) for same in zip(*ways, strict=True)]
        found.append(about | {"model": MODEL, "topology": topology, "calibrated": False, "batches": best})
    return found


def ahead_up_to(batches: list[dict[str, Any]]) -> int:
    """The largest batch size up to which a decoder is faster than one token a forward; 0 if none."""
    ahead = 0
    for record in batches:
        if record["speedup"] <= 1:
            break
        ahead = record["batch_size"]
    return ahead

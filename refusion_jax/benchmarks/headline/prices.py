"""What the trained systems' own feeds would take with a model of 8B parameters on TPUs: an estimate.

Of every decoder the feeds are recorded one prompt at a time, at its setting of the most tokens a forward among those
within reach of its best accuracy: a forward of 8B parameters waits for its weights, whatever it feeds. A decoder that
can look ahead is recorded both ways, with what such chips have for free and without, and at each batch size the faster
counts. The rest is arithmetic (planning/feeds.py), and compared is one token a forward of the same answers. Prompts and
answers are as short as the problems', so little time goes to attention.
"""

import json
from typing import Any

from refusion_jax.benchmarks.decode import shape_of
from refusion_jax.benchmarks.headline.plan import Budget, Point
from refusion_jax.data.interface import Tokenizer
from refusion_jax.data.problems import Problem
from refusion_jax.decoding.recording import Recorder, Recording
from refusion_jax.decoding.requests import prepare
from refusion_jax.model.transformer import Transformer
from refusion_jax.planning.feeds import Target
from refusion_jax.planning.feeds_report import price_all
from refusion_jax.runtime.chips import find_chip, free_tokens
from refusion_jax.runtime.json_input import build
from refusion_jax.runtime.sharding import MESH_AXES
from refusion_jax.systems.api import stream

MODEL = "8b"
TOPOLOGIES = {"v5e:2x4": 8, "v5p:2x2x1": 4}  # and their chips, all of which share the heads


def record(
    problems: list[Problem], point: Point, budget: Budget, model: Transformer, tokenizer: Tokenizer
) -> dict[str, Any]:
    """{"recordings": what the point's forwards feed, one prompt at a time, without and with looking ahead}."""
    prompts = tokenizer.encode_prompts([problem.query for problem in problems[: budget.timed]])
    free = max(free_tokens(0, find_chip(topology).device_kind) for topology in TOPOLOGIES)
    recordings, plain = [], point.settings(budget.new_tokens, batch_size=1)
    for settings in dict.fromkeys(plain.looking_ahead(tokens) for tokens in (0, free)):
        recorder = Recorder(settings)
        for _ in stream(model, prepare(prompts, settings, model.config), recorder=recorder):
            pass
        recordings.append(json.loads(recorder.recording().as_json()))
    return {"recordings": recordings}


def prices(recorded: dict[str, Any]) -> list[dict[str, Any]]:
    """The estimates of a decoder: for each topology the fastest of its recordings at every batch size.

    Args:
      recorded: its record, with "recordings".
    """
    recordings = [build(Recording, content) for content in recorded["recordings"]]
    about = {key: recorded[key] for key in ("system", "decoder", "settings")}
    found = []
    for topology, chips in TOPOLOGIES.items():
        mesh = dict.fromkeys(MESH_AXES, 1) | {"tensor": chips}
        target = Target(shape_of(MODEL), "bfloat16", find_chip(topology), mesh)
        ways = [price_all(recording, target) for recording in recordings]
        best = [max(same, key=lambda record: record["tokens_per_second"]) for same in zip(*ways, strict=True)]
        found.append(about | {"model": MODEL, "topology": topology, "calibrated": False, "batches": best})
    return found


def ahead_up_to(batches: list[dict[str, Any]]) -> int:
    """The largest batch up to which a way is faster than one token a forward; 0 where it never is."""
    ahead = 0
    for record in batches:
        if record["speedup"] <= 1:
            break
        ahead = record["batch_size"]
    return ahead

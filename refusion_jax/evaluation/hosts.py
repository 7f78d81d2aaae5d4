"""Splits the requests of an evaluation over hosts: each of n hosts answers every n-th one, and all get all answers.

If the model is sharded over all hosts, as in training, all of them answer every request together instead.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from refusion_jax.decoding.journal import Journal, read_records
from refusion_jax.distributed.processes import gather_texts
from refusion_jax.model.interface import LanguageModel


def open_journal(directory: Path) -> Journal:
    """Opens this host's journal in a directory and reads those of all hosts and earlier sessions."""
    journal = Journal(directory / f"answers.{jax.process_index()}.jsonl", {})
    for path in sorted(directory.glob("answers.*.jsonl")):
        if path != journal.path:
            journal.records |= read_records(path)
    return journal


def own_share(model: LanguageModel, count: int) -> range:
    """Indices of the requests that this host answers; all if the weights are sharded over several hosts."""
    hosts = _hosts(model)
    return range(jax.process_index() % hosts, count, hosts)


def exchange(model: LanguageModel, own: Sequence[Any], count: int) -> list[Any]:
    """The answers to all `count` requests; every host calls this with the answers of its share, as JSON values."""
    hosts = _hosts(model)
    if hosts == 1:
        return list(own)
    everything: list = [None] * count
    for host, part in enumerate(gather_texts(json.dumps(list(own)))):
        everything[host::hosts] = json.loads(part)
    return everything


def _hosts(model: LanguageModel) -> int:
    return 1 if model.mesh.is_multi_process else jax.process_count()

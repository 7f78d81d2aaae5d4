"""Several hosts evaluate as one: each answers every n-th request, and all of them learn all answers.

Where the model itself is spread over all hosts, as in training, they answer every request together instead.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from refusion_jax.decoding.journal import Journal, read_records
from refusion_jax.decoding.queue import mesh_of
from refusion_jax.model.transformer import Transformer


def open_journal(directory: Path) -> Journal:
    """This host's journal of answers in a directory; it knows those of all hosts of all sessions before."""
    journal = Journal(directory / f"answers.{jax.process_index()}.jsonl", {})
    for path in sorted(directory.glob("answers.*.jsonl")):
        if path != journal.path:
            journal.records |= read_records(path)
    return journal


class Hosts:
    """Who answers what."""

    def __init__(self, model: Transformer):
        """Every host by itself, unless the model's weights lie on several hosts."""
        self._count = 1 if mesh_of(model).is_multi_process else jax.process_count()

    def own_share(self, count: int) -> range:
        """The requests that this host answers, by their number."""
        return range(jax.process_index() % self._count, count, self._count)

    def exchange(self, own: Sequence[Any], count: int) -> list[Any]:
        """Answers to all requests, from the answers to every host's own.

        Args:
          own: answers to this host's share, made of what JSON knows.
          count: requests of all hosts.
        """
        if self._count == 1:
            return list(own)
        everything: list = [None] * count
        for host, part in enumerate(_gather(json.dumps(list(own)).encode())):
            everything[host :: self._count] = json.loads(part)
        return everything


def _gather(content: bytes) -> list[bytes]:
    """Every host's bytes."""
    lengths = multihost_utils.process_allgather(np.array(len(content), np.int32)).ravel()
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: len(content)] = np.frombuffer(content, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]

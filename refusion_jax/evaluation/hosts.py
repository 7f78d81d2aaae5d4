"""Several hosts evaluate as one: each answers every n-th request, and all of them learn all answers."""

import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def own_share(count: int) -> range:
    """The requests that this host answers, by their number."""
    return range(jax.process_index(), count, jax.process_count())


def exchange(own: Sequence[Any], count: int) -> list[Any]:
    """Answers to all requests, from the answers to every host's own.

    Args:
      own: answers to this host's share, made of what JSON knows.
      count: requests of all hosts.
    """
    if jax.process_count() == 1:
        return list(own)
    everything: list = [None] * count
    for host, part in enumerate(_gather(json.dumps(list(own)).encode())):
        everything[host :: jax.process_count()] = json.loads(part)
    return everything


def _gather(content: bytes) -> list[bytes]:
    """Every host's bytes."""
    lengths = multihost_utils.process_allgather(np.array(len(content), np.int32)).ravel()
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: len(content)] = np.frombuffer(content, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]

"""results.json: the figures of a comparison, and all that is needed to reproduce them."""

import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import jax

from refusion_jax.benchmarks.headline.plan import Plan
from refusion_jax.distributed.cores import available_cores

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def about(plan: Plan) -> dict[str, Any]:
    """The machine, versions, command and config of a comparison."""
    size = plan.budget
    return {
        "budget": plan.name,
        "command": plan.command,
        "machine": machine(),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in _PACKAGES},
        "config": json.loads(plan.config.to_json()),
        "text": json.loads(plan.text.to_json()) if plan.text else None,
        "seeds": dict(plan.systems),
        "problems": size.problems,
        "timed": size.timed,
        "new_tokens": size.new_tokens,
        "repeats": size.repeats,
    }


def continued(start: dict[str, Any], adapted: dict[str, Any]) -> dict[str, Any]:
    """The record of a run in the second half of the steps, with the tokens and steps of the first half before it.

    Args:
      start: record of the run whose weights it started from.
      adapted: its own record.
    """
    half = adapted["losses"][-1]["step"]
    seen = next(record["tokens"] for record in start["losses"] if record["step"] == half)
    losses = [
        record | {"step": half + record["step"], "tokens": seen + record["tokens"]} for record in adapted["losses"]
    ]
    return adapted | {"tokens": seen + adapted["tokens"], "losses": losses}


def machine() -> dict[str, Any]:
    """The processor, its cores, the memory and the device that JAX computes on."""
    return {
        "processor": _processor(),
        "cores": available_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
    }


def where() -> str:
    """The machine and the version of JAX in a few words: speeds compare only where these are the same."""
    m = machine()
    return f"{m['cores']} cores of {m['processor']}, {m['devices']} x {m['device']}, jax {jax.__version__}"


def _processor() -> str:
    """Name of the processor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def as_json(results: dict[str, Any]) -> str:
    """The content of the file."""
    return json.dumps(results, indent=1) + "\n"

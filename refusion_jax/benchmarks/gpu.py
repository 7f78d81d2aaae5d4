"""Checks correctness and measures speed on a GPU, in one run of bounded time.

  python -m refusion_jax.bench gpu --minutes=35 --checkpoint=tests/golden/model --output=gpu_results
  python -m refusion_jax.bench gpu --rehearse --minutes=20 --output=rehearsal

First, logits, attention over packed rows (forward and gradient) and greedy answers are compared with the CPU's; then
model-FLOPs utilization (MFU) of training is measured at 0.6B and 1.7B; then every decoder of the default system, and
the first one with weights and cache in int8, at 1.7B and 8B with batches of 1 to 128. Writes OUTPUT/results.json after
every part. A part that is not expected to fit into the rest of --minutes is skipped; a part that fails is reported, and
the others go on.

--rehearse does the same with tiny shapes on any device, with the attention kernel emulated. Its figures mean nothing,
and its results say so.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from absl import flags

from refusion_jax.batch.rows import Rows
from refusion_jax.batch.visibility import CAUSAL, Visibility
from refusion_jax.benchmarks import decode as decoding
from refusion_jax.checkpoints.load import load_model
from refusion_jax.cli import flag_values
from refusion_jax.cli.errors import UserError
from refusion_jax.config import default_config
from refusion_jax.config.model import model_config
from refusion_jax.distributed import sharding
from refusion_jax.distributed.chips import peak_flops
from refusion_jax.distributed.storage import write_file
from refusion_jax.model.attention import attention
from refusion_jax.model.packed_attention import triton_attention
from refusion_jax.systems.api import DecodeSettings, decode
from refusion_jax.systems.registry import default_system
from refusion_jax.training.program import train_program

# One measurement: its name, the minutes that it is expected to take, and the function that makes its records.
Part = tuple[str, float, Callable[[], list[dict]]]


def define_flags(own: flags.FlagValues) -> None:
    """The flags of this benchmark."""
    flags.DEFINE_float("minutes", 35, "Minutes that the whole benchmark may take", lower_bound=0, flag_values=own)
    flags.DEFINE_string("output", "", "Directory for results.json", flag_values=own)
    flags.DEFINE_string(
        "checkpoint", None, "Trained weights whose answers are compared; by default none are", flag_values=own
    )
    flags.DEFINE_bool("rehearse", False, "Tiny shapes on any device: tries this script itself", flag_values=own)


def main(own: flags.FlagValues) -> None:
    """Runs the parts that fit; prints one JSON object per record."""
    if not own.output:
        raise UserError("--output=: name the directory of the results")
    flag_values.check_output("output", Path(own.output), directory=True)
    if not own.rehearse and jax.default_backend() != "gpu":
        raise UserError(f"bench gpu: the devices here are {jax.default_backend()}; --rehearse tries it without a GPU")
    began, records = time.perf_counter(), []
    head = {"rehearsal": own.rehearse, "device": jax.devices()[0].device_kind, "jax": jax.__version__}

    for name, minutes, run in parts(own):
        left = own.minutes - (time.perf_counter() - began) / 60
        if minutes > left:
            found = [{"skipped": f"takes about {minutes:g} minutes, and {max(left, 0):.1f} are left"}]
        else:
            try:
                found = run()
            # Machines with a GPU are rented by the minute: if one part fails, the others are still measured.
            except Exception as error:  # noqa: BLE001
                found = [{"failed": f"{type(error).__name__}: {str(error)[:500]}"}]
        for record in found:
            records.append(record | {"benchmark": "gpu", "part": name})
            print(json.dumps(records[-1]), flush=True)
        write_file(Path(own.output) / "results.json", json.dumps(head | {"records": records}, indent=2) + "\n")


def parts(own: flags.FlagValues) -> list[Part]:
    """All measurements, the cheapest and most important first."""
    rehearse = own.rehearse
    few = [("logits", 0.5, logits), ("attention", 0.5, partial(packed, rehearse))]
    if own.checkpoint:
        few.append(("answers", 2, partial(answers, own.checkpoint, 4 if rehearse else 64)))
    for size in ("tiny",) if rehearse else ("0.6b", "1.7b"):
        few.append((f"training {size}", 0.5 if rehearse else 1, partial(trained, size)))
    for rows in (2,) if rehearse else (1, 32, 8, 128):
        for size in ("tiny",) if rehearse else ("8b", "1.7b"):
            run = partial(decoded, size, rows, 8 if rehearse else 128)
            few.append((f"decoding {size}, batch {rows}", 0.5 if rehearse else 3, run))
    return few


def logits() -> list[dict]:
    """Logits of a random model on this device versus the CPU, in float32 at the highest precision."""
    found = []
    for device in (jax.devices()[0], jax.devices("cpu")[0]):
        with jax.default_device(device), jax.default_matmul_precision("highest"):
            model = jax.device_put(decoding.random_model("tiny", "float32"), device)
            tokens = jax.random.randint(jax.random.key(1), (4, 128), 5, 500)
            segments = 1 + (jnp.arange(128)[None] // jnp.array([[40], [64], [128], [100]]))
            positions = jnp.broadcast_to(jnp.arange(128)[None], tokens.shape)
            found.append(
                np.asarray(jax.jit(lambda m, *x: m(*x))(model, tokens, positions, Visibility.of(CAUSAL, segments)))
            )
    return [{"largest_error": float(np.abs(found[0] - found[1]).max() / np.abs(found[1]).max())}]


def packed(rehearse: bool) -> list[dict]:
    """The GPU's kernel in bfloat16 versus the dense definition in float32: errors relative to the largest value."""
    T, N, K, H = (256, 2, 1, 16) if rehearse else (2048, 16, 8, 128)
    keys = jax.random.split(jax.random.key(0), 4)
    q, weight = (jax.random.normal(key, (1, T, N, H), jnp.bfloat16) for key in keys[:2])
    k, v = (jax.random.normal(key, (1, T, K, H), jnp.bfloat16) for key in keys[2:])
    segments = 1 + (jnp.arange(T)[None] >= T // 3).astype(jnp.int32)

    def both(function, *args):
        out, pull = jax.vjp(function, *args)
        return out, *pull(weight.astype(out.dtype))

    def kernel(*args):
        return triton_attention(*args, Visibility.of(CAUSAL, segments), interpret=rehearse)

    def definition(*args):
        return attention(*args, Visibility.of(CAUSAL, segments).mask())

    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    found = jax.jit(lambda *x: both(kernel, *x))(q, k, v)
    expected = jax.jit(lambda *x: both(definition, *x))(*wide)
    pairs = zip(("output", "dq", "dk", "dv"), found, expected, strict=True)
    return [{f"{name}_error": float(jnp.abs(a - b).max() / jnp.abs(b).max()) for name, a, b in pairs}]


def answers(checkpoint: str, count: int) -> list[dict]:
    """Greedy answers to random prompts in float32, on this device and on the CPU, by the default system's decoders."""
    records = []
    for method in default_system().decoders:
        settings, found = DecodeSettings(method, max_new_tokens=32), []
        for device in (jax.devices()[0], jax.devices("cpu")[0]):
            model = load_model(checkpoint, mesh=sharding.make_mesh({}, [device]))
            prompts = np.random.default_rng(0).integers(5, model.config.num_tokens, (count, 12)).tolist()
            with jax.default_device(device), jax.default_matmul_precision("highest"):
                found.append(decode(model, prompts, settings).tokens)
        records.append({"decoder": method, "answers": count, "same": sum(map(list.__eq__, *found)) / count})
    return records


def trained(size: str) -> list[dict]:
    """Milliseconds of a training step on full rows, and its MFU relative to the documented peak."""
    is_tiny, shape = size == "tiny", decoding.shape_of(size)
    config = default_config()
    config.batch_size, config.row_length = (2, 128) if is_tiny else (8, 2048)
    config.dtype = "float32" if is_tiny else "bfloat16"
    config.model.update({name: getattr(shape, name) for name in config.model})
    seconds, flops = step_costs(config)
    tokens = config.batch_size * config.row_length
    peak = peak_flops(jax.devices()[0].device_kind)
    record = {"size": size, "batch_size": config.batch_size, "row_length": config.row_length, "remat": config.remat}
    record |= {"ms": 1e3 * seconds, "tokens_per_second": tokens / seconds}
    return [record | {"mfu": peak and flops / seconds / (peak * jax.device_count())}]


def step_costs(config: ml_collections.ConfigDict) -> tuple[float, float]:
    """(median seconds, FLOPs) of a training step on all devices, on rows of one document, a third of it prompt."""
    mesh = sharding.make_mesh(config.mesh)
    program = train_program(config, model_config(config), mesh)
    with jax.set_mesh(mesh):
        state = program.initial_state()
        shape = config.batch_size, config.row_length
        tokens = np.random.default_rng(0).integers(5, min(4000, config.model.vocab_size - 2), shape, np.int32)
        is_response = np.broadcast_to(np.arange(shape[1]) >= shape[1] // 3, shape)
        rows = Rows(tokens, np.ones(shape, np.int32), is_response)
        rows = jax.device_put(rows, sharding.sharding(mesh, "batch", "length"))
        seconds = []
        for _ in range(6):  # the first call compiles
            began = time.perf_counter()
            state, metrics = program.step(state, rows)
            metrics["loss"].block_until_ready()
            seconds.append(time.perf_counter() - began)
    return float(np.median(seconds[1:])), config.batch_size * program.flops_per_row


def decoded(size: str, rows: int, new_tokens: int) -> list[dict]:
    """The decoders of the default system, side by side on random weights, as `bench decode` measures them."""
    decoders = [*default_system().decoders]
    shared = {"max_new_tokens": new_tokens, "batch_size": rows}
    names = [*decoders, f"{decoders[0]} weights=int8 cache=int8"]
    setups = {setup: decoding.read_setup(setup, shared) for setup in names}
    model = decoding.random_model(size, "float32" if size == "tiny" else "bfloat16")
    prompts = decoding.random_prompts(rows, 128, model.config)
    records = decoding.measure(dict.fromkeys(setups, model), setups, prompts, 2)
    return [record | {"size": size} for record in records]

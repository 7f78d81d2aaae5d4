"""What `plan --what=split` prints: the candidates within the limits, the chosen one, and why."""

import dataclasses
import itertools
import json
import math
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table

from refusion_jax.cli.errors import UserError
from refusion_jax.model.shape import ModelConfig
from refusion_jax.split.choice import Candidate, Machine, Setup
from refusion_jax.systems.registry import decoders

flags.disclaim_key_flags()  # they belong to the calling command, and are in its --help

_GIB = 2**30
# For each flag: its default, its help, and its lower limit. Without a latency there is no limit; the others are needed.
FLAGS = {
    "device_memory": (None, "GiB of memory on the device for weights and cache", 1e-6),
    "device_flops": (None, "GFLOP/s that the device reaches", 1e-6),
    "server": (None, "GFLOP/s that the server reaches", 1e-6),
    "bandwidth": (None, "Mbit/s of the link between them", 1e-6),
    "rtt": (None, "Milliseconds of the link's round trip", 0.0),
    "latency": (None, "Seconds that an answer may take", 1e-6),
    "prompt_tokens": (32.0, "Tokens of a prompt", 1.0),
    "max_new_tokens": (128.0, "Tokens of an answer", 1.0),
}


def define_flags(own: flags.FlagValues) -> None:
    """The flags that describe the machines and the requirements."""
    for name, (default, help, least) in FLAGS.items():
        flags.DEFINE_float(name, default, f"With --what=split: {help}", lower_bound=least, flag_values=own)


def choose_split(
    config: ModelConfig, itemsize: int, method: str, own: flags.FlagValues
) -> tuple[list[Candidate], dict[str, Any]]:
    """(the candidates within the limits, a record of the best of them); `method` is the name of a decoder.

    Raises UserError if a flag is missing, the decoder cannot run over two machines, or nothing is within the limits.
    """
    if missing := [name for name in FLAGS if own[name].value is None and name != "latency"]:
        raise UserError(f"--{' and --'.join(missing)}: needed with --what=split")
    if config.num_hidden_layers < 2:
        raise UserError(f"--config.model.num_hidden_layers={config.num_hidden_layers}: at least 2 can be cut")
    on_link = {name: d for name, d in decoders().items() if d.copies_prefix and not d.settings.auxiliary_models}
    if method not in on_link:
        raise UserError(f"--decode.method={method}: does not run over two machines; {', '.join(on_link)} do")
    device, server = (Machine.of_flops(config, flops * 1e9) for flops in (own.device_flops, own.server))
    link, limits = (own.rtt / 1e3, own.bandwidth * 1e6 / 8), (own.device_memory * _GIB, own.latency or math.inf)
    setup = Setup(config, device, server, *link, *limits, int(own.prompt_tokens), int(own.max_new_tokens), itemsize)
    fitting, chosen, binds = setup.choose(on_link[method])
    speeds = {}
    for name, each in on_link.items():
        answers = (setup.seconds(chosen.layers, chosen.codec, tokens, fed)[1] for fed, tokens in each.typical.items())
        speeds[name] = setup.new_tokens / min(answers)
    record = _record(chosen) | {"binds": binds, "tokens_per_second": speeds}
    return fitting, record | {"decode": on_link[method].settings_for(chosen.fed, setup.new_tokens)}


def _record(each: Candidate) -> dict[str, Any]:
    own = dataclasses.asdict(each)
    parts = {f"{name.removeprefix('the ').replace(' ', '_')}_ms": 1e3 * x for name, x in own.pop("parts").items()}
    return own | {"memory": round(each.memory)} | parts


def show(fitting: list[Candidate], chosen: dict[str, Any], is_json: bool) -> None:
    """Prints the result of `choose_split`: all of it as JSON, or a table of the best candidate per number of layers."""
    if is_json:
        for each in fitting:
            print(json.dumps({"feasible": True} | _record(each)), flush=True)
        print(json.dumps({"chosen": True} | chosen), flush=True)
        return
    table = Table(title=f"{len(fitting)} candidates keep the limits; at every layer the one that gives up least")
    for name in ("layers", "weights", "cache", "codec", "fed", "GiB", "cache length", "ms/forward", "s/answer"):
        table.add_column(name, justify="right")
    for layers, some in itertools.groupby(fitting, lambda each: each.layers):
        best = min(some, key=lambda each: each.rank)
        table.add_row(
            *(str(layers), best.weights, best.cache, best.codec, f"{best.fed:g}", f"{best.memory / _GIB:.3g}"),
            *(f"{best.cache_length:,}", f"{1e3 * sum(best.parts.values()):.3g}", f"{best.answer:.3g}"),
        )
    Console(soft_wrap=not Console().is_terminal).print(table)
    decode = "".join(f" --decode.{name}={value}" for name, value in chosen["decode"].items())
    print(
        f"chosen: --layers={chosen['layers']} --weights={chosen['weights']} --cache={chosen['cache']} "
        f"--codec={chosen['codec']}{decode}; what binds: {chosen['binds']}"
    )
    for name, speed in sorted(chosen["tokens_per_second"].items(), key=lambda pair: -pair[1]):
        print(f"  {name:16} {speed:8.2f} tokens/s")

"""What one model over two machines reaches, by round trip and bandwidth of the link between them.

  python -m refusion_jax.bench split --key=split.pem --setup='ar runs/ar' --setup='refusion runs/quickstart slot_size=4'
  python -m refusion_jax.bench split --key=split.pem --setup='ar random' --size=medium

Each --setup is a decoder, a trained model or `random`, and settings of its own; each --precision has weights and cache
of the device, then those of the server. The server runs in a process of its own; a proxy on the loopback delays every
byte by half of the round trip, and lets as many pass as the bandwidth has, in each direction. Prompts are decoded one
at a time. It prints for each setup, precision, codec, round trip and bandwidth: tokens per second and what `plan
--what=split` expects of the measured machines; round trips and bytes for each token; bytes of both sides; answers that
are right (problems of the quickstart), and that are those of the whole, unrounded model.
"""

import dataclasses
import functools
import itertools
import json
import math
import queue
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from flax import nnx
from rich.console import Console
from rich.table import Table

from refusion_jax.benchmarks._clients import serving
from refusion_jax.benchmarks.decode import SIZES, random_model, random_prompts, read_setup
from refusion_jax.checkpoints.load import load_model, load_tokenizer, open_weights
from refusion_jax.cli.errors import UserError
from refusion_jax.data import tasks
from refusion_jax.decoding.requests import prepare
from refusion_jax.model import huggingface
from refusion_jax.model.transformer import Transformer
from refusion_jax.split import choice
from refusion_jax.split.codec import CODECS
from refusion_jax.split.device import decode_split, decoder_on_link
from refusion_jax.split.link import Link
from refusion_jax.split.model import SplitModel
from refusion_jax.split.parts import fingerprint, load_part
from refusion_jax.systems.api import decode

_SAME = "same,same,same,same"


def define_flags(own: flags.FlagValues) -> None:
    """The flags of this benchmark."""
    several = functools.partial(flags.DEFINE_list, flag_values=own)
    flags.DEFINE_string("key", None, "PEM file, as for `split server`", flag_values=own)
    flags.DEFINE_multi_string("setup", None, "A decoder, a model and settings", flag_values=own)
    flags.DEFINE_enum("size", "medium", [*SIZES], "Shape of random weights", flag_values=own)
    several("rtts", ["0", "20", "50", "100", "200"], "Milliseconds of a round trip")
    several("bandwidths", ["1", "10", "100"], "Mbit/s in each direction")
    several("codecs", [*CODECS], "How hidden states cross")
    precisions = "Of weights and cache of the device, then of the server, each same, int8 or int4"
    flags.DEFINE_multi_string("precision", [_SAME], precisions, flag_values=own)
    dtypes = ["float32", "bfloat16"]
    flags.DEFINE_enum("dtype", "float32", dtypes, "Of weights, cache and hidden states", flag_values=own)
    flags.DEFINE_integer("layers", 1, "Layers of the device", 1, flag_values=own)
    flags.DEFINE_integer("prompts", 8, "Prompts that are decoded in every setting", 1, flag_values=own)
    flags.DEFINE_integer("max_new_tokens", 32, "Tokens of an answer, at most", 1, flag_values=own)


def main(own: flags.FlagValues) -> None:
    """Prints one JSON object per setting, then a table."""
    if own.key is None or not own.setup:
        raise UserError("--key=FILE and --setup='DECODER MODEL [SETTING=VALUE ...]' are needed; --help explains")
    if bare := [setup for setup in own.setup if len(setup.split()) < 2]:
        raise UserError(f"--setup={bare[0]}: must be a decoder, then a run's directory or random")
    rtts, bandwidths = ([float(x) for x in values] for values in (own.rtts, own.bandwidths))
    if unknown := set(own.codecs) - set(CODECS):
        raise UserError(f"--codecs={min(unknown)}: unknown; known: {', '.join(CODECS)}")
    for text in own.precision:
        parts = text.split(",")
        if len(parts) != 4 or not set(parts) <= set(choice.PRECISIONS):
            raise UserError(f"--precision={text}: must be four of {', '.join(choice.PRECISIONS)}, with commas between")
    table = Table(
        *("setup", "precision", "codec", "rtt, ms", "Mbit/s", "tokens/s", "planned", "trips", "bytes"),
        *("device, KiB", "server, KiB", "right", "same"),
    )
    with tempfile.TemporaryDirectory() as random:
        if any("random" in setup.split() for setup in own.setup):
            huggingface.save(random_model(own.size, "float32"), random)
        for setup, precision in itertools.product(own.setup, own.precision):
            for record in measure(setup, precision.split(","), own, rtts, bandwidths, random):
                print(json.dumps(record), flush=True)
                right = "" if record["right"] is None else f"{record['right']:.1%}"
                table.add_row(
                    *(record["setup"], record["precision"], record["codec"]),
                    *(f"{record[name]:g}" for name in ("rtt_ms", "mbit_per_second")),
                    *(f"{record[name]:.1f}" for name in ("tokens_per_second", "planned_tokens_per_second")),
                    *(f"{record['round_trips_per_token']:.2f}", f"{record['bytes_per_token']:,.0f}"),
                    *(f"{record[name] / 1024:,.0f}" for name in ("device_bytes", "server_bytes")),
                    *(right, f"{record['same']:.1%}"),
                )
    Console().print(table)


def measure(
    setup: str,
    precision: list[str],
    own: flags.FlagValues,
    rtts: Sequence[float],
    bandwidths: Sequence[float],
    random: str,
) -> Iterator[dict[str, Any]]:
    """Yields a record of every codec, round trip and bandwidth; `random` is the directory of random weights."""
    (method, place, *rest), problems = setup.split(), []
    checkpoint = random if place == "random" else place
    settings = read_setup(
        " ".join([method, *rest]), {"max_new_tokens": own.max_new_tokens, "batch_size": 1}, checkpoint
    )
    model, read = load_model(checkpoint, own.dtype), open_weights(checkpoint)
    config = model.config
    if own.layers >= config.num_hidden_layers:
        raise UserError(f"--layers={own.layers}: leaves none of the {config.num_hidden_layers} layers to the server")
    ends = (0, own.layers), (own.layers, config.num_hidden_layers)
    lower, upper = (
        load_part(read, config, *layers, own.dtype, *each)
        for layers, each in zip(ends, (precision[:2], precision[2:]), strict=True)
    )
    if place == "random":
        prompts = random_prompts(own.prompts, 16, config)
    else:
        problems, tokenizer = list(tasks.problems("test", own.prompts, seed=0)), load_tokenizer(checkpoint)
        prompts = tokenizer.encode_prompts([problem.query for problem in problems])
    whole = decode(model, prompts, settings).tokens
    requests = prepare(prompts, settings, config)
    device = choice.measure(config, own.dtype, *precision[:2])
    given = [f"--checkpoint={checkpoint}", f"--key={own.key}", "--port=0", "--memory=8", f"--dtype={own.dtype}"]
    given += [f"--weights={precision[2]}", f"--cache={precision[3]}"]
    with serving("refusion_jax.split", "server", *given) as ((_, port), _):
        shaper = Shaper(port)
        address, stamp = ("127.0.0.1", shaper.port), fingerprint(read, config, own.dtype)
        asking = Link(address, Path(own.key), stamp, 0, "exact", 600)
        server = choice.Machine(asking.server.fixed, asking.server.each)
        link = Link(address, Path(own.key), stamp, own.layers, "exact", 600)
        split = SplitModel(lower, link)
        decoder = decoder_on_link(requests, config)

        def run(codec: str) -> dict[str, Any]:
            link.begin(codec)
            before, began = counts(link), time.perf_counter()
            found = dict(decode_split(split, requests, decoder))
            spent = {"seconds": time.perf_counter() - began}
            spent |= {name: value - before[name] for name, value in counts(link).items()}
            answers = [found[i].tokens for i in range(len(requests))]
            return spent | {"answers": answers, "tokens": sum(map(len, answers))}

        def planned(codec: str, network: choice.Network, spent: dict[str, Any]) -> float:
            """Seconds of all answers, with the counts of a run."""
            trips = spent["round_trips"]
            prompt, tokens = statistics.mean(len(r.prompt) for r in requests), spent["tokens"] / len(requests)
            wanted = choice.Wanted(0, 0, prompt, tokens, model.dtype.itemsize)
            setup = choice.Setup(config, device, server, network, wanted)
            _, answer = setup.seconds(own.layers, codec, spent["tokens"] / trips, spent["fed"] / trips)
            return answer * len(requests)

        run("exact")  # compiles
        for codec in own.codecs:
            # What the host does in a round trip is measured once, on the link as it is.
            shaper.rtt, shaper.bandwidth = 0.0, 1e12
            spent = run(codec)
            network = choice.measure_network(asking.probe)
            host = max(0.0, (spent["seconds"] - planned(codec, network, spent)) / spent["round_trips"])
            for rtt, bandwidth in itertools.product(rtts, bandwidths):
                shaper.rtt, shaper.bandwidth = rtt / 1e3, bandwidth * 1e6 / 8
                network = choice.measure_network(asking.probe)
                spent = run(codec)
                network = dataclasses.replace(network, rtt=network.rtt + host)
                tokens, answers = spent["tokens"], spent["answers"]
                right = [tasks.is_correct(p, tokenizer.decode(a)) for p, a in zip(problems, answers, strict=False)]
                yield {
                    "benchmark": "split",
                    "setup": setup,
                    "precision": ",".join(precision),
                    "codec": codec,
                    "rtt_ms": rtt,
                    "mbit_per_second": bandwidth,
                    "tokens_per_second": tokens / spent["seconds"],
                    "planned_tokens_per_second": tokens / planned(codec, network, spent),
                    "round_trips_per_token": spent["round_trips"] / tokens,
                    "fed_per_round_trip": spent["fed"] / spent["round_trips"],
                    "bytes_per_token": (spent["sent"] + spent["received"]) / tokens,
                    "hidden_state_bytes": spent["crossed"] / spent["crossed_exactly"],
                    "right": statistics.mean(right) if right else None,
                    "same": statistics.mean(a == b for a, b in zip(answers, whole, strict=True)),
                    "device_bytes": bytes_of(lower, decoder.cache_length),
                    "server_bytes": bytes_of(upper, decoder.cache_length),
                    "tokens": tokens,
                }
        asking.close()
        link.close()


def bytes_of(part: Transformer, cache_length: int) -> int:
    """Bytes of the weights of a part, and of the cache of one row."""
    held = nnx.to_pure_dict(nnx.state(part)), jax.eval_shape(lambda: part.empty_cache(1, cache_length))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(held))


def counts(link: Link) -> dict[str, int]:
    """Counts of what has crossed a link so far."""
    names = ("sent", "received", "round_trips", "crossed", "crossed_exactly", "fed")
    return {name: getattr(link, name) for name in names}


@dataclasses.dataclass(eq=False)
class Shaper:
    """A proxy of a port of this machine that delays bytes, and lets only so many pass; it can be changed meanwhile."""

    to: int
    rtt: float = 0.0  # seconds, half of it in each direction
    bandwidth: float = 1e12  # bytes per second, in each direction

    def __post_init__(self):
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            here, _ = self._listening.accept()
            there = socket.create_connection(("127.0.0.1", self.to))
            for each in (here, there):  # both before any thread, which may close them
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for pair in ((here, there), (there, here)):
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, a: socket.socket, b: socket.socket) -> None:
        waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

        def deliver() -> None:
            while True:
                when, some = waiting.get()
                time.sleep(max(0.0, when - time.perf_counter()))
                try:
                    if not some:
                        b.shutdown(socket.SHUT_WR)
                        return
                    b.sendall(some)
                except OSError:
                    return

        threading.Thread(target=deliver, daemon=True).start()
        free = 0.0  # when the wire has sent what came before
        while True:
            try:
                some = a.recv(1 << 14)
            except OSError:
                some = b""
            free = max(free, time.perf_counter()) + len(some) / self.bandwidth
            waiting.put((free + self.rtt / 2, some))
            if not some:
                return

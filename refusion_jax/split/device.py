r"""Decodes with the first layers of a model here, and the rest on a server.

  python -m refusion_jax.split device --checkpoint=runs/quickstart --key=split.pem --server=HOST:9000 --layers=1 \
      --prompt='Sort 7 3 9 1.'

Prompts, answers and settings are those of `generate`. All decoders that append to a cache can be used, unchanged: with
--codec=exact, and the same --weights and --cache on both sides, answers are those of the whole model.

After a broken connection, answers continue where they were. If the server has restarted in between, unfinished answers
are decoded again; if it does not come back within --patience, the call ends with one line. Finished answers are kept in
OUTPUT.partial, and the same command decodes what is missing; after --auto, which would measure again, give the flags
that it chose instead. The last line on stderr says what crossed the link.
"""

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from absl import flags
from etils import epath

from refusion_jax.checkpoints.contents import chosen_settings, describe_call, find_tokenizer, read_model_config
from refusion_jax.checkpoints.load import open_weights
from refusion_jax.cli import command, flag_values
from refusion_jax.cli.errors import UserError
from refusion_jax.decoding import queue
from refusion_jax.decoding.decoder import Decoder
from refusion_jax.decoding.output import open_output, to_line
from refusion_jax.decoding.prompts import asked_prompts, to_record
from refusion_jax.decoding.requests import Answer, Request, prepare
from refusion_jax.decoding.stops import Stops
from refusion_jax.distributed.compiled_code import keep_for_user
from refusion_jax.model.shape import ModelConfig
from refusion_jax.split import choice, frames
from refusion_jax.split.codec import CODECS
from refusion_jax.split.link import Link, SessionLost
from refusion_jax.split.model import SplitBatch, SplitModel
from refusion_jax.split.parts import fingerprint, load_part
from refusion_jax.split.server import check_given, define_shared, peak_memory
from refusion_jax.systems.api import all_settings, decoder_for

_OWN = ("weights", "cache")  # flags of both sides
_CHOSEN = ("layers", "weights", "cache", "codec")  # by --auto


def define_flags(own: flags.FlagValues) -> None:
    """The flags of this side."""
    define_shared(own)
    text = functools.partial(flags.DEFINE_string, flag_values=own)
    text("server", None, "HOST:PORT of the server")
    flags.DEFINE_integer("layers", None, "Layers that this device holds; the server has the rest", 1, flag_values=own)
    automatic = "Measure the device and the link, and choose --layers, --weights, --cache and --codec"
    flags.DEFINE_bool("auto", False, automatic, flag_values=own)
    flags.DEFINE_float("device_memory", None, "With --auto: GiB for weights and cache, at most", 1e-6, flag_values=own)
    flags.DEFINE_float("latency", None, "With --auto: seconds that an answer may take", 1e-6, flag_values=own)
    codecs = "Hidden states on the link: exact; int8; adaptive: as few bits as keep the error within 0.2 RMS"
    flags.DEFINE_enum("codec", "exact", [*CODECS], codecs, flag_values=own)
    flags.DEFINE_float("patience", 60.0, "Seconds to wait for a lost server to come back", 1, 86400, flag_values=own)
    text("prompt", None, "One prompt, instead of --input", allow_overwrite=False)
    text("input", None, "JSONL file of prompts", allow_overwrite=False)
    text("output", None, "JSONL file of answers; stdout by default")
    settings = {name: own for name, own in all_settings().items() if name not in _OWN}
    command.define_settings(settings, own)


def main(own: flags.FlagValues) -> None:
    """Decodes the prompts; Failure if the server is lost."""
    check_given(own, "checkpoint", "key", "server", *([] if own.auto else ["layers"]))
    if own.auto and (given := [name for name in _CHOSEN if own[name].present]):
        raise UserError(f"--{given[0]}: --auto chooses it")
    if not own.auto and (given := [name for name in ("device_memory", "latency") if own[name].present]):
        raise UserError(f"--{given[0]}: goes with --auto")
    if (own.prompt is None) == (own.input is None):
        raise UserError("one of --prompt=TEXT and --input=FILE is needed; --help explains")
    address, checkpoint = frames.address_of(own.server), epath.Path(own.checkpoint)
    settings = chosen_settings(checkpoint, command.given(own))
    tokenizer, config = find_tokenizer(checkpoint), read_model_config(checkpoint)
    ids, given = asked_prompts(own.prompt, own.input, tokenizer, settings)
    if own.output:
        flag_values.check_output("output", Path(own.output))
        flag_values.check_apart(own.output, [own.input] if own.input else [])
    requests = prepare(given, settings, config)
    decoder = decoder_on_link(requests, config)
    if not own.auto and own.layers >= config.num_hidden_layers:
        raise UserError(f"--layers={own.layers}: the model has {config.num_hidden_layers}; the server needs some")
    keep_for_user()
    read = open_weights(checkpoint)
    stamp = fingerprint(read, config, own.dtype)
    if own.auto:
        settings = dataclasses.replace(settings, **choose_flags(own, config, stamp, requests, decoder))
        requests = prepare(given, settings, config)
        decoder = decoder_on_link(requests, config)
    call = describe_call(own.checkpoint, ids, requests, *[own[name].value for name in (*_CHOSEN, "dtype")])
    output = epath.Path(own.output) if own.output else None
    with open_output(output, lambda record: print(to_line(record), end="", flush=True), len(ids), call) as answers:
        part = load_part(read, config, 0, own.layers, own.dtype, own.weights, own.cache)
        link = Link(address, Path(own.key), stamp, own.layers, own.codec, own.patience)
        began, tokens, todo = time.perf_counter(), 0, answers.left
        for at, answer in decode_split(SplitModel(part, link), [requests[i] for i in todo], decoder):
            tokens += len(answer.tokens) - requests[todo[at]].in_template
            answers.add(todo[at], to_record(ids[todo[at]], answer, tokenizer, Stops(())))
    print(summary(link, tokens, time.perf_counter() - began), file=sys.stderr)
    link.close()


def choose_flags(
    own: flags.FlagValues, config: ModelConfig, stamp: bytes, requests: Sequence[Request], decoder: Decoder
) -> dict[str, Any]:
    """Sets the flags that --auto stands for, by measurements, and prints them in a line.

    Returns the decode settings that are chosen with them, except those given by flags. Raises UserError if nothing is
    within the limits.
    """
    link = Link(frames.address_of(own.server), Path(own.key), stamp, 0, "exact", own.patience)
    server, (rtt, bandwidth) = choice.Machine(link.server.fixed, link.server.each), link.measure()
    link.close()
    setup = choice.Setup(
        config=config,
        device=choice.measure(config, own.dtype),
        server=server,
        rtt=rtt,
        bandwidth=bandwidth,
        memory=(own.device_memory or math.inf) * 2**30,
        latency=own.latency or math.inf,
        prompt=max(len(request.given[0]) for request in requests),
        new_tokens=decoder.new_tokens,
        itemsize=jnp.dtype(own.dtype).itemsize,
    )
    _, chosen, binds = setup.choose(type(decoder))
    for name in _CHOSEN:
        own[name].value = getattr(chosen, name)
    size = requests[0].settings.slot_size
    settings = decoder.settings_for(chosen.fed, decoder.new_tokens, size) if len(decoder.typical) > 1 else {}
    settings = {name: value for name, value in settings.items() if own[f"decode.{name}"].value is None}
    said = [f"--{name}={own[name].value}" for name in _CHOSEN]
    said += [f"--decode.{name}={value}" for name, value in settings.items()]
    print(
        f"round trip {1e3 * rtt:.3g} ms, {bandwidth * 8e-6:.3g} Mbit/s; a layer takes "
        f"{1e3 * setup.device.seconds(1, 1):.3g} ms here and {1e3 * server.seconds(1, 1):.3g} ms there: "
        f"{' '.join(said)}; what binds: {binds}",
        file=sys.stderr,
    )
    return settings


def decoder_on_link(requests: Sequence[Request], config: Any) -> Decoder:
    """The decoder for requests; SettingError if it cannot run over two machines."""
    settings, decoder = requests[0].settings, decoder_for(requests, config)
    if not decoder.copies_prefix or settings.auxiliary_models:
        settings.refuse("method", "does not append to a cache of one model, so that it cannot run over two machines")
    return decoder


def decode_split(model: SplitModel, requests: Sequence[Request], decoder: Decoder) -> Iterator[tuple[int, Answer]]:
    """Yields (index, answer) as `queue.stream`, decoding again what a server has forgotten; Failure if it is lost."""
    left = list(range(len(requests)))
    while left:
        asked = list(left)
        some, rows = [requests[i] for i in asked], requests[0].settings.batch_size
        try:
            for at, answer in queue.stream(model, decoder, some, rows, batch_type=SplitBatch):
                left.remove(asked[at])
                yield asked[at], answer
        except SessionLost as error:
            print(f"{error}: {len(left)} answers start again", file=sys.stderr)
            model.link.begin()


def summary(link: Link, tokens: int, took: float) -> str:
    """Tokens, time, bytes and memory of the answers, in one line."""
    share = link.crossed / max(link.crossed_exactly, 1)
    return (
        f"{tokens} tokens, {tokens / took:.1f} a second; for each {link.round_trips / max(tokens, 1):.2f} round trips, "
        f"{link.sent / max(tokens, 1):,.0f} bytes sent, {link.received / max(tokens, 1):,.0f} received; hidden states "
        f"took {share:.1%} of their bytes; at most {peak_memory():.0f} MiB of memory"
    )

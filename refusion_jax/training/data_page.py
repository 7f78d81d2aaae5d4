"""One page about prepared data: what is in it, what was left out, and what training on it would take."""

import itertools
from collections.abc import Iterator

import jax
import ml_collections
import numpy as np
from etils import epath
from flax import nnx

from refusion_jax.checkpoints.contents import read_model_config
from refusion_jax.config import make_objective
from refusion_jax.config.model import adopt_shape, adopt_steps, find_target_model, model_config
from refusion_jax.data.interface import Tokenizer
from refusion_jax.data.prepared import PreparedRows
from refusion_jax.distributed.chips import CHIPS
from refusion_jax.distributed.json_files import read_json_lines
from refusion_jax.model.flops import count_weights
from refusion_jax.model.lora import read_lora
from refusion_jax.model.transformer import Transformer
from refusion_jax.systems.interface import train_flops_per_row
from refusion_jax.training.inspection import visible_text
from refusion_jax.training.run_report import PAGES

BEGINNING = b"<!doctype html><!-- prepared data, by refusion_jax.inspect_data -->"  # of every page
_SAMPLES, _TOKENS = 8, 300
_DROPPED, _PER_REASON = 20_000, 3  # lines of dropped.jsonl that are read, and shown for each reason
_BOTH = "Held-out documents are counted, too."
_USE = 0.4  # share of a chip's peak that large dense models reach (MaxText's and PaLM's reports: 0.38 to 0.67)

_Table = tuple[str, str, tuple[str, ...], list[tuple]]  # heading, note, column names, rows; floats are shares of 1


def data_page(data: PreparedRows, tokenizer: Tokenizer, config: ml_collections.ConfigDict | None) -> str:
    """The page of a prepared directory, as HTML; with a config it estimates length and cost of training on it."""
    manifest = data.manifest
    counted = ("documents", "tokens", "rows", "row_length", "segments")
    contents = {name: f"{getattr(manifest, name):,}" for name in counted} | {
        "positions filled": f"{manifest.fill:.2%}",
        "tokens in a document": f"{manifest.tokens / max(manifest.documents, 1):,.1f}",
        **{f"input {name}": f"{count:,}" for name, count in manifest.input.items()},
    }
    lengths = {f"at most {2**k:,}": count for k, count in sorted(manifest.lengths.items())}
    languages = {name or "not looked for": count for name, count in manifest.languages.items()}
    tables: list[_Table] = [
        ("Contents", "", ("what", "value"), list(contents.items())),
        ("Sources", _BOTH, ("--input", "tokens", "share"), _shares(manifest.sources)),
        ("Lengths", _BOTH, ("tokens of a document", "documents", "share"), _of(lengths, sum(lengths.values()))),
        (
            "Left out",
            "Of all examples.",
            ("why", "examples", "share"),
            _of(manifest.dropped, manifest.input["examples"]),
        ),
        ("Left out: some of them", "", ("why", "where", "how it begins, or what is wrong"), _dropped(data.path)),
        ("Languages", _BOTH, ("language", "documents", "share"), _shares(languages)),
    ]
    if config is not None:
        tables.append(_estimate(data, tokenizer, config))
    shown = {"title": data.path, "command": manifest.command, "tables": tables, "most": _TOKENS}
    return PAGES.get_template("data_page.html").render(**shown, samples=list(_samples(data, tokenizer)))


def _of(counts: dict[str, int], whole: int) -> list[tuple]:
    return [(name, count, count / max(whole, 1)) for name, count in counts.items()]


def _shares(counts: dict[str, int]) -> list[tuple]:
    return sorted(_of(counts, sum(counts.values())), key=lambda row: -row[1])


def _dropped(path: str) -> list[tuple]:
    file, found = epath.Path(path) / "dropped.jsonl", {}
    lines = itertools.islice(read_json_lines(file), _DROPPED) if file.exists() else ()
    for _, line in lines:
        found.setdefault(line["kind"], []).append((line["kind"], line["where"], line["reason"][:300]))
    return [row for kind in sorted(found) for row in found[kind][:_PER_REASON]]


def _samples(data: PreparedRows, tokenizer: Tokenizer) -> Iterator[str]:
    for index in np.unique(np.linspace(0, len(data) - 1, _SAMPLES).astype(int)).tolist():
        row = data[index]
        tokens = row["tokens"][row["segment_ids"] == 1]
        text = visible_text(tokenizer, tokens[:_TOKENS])
        yield f"row {index:,}: {text}{' ...' if len(tokens) > _TOKENS else ''}"


def _estimate(data: PreparedRows, tokenizer: Tokenizer, config: ml_collections.ConfigDict) -> _Table:
    adopt_shape(config)
    adopt_steps(config, len(data))
    model, row_length = model_config(config, tokenizer), data.row_length
    objective = make_objective(config, tokenizer.mask_id)
    target = read_model_config(path) if (path := find_target_model(config)[1]) else None
    flops = train_flops_per_row(objective, model, row_length, read_lora(config.lora), target)
    epoch = flops * len(data)
    whole = nnx.eval_shape(lambda: Transformer(model, nnx.Rngs(0)))
    rows = [
        ("parameters", f"{sum(x.size for x in jax.tree.leaves(nnx.state(whole))):,}"),
        ("tokens of an epoch for each parameter", f"{data.manifest.tokens / count_weights(model)[1]:,.3g}"),
        ("steps of an epoch", f"{len(data) / config.batch_size:,.1f}"),
        (f"epochs in {config.steps:,} steps", f"{config.steps * config.batch_size / len(data):,.2f}"),
        ("FLOPs of an epoch", f"{epoch:.3g}"),
    ]
    rows += [
        (f"chip-hours of an epoch on {name}", f"{epoch / (chip.peak_flops * chip.per_chip * _USE) / 3600:,.3g}")
        for name, chip in CHIPS.items()
    ]
    note = f"By FLOPs, at {_USE:.0%} of a chip's peak; `plan` knows what a step really takes."
    return "Training on it", note, ("what", "estimate"), rows

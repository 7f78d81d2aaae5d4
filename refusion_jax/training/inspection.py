"""Shows a training row of any system, in a terminal or as a page: its documents, their corruption, their labels."""

import itertools
import json
from importlib import resources
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from etils import epath
from rich.console import Console
from rich.table import Table
from rich.text import Text

from refusion_jax.batch.batch import Batch
from refusion_jax.batch.rows import Rows, noise_keys
from refusion_jax.checkpoints.contents import find_own_tokenizer
from refusion_jax.cli.errors import UserError
from refusion_jax.config import make_objective
from refusion_jax.data.dataset import load_dataset
from refusion_jax.data.interface import Tokenizer
from refusion_jax.data.loader import host_batches
from refusion_jax.data.manifest import file_checksum
from refusion_jax.data.prepared import PreparedRows
from refusion_jax.training.recovery import SkippedBatches

BEGINNING = b"<!doctype html><!-- a training row, by refusion_jax.inspect_data -->"  # of every page
_COLORS = {"prompt": "dim", "clean": "green", "masked": "red"}


class ShownDocument(NamedTuple):
    """A document of a row, and its places in the batch."""

    text: np.ndarray  # its places in the row
    prompt: int  # number of prompt tokens, which come first
    given: np.ndarray  # its places in the batch; empty where the system leaves it out
    kinds: np.ndarray  # "prompt", "clean" or "masked", for each of `given`


def training_batch(config: ml_collections.ConfigDict, workdir: epath.PathLike | None, step: int) -> tuple:
    """(tokenizer, rows, global batch) that `train` uses at step `step` + 1; with workdir None, those of a new run."""
    source = config.init_from or make_objective(config, mask_id=0).reads
    own = find_own_tokenizer(epath.Path(source)) if source else None
    tokenizer, data = load_dataset(config, workdir, own)
    steps = {"batch_size": config.batch_size, "seed": config.seed, "first_step": step, "last_step": step + 1}
    batch_of = SkippedBatches(epath.Path(workdir)).batch_of if workdir else int
    rows = Rows(**next(host_batches(data, range(config.batch_size), batch_of=batch_of, **steps)))
    return tokenizer, rows, corrupted(config, tokenizer, rows, noise_keys(config.seed, step, config.batch_size))


def corrupted(config: ml_collections.ConfigDict, tokenizer: Tokenizer, rows: Rows, keys: jax.Array) -> Batch:
    """The batch that a config's objective makes of rows [B, T] with keys [B]."""
    objective = make_objective(config, tokenizer.mask_id, tokenizer.eos_id)
    return jax.jit(objective.batch)(jax.tree.map(jnp.asarray, rows), keys)


def documents_of(rows: Rows, batch: Batch, mask_id: int) -> list[ShownDocument]:
    """The documents of one row, given as numpy arrays [T]."""
    found = []
    for document in range(1, int(rows.segment_ids.max()) + 1):
        text = np.flatnonzero(rows.segment_ids == document)
        given = np.flatnonzero(batch.visibility.segment_ids == document)
        prompt = int(np.sum(~rows.is_response[text]))
        of_response = np.where(batch.inputs[given] == mask_id, "masked", "clean")
        kinds = np.where(batch.positions[given] < prompt, "prompt", of_response)
        found.append(ShownDocument(text, prompt, given, kinds))
    return found


def show_row(console: Console, tokenizer: Tokenizer, rows: Rows, batch: Batch, place: int, labels: bool) -> None:
    """Prints row `place` of `rows` [B, T] and of the batch made from them; with `labels`, one line per label."""
    rows, batch = jax.tree.map(lambda x: np.asarray(x)[place], (rows, batch))
    documents = documents_of(rows, batch, tokenizer.mask_id)
    for number, (text, prompt, given, kinds) in enumerate(documents, 1):
        title = f"document {number} of {len(documents)}"
        if not len(given):
            console.print(f"{title}: left out by this system", style="bold")
            continue
        told = given[kinds == "masked"] if "masked" in kinds else given  # blocks have values of their own
        noted = "".join(f", {name.replace('_', ' ')} {_range(x[told])}" for name, x in batch.diagnostics.items())
        console.print(f"{title}: {prompt} prompt and {len(text) - prompt} response tokens{noted}", style="bold")
        positions = batch.positions[given]
        of_text = np.where(np.arange(len(text)) < prompt, "prompt", "clean")
        is_in = positions < len(text)  # a system may have put padding after the text
        of_text[positions[is_in & (kinds == "masked")]] = "masked"
        console.print(Text("text   ", "bold") + _spans(tokenizer, rows.tokens[text], of_text, np.arange(len(text))))
        console.print(Text("given  ", "bold") + _spans(tokenizer, batch.inputs[given], kinds, positions))
        if labels:
            console.print(_label_table(tokenizer, batch, given, kinds))
    padding = int(np.sum(rows.segment_ids == 0))
    console.print(f"padding: {padding} of {len(rows.segment_ids)} positions")


def _range(x: np.ndarray) -> str:
    return " to ".join(dict.fromkeys(f"{value:.4g}" for value in (x.min(), x.max())))


def _spans(tokenizer: Tokenizer, tokens: np.ndarray, kinds: np.ndarray, positions: np.ndarray) -> Text:
    """The tokens as colored text; neighbors in the text that are of one kind are decoded together."""
    text, is_apart = Text(), np.diff(positions) != 1
    for part in np.split(np.arange(len(tokens)), np.flatnonzero(is_apart | (kinds[1:] != kinds[:-1])) + 1):
        if part[0] and is_apart[part[0] - 1]:
            text.append("|", "bold")
        text.append(visible_text(tokenizer, tokens[part]), _COLORS[kinds[part[0]]])
    return text


def visible_text(tokenizer: Tokenizer, tokens: np.ndarray) -> str:
    """The text of tokens [N], with visible special tokens."""
    special = {tokenizer.mask_id: "▒", tokenizer.eos_id: "<eos>", tokenizer.bos_id: "<bos>"}
    runs = itertools.groupby(tokens.tolist(), special.__contains__)
    texts = ("".join(map(special.get, run)) if is_special else tokenizer.decode([*run]) for is_special, run in runs)
    return "".join(texts)


def _label_table(tokenizer, batch: Batch, given: np.ndarray, kinds: np.ndarray) -> Table:
    table = Table("position", "given", "kind", "must predict", "weight")
    for index, kind in zip(given, kinds, strict=True):
        weights = [f"{term} {weight[index]:.3g}" for term, weight in batch.weights.items() if weight[index] != 0]
        label = repr(visible_text(tokenizer, batch.labels[index : index + 1])) if weights else ""
        token = repr(visible_text(tokenizer, batch.inputs[index : index + 1]))
        cells = (str(batch.positions[index]), token, str(kind), label, ", ".join(weights))
        table.add_row(*(Text(cell) for cell in cells), style=_COLORS[str(kind)])
    return table


def row_page(title: str, tokenizer: Tokenizer, rows: Rows, batch: Batch, place: int) -> str:
    """The HTML page of row `place` of `rows` [B, T] and of the batch made from them."""
    rows, batch = jax.tree.map(lambda x: np.asarray(x)[place], (rows, batch))
    seen, has_label = batch.visibility, np.any([weight != 0 for weight in batch.weights.values()], axis=0)
    kinds = np.where(seen.segment_ids > 0, "clean", "padding")
    for document in documents_of(rows, batch, tokenizer.mask_id):
        kinds[document.given] = document.kinds
    columns = {  # [T] each
        "inputs": batch.inputs,
        "labels": np.where(has_label, batch.labels, -1),
        "positions": batch.positions,
        "kinds": kinds,
        "documents": seen.segment_ids,
        "ranks": seen.rank,
        "groups": seen.group,
    }
    tokens = np.unique([columns["inputs"], columns["labels"]]).tolist()
    data = {name: column.tolist() for name, column in columns.items()} | {
        "title": title,
        "texts": {token: _text(tokenizer, token) for token in tokens if token >= 0},
        "weights": {name: _rounded(weight) for name, weight in batch.weights.items()},
        "diagnostics": {name.replace("_", " "): _rounded(x) for name, x in batch.diagnostics.items()},
    }
    template = resources.files("refusion_jax.training").joinpath("row_page.html").read_text("utf-8")
    return template.replace("ROW", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


def _text(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token, or its name if the text is empty or only part of a character."""
    text = visible_text(tokenizer, np.array([token]))
    return text if text.strip(" \ufffd") else tokenizer.name_of(token)


def _rounded(x: np.ndarray) -> list[float]:
    """[T] rounded to five significant digits, for a small page."""
    return [float(f"{value:.5g}") for value in x.tolist()]


def verify(path: str) -> int:
    """Verifies the checksums of prepared data, its files and rows; returns the number of rows."""
    rows = PreparedRows(path)
    for shard in rows.manifest.shards:
        if file_checksum(epath.Path(path) / shard.file) != shard.checksum:
            raise UserError(f"{path}/{shard.file}: the checksum is not the manifest's; the file was damaged")
    for index in range(len(rows)):
        rows.record(index)
    return len(rows)

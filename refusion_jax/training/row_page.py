"""One page that shows a row as it is trained on: each token, its label, and what it attends to; it loads nothing else.

Axis: T input length.
"""

import json
from importlib import resources

import jax
import numpy as np

from refusion_jax.batch.batch import Batch
from refusion_jax.batch.rows import Rows
from refusion_jax.data.interface import Tokenizer
from refusion_jax.training.inspection import documents_of, visible_text

BEGINNING = b"<!doctype html><!-- a training row, by refusion_jax.inspect_data -->"  # of every page


def row_page(title: str, tokenizer: Tokenizer, rows: Rows, batch: Batch, place: int) -> str:
    """The page of the row at index `place` of [B, T], and of the batch made of them, as HTML."""
    rows, batch = jax.tree.map(lambda x: np.asarray(x)[place], (rows, batch))
    seen, has_label = batch.visibility, np.any([weight > 0 for weight in batch.weights.values()], axis=0)
    kinds, documents = np.where(seen.segment_ids > 0, "clean", "padding"), seen.segment_ids.copy()
    for number, document in enumerate(documents_of(rows, batch, tokenizer.mask_id), 1):
        kinds[document.given], documents[document.given] = document.kinds, number
    columns = {  # [T] each
        "inputs": batch.inputs,
        "labels": np.where(has_label, batch.labels, -1),
        "positions": batch.positions,
        "kinds": kinds,
        "documents": documents,  # as the row numbers them, which a system may shuffle
        "segments": seen.segment_ids,
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
    """The text of a token, or its name where that is empty or a part of a character."""
    text = visible_text(tokenizer, np.array([token]))
    return text if text.strip(" \ufffd") else tokenizer.name_of(token)


def _rounded(x: np.ndarray) -> list[float]:
    """[T] in as few digits as tell the values apart for a reader."""
    return [float(f"{value:.5g}") for value in x.tolist()]

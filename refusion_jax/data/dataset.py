"""Loads the data that a config names: the tokenizer, and rows by index, either prepared or packed at the start."""

from collections.abc import Iterator

import ml_collections
from absl import logging
from etils import epath

from refusion_jax.cli.errors import UserError, naming
from refusion_jax.cli.flag_values import check_apart
from refusion_jax.data.examples import Example
from refusion_jax.data.fast_tokenizer import find_tokenizer_file, load_tokenizer_file, tokenizer_hash
from refusion_jax.data.interface import RowSource, Tokenizer, plain_prompt
from refusion_jax.data.loader import block_counts
from refusion_jax.data.manifest import is_prepared
from refusion_jax.data.packing import pack, tokenize, usable
from refusion_jax.data.prepared import MixedRows, PreparedRows
from refusion_jax.data.sources import GENERATED, read_examples
from refusion_jax.data.tokenizer import SentencePieceTokenizer


def load_dataset(
    config: ml_collections.ConfigDict, workdir: epath.PathLike | None, default_tokenizer: epath.Path | None = None
) -> tuple[Tokenizer, RowSource]:
    """The tokenizer and the rows that config.data names; rows that are not prepared are packed in memory.

    A tokenizer that the run trained at its start, in `workdir`, is used instead of training another; the file
    `default_tokenizer` is used if neither the config nor the run has one.
    """
    data, saved = config.data, find_tokenizer_file(epath.Path(workdir)) if workdir else None
    if data.tokenizer and not epath.Path(data.tokenizer).is_file():
        raise UserError(f"--config.data.tokenizer={data.tokenizer}: is not a file")
    if paths := prepared_paths(data.path, "data.path"):
        return _open_prepared(config, paths, saved)
    if data.weights:
        raise UserError(
            f"--config.data.weights={tuple(data.weights)}: only prepared directories are mixed by weight, and "
            f"--config.data.path={data.path} names none"
        )
    if workdir and data.path not in (*GENERATED, "stdlib") and epath.Path(data.path).is_dir():
        # The files of the run would be text of its next start.
        check_apart(workdir, [data.path], "workdir", "config.data.path")
    examples = usable(read_examples(data, config.seed), data.on_error)
    if file := data.tokenizer or saved or default_tokenizer:
        tokenizer = load_tokenizer_file(file, data.mask_piece, data.thinking)
    elif data.thinking != "unset":
        raise UserError(
            f"--config.data.thinking={data.thinking}: it is for chat templates; name a tokenizer that has one with "
            f"--config.data.tokenizer"
        )
    else:
        with naming(f"--config.data.path={data.path}"):
            tokenizer = SentencePieceTokenizer.train(corpus(examples), config.model.vocab_size, data.mask_piece)
    documents = usable(tokenize(examples, tokenizer, config.row_length), data.on_error)
    if tokenizer.left_out:
        logging.warning("the chat template leaves out turns, wholly or in part: %s", tokenizer.left_out)
    return tokenizer, pack(documents, config.row_length)


def prepared_paths(path: str, key: str) -> list[str]:
    """The prepared directories in the comma-separated value of a config key; empty if it names something else."""
    paths = [part.strip() for part in path.split(",")]
    prepared = [part for part in paths if is_prepared(part)]
    if prepared and len(prepared) < len(paths):
        other = next(part for part in paths if part not in prepared)
        raise UserError(f"--config.{key}: {other} is not a prepared directory, and only those can be mixed")
    return prepared


def _open_prepared(
    config: ml_collections.ConfigDict, paths: list[str], saved: epath.Path | None
) -> tuple[Tokenizer, RowSource]:
    data = config.data
    file = data.tokenizer or saved or find_tokenizer_file(epath.Path(paths[0]))
    if not file:
        raise UserError(f"{paths[0]} holds no tokenizer; name the one it was made with as --config.data.tokenizer")
    tokenizer = load_tokenizer_file(file, data.mask_piece, data.thinking)
    parts = [_prepared_rows(config, path, tokenizer, "data.path") for path in paths]
    weights = tuple(data.weights) or tuple(len(part) for part in parts)
    if len(weights) != len(parts) or not all(isinstance(w, int | float) and w > 0 for w in weights):
        raise UserError(
            f"--config.data.weights={weights}: must be a number above 0 for each of the {len(parts)} directories in "
            f"--config.data.path"
        )
    block_counts(weights)
    if len(parts) == 1:
        return tokenizer, parts[0]
    names = [epath.Path(path).name for path in paths]
    return tokenizer, MixedRows(parts, names if len(set(names)) == len(names) else paths, weights)


def read_rows(config: ml_collections.ConfigDict, path: str, tokenizer: Tokenizer, key: str) -> RowSource:
    """Rows of other data in the format of the run's; rows that are not prepared are packed in memory.

    The path, from the config key `key`, is one prepared directory, or anything else that data.path may name.
    """
    if not is_prepared(path):
        data = config.data.copy_and_resolve_references()
        data.path = path
        examples = usable(read_examples(data, config.seed, f"--config.{key}"), data.on_error)
        documents = usable(tokenize(examples, tokenizer, config.row_length), data.on_error)
        return pack(documents, config.row_length)
    return _prepared_rows(config, path, tokenizer, key)


def _prepared_rows(config: ml_collections.ConfigDict, path: str, tokenizer: Tokenizer, key: str) -> PreparedRows:
    rows = PreparedRows(path)
    if rows.row_length != config.row_length:
        raise UserError(
            f"--config.row_length={config.row_length}: {path} holds rows of {rows.row_length} tokens; give that, or "
            f"prepare it again"
        )
    if rows.manifest.tokenizer != tokenizer_hash(tokenizer):
        raise UserError(
            f"--config.{key}: {path} was made with another tokenizer than the run's; name its own as "
            f"--config.data.tokenizer, or prepare it again"
        )
    return rows


def corpus(examples: list[Example]) -> Iterator[str]:
    """All text of the examples, for training a tokenizer."""
    for example in examples:
        yield plain_prompt(example.prompt)
        yield example.response

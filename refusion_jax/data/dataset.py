"""The data of a run, from its config: examples, tokenizer, packed rows."""

from collections.abc import Iterator

import ml_collections
from etils import epath

from refusion_jax.data.fast_tokenizer import FastTokenizer, find_tokenizer_file, load_tokenizer_file
from refusion_jax.data.packing import PackedRows, pack, tokenize, usable
from refusion_jax.data.sources import Example, read_examples
from refusion_jax.data.tokenizer import Tokenizer


def load_dataset(
    config: ml_collections.ConfigDict, workdir: epath.Path
) -> tuple[Tokenizer | FastTokenizer, PackedRows]:
    """Reads, tokenizes and packs all of config.data into memory.

    Args:
      config: the run's.
      workdir: of the run; the tokenizer it trained when it began is used instead of training another.

    Raises:
      UserError: where the data or the tokenizer cannot be used.
    """
    data = config.data
    examples = usable(read_examples(data, config.seed), data.on_error)
    if data.tokenizer:
        tokenizer = load_tokenizer_file(data.tokenizer, data.mask_piece)
    elif saved := find_tokenizer_file(workdir):
        tokenizer = load_tokenizer_file(saved, data.mask_piece)
    else:
        tokenizer = Tokenizer.train(corpus(examples), config.model.vocab_size)
    documents = tokenize(examples, tokenizer, config.row_length, data.on_error)
    return tokenizer, pack(documents, config.row_length)


def corpus(examples: list[Example]) -> Iterator[str]:
    """All text of the examples, for training a tokenizer."""
    for example in examples:
        yield example.prompt or ""
        yield example.response

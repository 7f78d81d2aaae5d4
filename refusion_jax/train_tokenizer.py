"""Trains a sentencepiece tokenizer on a corpus, with bos, eos, pad and mask tokens.

  python -m refusion_jax.train_tokenizer --input='my/*.jsonl' --output=my.model --vocab_size=8192

`train` does the same by itself if --config.data.tokenizer is empty; this command is for a tokenizer that several runs
share.
"""

from pathlib import Path

from absl import flags

from refusion_jax.cli import command, flag_values
from refusion_jax.cli.errors import UserError, naming
from refusion_jax.config import default_config
from refusion_jax.data.dataset import corpus
from refusion_jax.data.input_splits import find_files
from refusion_jax.data.packing import usable
from refusion_jax.data.sources import read_examples
from refusion_jax.data.tokenizer import SentencePieceTokenizer
from refusion_jax.distributed.storage import write_file

_INPUT = flags.DEFINE_string("input", None, "As --config.data.path: file, glob, directory ...", allow_overwrite=False)
_OUTPUT = flags.DEFINE_string("output", None, "Tokenizer model file to write")
_VOCAB_SIZE = flags.DEFINE_integer(
    "vocab_size", 8192, "Tokens, including special ones and bytes; a small corpus yields fewer", 1, 2**24
)
_FIELDS = {
    name: flags.DEFINE_string(name, "", f"JSON field, as --config.data.{name} of `train`")
    for name in ("query_field", "response_field", "text_field")
}
_ON_ERROR = flags.DEFINE_enum("on_error", "stop", ["stop", "skip"], "At a malformed example: stop, or leave it out")
_BEGINNING = b"\n\x0e\n\x05<pad>"  # every model that this command writes begins with it


def main() -> None:
    if _INPUT.value is None or _OUTPUT.value is None:
        raise UserError("--input and --output are needed; --help explains")
    output = Path(_OUTPUT.value)
    flag_values.check_apart(output, [_INPUT.value, *find_files(_INPUT.value)])
    flag_values.check_file("output", output, _BEGINNING, "is not a tokenizer of ours")
    config = default_config()
    config.data.path = _INPUT.value
    config.data.update({name: flag.value for name, flag in _FIELDS.items()})
    examples = usable(read_examples(config.data, config.seed, "--input", "--"), _ON_ERROR.value, "--")
    with naming(f"--vocab_size={_VOCAB_SIZE.value}"):
        tokenizer = SentencePieceTokenizer.train(corpus(examples), _VOCAB_SIZE.value)
    write_file(output, tokenizer.model)
    print(f"{output}: {tokenizer.size} pieces from {len(examples):,} examples")


if __name__ == "__main__":
    command.run(main)

"""Shows a row of prepared data as it is trained on: its documents, their slots, corruption and labels.

  python -m refusion_jax.inspect_data --data=prepared/mine --row=7
  python -m refusion_jax.inspect_data --data=prepared/mine --verify

A prompt is dim; of a response the slots that stay clean are green and those that are masked are red, with a bar
between slots. What the model is given is in the order in which it sees it: clean slots first, in random order, then
masked ones. `--verify` reads all files and compares every checksum instead.
"""

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from etils import epath
from rich.console import Console
from rich.table import Table
from rich.text import Text

from refusion_jax.batch.rows import noise_keys
from refusion_jax.config import default_config
from refusion_jax.data.fast_tokenizer import FastTokenizer, find_tokenizer_file, load_tokenizer_file
from refusion_jax.data.prepared import PreparedRows, file_checksum
from refusion_jax.data.tokenizer import MASK_PIECE, Tokenizer
from refusion_jax.runtime import cli
from refusion_jax.runtime.errors import UserError
from refusion_jax.systems.refusion import slots

_DATA = flags.DEFINE_string("data", None, "A directory that `prepare` wrote")
_ROW = flags.DEFINE_integer("row", 0, "Which row, from 0", lower_bound=0)
_SEED = flags.DEFINE_integer("seed", 0, "Of the noise, as --config.seed of `train`")
_STEP = flags.DEFINE_integer("step", 0, "Of the noise: another step, another corruption", lower_bound=0)
_MASK_PIECE = flags.DEFINE_string("mask_piece", MASK_PIECE, "As --config.data.mask_piece of `train`")
_LABELS = flags.DEFINE_bool("labels", False, "Also list each token that the model is given, and what it must predict")
_VERIFY = flags.DEFINE_bool("verify", False, "Compare all checksums of the directory instead of showing a row")

_COLORS = {"prompt": "dim", "clean": "green", "masked": "red"}


def show_row(console: Console, tokenizer: Tokenizer | FastTokenizer, row: dict, noise_key: jax.Array, labels: bool):
    """Prints a row.

    Args:
      console: where to.
      tokenizer: that made it.
      row: tokens, segment_ids and is_response, [T] each.
      noise_key: [1] of its corruption.
      labels: whether to list the labels, one a line.
    """
    sizes, eps = default_config().slots.sizes, default_config().slots.eps
    batch = slots.Rows(**{name: jnp.asarray(value)[None] for name, value in row.items()})
    noise = slots.draw_noise(noise_key, batch, sizes, eps)
    corrupted = jax.device_get(slots.corrupt(batch, noise, tokenizer.mask_id))
    starts, noise = jax.device_get((slots.slot_starts(batch, noise.slot_size), noise))
    segment_ids = row["segment_ids"]
    for document in range(1, int(segment_ids.max()) + 1):
        at = np.flatnonzero(segment_ids == document)
        prompt = int(np.sum(~row["is_response"][at]))
        console.print(
            f"document {document} of {segment_ids.max()}: {prompt} prompt and {len(at) - prompt} response tokens, slot "
            f"size {noise.slot_size[0, at[0]]}, mask probability {noise.mask_probability[0, at[0]]:.2f}",
            style="bold",
            highlight=False,
        )
        kinds = np.where(~row["is_response"], "prompt", np.where(noise.is_masked[0], "masked", "clean"))
        console.print(Text("text   ", "bold") + _spans(tokenizer, row["tokens"][at], kinds[at], starts[0, at]))
        given = np.where(
            corrupted.masked_label[0], "masked", np.where(np.arange(len(kinds)) < at[0] + prompt, "prompt", "clean")
        )
        slot = starts[0][at[0] + corrupted.positions[0, at]]
        console.print(Text("given  ", "bold") + _spans(tokenizer, corrupted.inputs[0, at], given[at], slot))
        if labels:
            console.print(_label_table(tokenizer, corrupted, at, given))
    padding = int(np.sum(segment_ids == 0))
    console.print(f"padding: {padding} of {len(segment_ids)} positions", highlight=False)


def _spans(tokenizer: Tokenizer | FastTokenizer, tokens: np.ndarray, kinds: np.ndarray, slot: np.ndarray) -> Text:
    """The tokens as colored text; runs of one slot are decoded together, so that characters stay whole."""
    text, begin = Text(), 0
    for end in range(1, len(tokens) + 1):
        same = end < len(tokens) and kinds[end] == kinds[begin]
        if same and (kinds[begin] == "prompt" or slot[end] == slot[begin]):
            continue
        if begin and kinds[begin] != "prompt":
            text.append("|", "bold")
        text.append(_decode(tokenizer, tokens[begin:end]), _COLORS[kinds[begin]])
        begin = end
    return text


def _decode(tokenizer: Tokenizer | FastTokenizer, tokens: np.ndarray) -> str:
    """Text in which special tokens can be seen."""
    names = {tokenizer.mask_id: "▒", tokenizer.eos_id: "<eos>", tokenizer.bos_id: "<bos>"}
    text, plain = "", []
    for token in [*tokens.tolist(), None]:
        if token in names or token is None:
            text += (tokenizer.decode(plain) if plain else "") + names.get(token, "")
            plain = []
        else:
            plain.append(token)
    return text


def _label_table(tokenizer, corrupted: slots.Corrupted, at: np.ndarray, given: np.ndarray) -> Table:
    table = Table("position", "given", "kind", "must predict")
    for index in at:
        has_label = corrupted.clean_label[0, index] or corrupted.masked_label[0, index]
        label = _decode(tokenizer, corrupted.labels[0, index : index + 1]) if has_label else ""
        token = _decode(tokenizer, corrupted.inputs[0, index : index + 1])
        cells = (str(corrupted.positions[0, index]), repr(token), str(given[index]), repr(label) if has_label else "")
        table.add_row(*(Text(cell) for cell in cells), style=_COLORS[str(given[index])])
    return table


def verify(path: str) -> int:
    """Compares the checksums of all files and rows; how many rows there are.

    Raises:
      UserError: naming the first file or row that differs.
    """
    rows = PreparedRows(path, verify=True)
    for shard in rows.manifest.shards:
        if file_checksum(epath.Path(path) / shard.file) != shard.checksum:
            raise UserError(f"{path}/{shard.file}: the checksum is not the manifest's; the file was damaged")
    for index in range(len(rows)):
        rows.record(index)
    return len(rows)


def main() -> None:
    if _DATA.value is None:
        raise UserError("--data=DIR is needed; --help explains")
    console = Console(soft_wrap=True)
    if _VERIFY.value:
        console.print(f"{_DATA.value}: all {verify(_DATA.value):,} rows are as they were written", highlight=False)
        return
    rows = PreparedRows(_DATA.value, verify=True)
    if _ROW.value >= len(rows):
        raise UserError(f"--row={_ROW.value}: {_DATA.value} holds rows 0 to {len(rows) - 1}")
    file = find_tokenizer_file(epath.Path(_DATA.value))
    if not file:
        raise UserError(f"{_DATA.value} holds no tokenizer")
    tokenizer = load_tokenizer_file(file, _MASK_PIECE.value)
    console.print(f"{_DATA.value}: row {_ROW.value} of {len(rows):,}", style="bold", highlight=False)
    keys = noise_keys(_SEED.value, jnp.int32(_STEP.value), _ROW.value + 1)[-1:]
    show_row(console, tokenizer, rows[_ROW.value], keys, _LABELS.value)


if __name__ == "__main__":
    cli.run(main)

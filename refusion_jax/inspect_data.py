"""Shows a row as it is trained on: its documents, their corruption and labels, for any system.

  python -m refusion_jax.inspect_data --config=configs/quickstart.py --step=3 --place=5
  python -m refusion_jax.inspect_data --data=prepared/mine --row=7 --labels
  python -m refusion_jax.inspect_data --data=prepared/mine --verify

With --config it is the row at a place of the batch of a step, with the very noise that `train` gives it (--workdir
names a run whose tokenizer is used). With --data it is any row of a prepared directory, corrupted as the default config
would at that step and place. A prompt is dim; of a response the tokens that are given are green and those that are
masked are red. What the model is given stands in the order in which it sees it, with a bar where the text jumps.
`--verify` reads all files and compares every checksum instead.
"""

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from absl import flags
from etils import epath
from ml_collections import config_flags
from rich.console import Console
from rich.table import Table
from rich.text import Text

from refusion_jax.batch.batch import Batch
from refusion_jax.batch.rows import Rows, noise_keys
from refusion_jax.config import check, default_config, explained, make_objective, names
from refusion_jax.data.dataset import load_dataset
from refusion_jax.data.fast_tokenizer import FastTokenizer, find_tokenizer_file, load_tokenizer_file
from refusion_jax.data.loader import host_batches
from refusion_jax.data.prepared import PreparedRows, file_checksum
from refusion_jax.data.tokenizer import MASK_PIECE, Tokenizer
from refusion_jax.runtime import cli
from refusion_jax.runtime.errors import UserError

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file of the training, such as configs/quickstart.py")
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Run of that config, for its tokenizer; without one it is trained again"
)
_PLACE = flags.DEFINE_integer("place", 0, "Which row of the batch, from 0", lower_bound=0)
_STEP = flags.DEFINE_integer("step", 0, "Steps taken before: of the rows and of the noise", lower_bound=0)
_DATA = flags.DEFINE_string("data", None, "A directory that `prepare` wrote, instead of --config")
_ROW = flags.DEFINE_integer("row", 0, "Which row of --data, from 0", lower_bound=0)
_MASK_PIECE = flags.DEFINE_string("mask_piece", MASK_PIECE, "As --config.data.mask_piece of `train`, for --data")
_LABELS = flags.DEFINE_bool("labels", False, "Also list each token that the model is given, and what it must predict")
_VERIFY = flags.DEFINE_bool("verify", False, "Compare all checksums of --data instead of showing a row")

_COLORS = {"prompt": "dim", "clean": "green", "masked": "red"}


def training_batch(config: ml_collections.ConfigDict, workdir: epath.Path, step: int) -> tuple:
    """(tokenizer, rows, batch) that `train` takes its step `step` + 1 on, whole."""
    tokenizer, data = load_dataset(config, workdir)
    places = range(config.batch_size)
    steps = {"batch_size": config.batch_size, "seed": config.seed, "first_step": step, "last_step": step + 1}
    rows = Rows(**next(host_batches(data, places, **steps)))
    return tokenizer, rows, corrupted(config, tokenizer, rows, noise_keys(config.seed, step, config.batch_size))


def corrupted(
    config: ml_collections.ConfigDict, tokenizer: Tokenizer | FastTokenizer, rows: Rows, keys: jax.Array
) -> Batch:
    """The batch that a config's objective makes of some rows [B, T] by keys [B]."""
    return jax.jit(make_objective(config, tokenizer.mask_id).corrupt)(jax.tree.map(jnp.asarray, rows), keys)


def show_row(
    console: Console, tokenizer: Tokenizer | FastTokenizer, rows: Rows, batch: Batch, place: int, labels: bool
) -> None:
    """Prints a row.

    Args:
      console: where to.
      tokenizer: that made it.
      rows: [B, T], as packed.
      batch: what the objective made of them.
      place: of the row among them.
      labels: whether to list the labels, one a line.
    """
    rows, batch = jax.tree.map(lambda x: np.asarray(x)[place], (rows, batch))
    documents = int(rows.segment_ids.max())
    for document in range(1, documents + 1):
        text = np.flatnonzero(rows.segment_ids == document)
        given = np.flatnonzero(batch.visibility.segment_ids == document)
        prompt = int(np.sum(~rows.is_response[text]))
        facts = "".join(f", {name.replace('_', ' ')} {x[given[0]]:.4g}" for name, x in batch.facts.items())
        console.print(
            f"document {document} of {documents}: {prompt} prompt and {len(text) - prompt} response tokens{facts}",
            style="bold",
            highlight=False,
        )
        is_mask, positions = batch.inputs[given] == tokenizer.mask_id, batch.positions[given]
        in_prompt, is_in = ~rows.is_response[text], positions < len(text)  # behind it a system may have put filler
        from_prompt = is_in & in_prompt[np.minimum(positions, len(text) - 1)]
        kinds = np.where(from_prompt, "prompt", np.where(is_mask, "masked", "clean"))
        of_text = np.where(in_prompt, "prompt", "clean")
        of_text[positions[is_in & (kinds == "masked")]] = "masked"
        console.print(Text("text   ", "bold") + _spans(tokenizer, rows.tokens[text], of_text, np.arange(len(text))))
        console.print(Text("given  ", "bold") + _spans(tokenizer, batch.inputs[given], kinds, positions))
        if labels:
            console.print(_label_table(tokenizer, batch, given, kinds))
    padding = int(np.sum(rows.segment_ids == 0))
    console.print(f"padding: {padding} of {len(rows.segment_ids)} positions", highlight=False)


def _spans(tokenizer: Tokenizer | FastTokenizer, tokens: np.ndarray, kinds: np.ndarray, positions: np.ndarray) -> Text:
    """The tokens as colored text; runs of one kind that follow each other in the text are decoded together."""
    text, begin = Text(), 0
    for end in range(1, len(tokens) + 1):
        if end < len(tokens) and kinds[end] == kinds[begin] and positions[end] == positions[end - 1] + 1:
            continue
        if begin and positions[begin] != positions[begin - 1] + 1:
            text.append("|", "bold")
        text.append(_decode(tokenizer, tokens[begin:end]), _COLORS[kinds[begin]])
        begin = end
    return text


def _decode(tokenizer: Tokenizer | FastTokenizer, tokens: np.ndarray) -> str:
    """Text in which special tokens can be seen."""
    special = {tokenizer.mask_id: "▒", tokenizer.eos_id: "<eos>", tokenizer.bos_id: "<bos>"}
    text, plain = "", []
    for token in [*tokens.tolist(), None]:
        if token in special or token is None:
            text += (tokenizer.decode(plain) if plain else "") + special.get(token, "")
            plain = []
        else:
            plain.append(token)
    return text


def _label_table(tokenizer, batch: Batch, given: np.ndarray, kinds: np.ndarray) -> Table:
    table = Table("position", "given", "kind", "must predict", "weight")
    for index, kind in zip(given, kinds, strict=True):
        weights = [f"{term} {weight[index]:.3g}" for term, weight in batch.weights.items() if weight[index] > 0]
        label = repr(_decode(tokenizer, batch.labels[index : index + 1])) if weights else ""
        token = repr(_decode(tokenizer, batch.inputs[index : index + 1]))
        cells = (str(batch.positions[index]), token, str(kind), label, ", ".join(weights))
        table.add_row(*(Text(cell) for cell in cells), style=_COLORS[str(kind)])
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
    if (_CONFIG.value is None) == (_DATA.value is None):
        raise UserError("one of --config=configs/NAME.py and --data=DIR is needed; --help explains")
    console = Console(soft_wrap=True)
    if _CONFIG.value:
        config = _CONFIG.value
        check(config)
        if _PLACE.value >= config.batch_size:
            raise UserError(f"--place={_PLACE.value}: a batch holds rows 0 to {config.batch_size - 1}")
        tokenizer, rows, batch = training_batch(config, epath.Path(_WORKDIR.value or "."), _STEP.value)
        title = f"row {_PLACE.value} of the batch of step {_STEP.value + 1}, objective {config.objective}"
        console.print(title, style="bold", highlight=False)
        show_row(console, tokenizer, rows, batch, _PLACE.value, _LABELS.value)
        return
    if _VERIFY.value:
        console.print(f"{_DATA.value}: all {verify(_DATA.value):,} rows are as they were written", highlight=False)
        return
    data = PreparedRows(_DATA.value, verify=True)
    if _ROW.value >= len(data):
        raise UserError(f"--row={_ROW.value}: {_DATA.value} holds rows 0 to {len(data) - 1}")
    file = find_tokenizer_file(epath.Path(_DATA.value))
    if not file:
        raise UserError(f"{_DATA.value} holds no tokenizer")
    tokenizer = load_tokenizer_file(file, _MASK_PIECE.value)
    console.print(f"{_DATA.value}: row {_ROW.value} of {len(data):,}", style="bold", highlight=False)
    config = default_config()
    rows = Rows(**{name: value[None] for name, value in data[_ROW.value].items()})
    keys = noise_keys(config.seed, _STEP.value, _PLACE.value + 1)[-1:]
    show_row(console, tokenizer, rows, corrupted(config, tokenizer, rows, keys), 0, _LABELS.value)


if __name__ == "__main__":
    cli.run(main, lambda: explained(_CONFIG.value), names)

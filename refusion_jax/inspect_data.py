"""Shows a row as training sees it: its documents, their corruption and labels, for any system.

  python -m refusion_jax.inspect_data --config=configs/quickstart.py --step=3 --place=5
  python -m refusion_jax.inspect_data --data=prepared/mine --row=7 --labels --html=row.html
  python -m refusion_jax.inspect_data --data=prepared/mine --html=data.html --config=configs/small.py
  python -m refusion_jax.inspect_data --data=prepared/mine --verify

With --config it is the row at --place in the batch of --step, with exactly the noise that `train` gives it; with a
--workdir, tokenizer and left-out rows are those of that run. With --data it is any row of a prepared directory,
corrupted as with the default config at that step and place. Prompts are dim; response tokens are green if they are
given and red if they are masked. Inputs are shown in the order in which the model sees them, with a bar where the text
jumps. --html also writes a page for a browser: each token as a cell, its label, and what it attends to. With --data but
without --row the page describes the whole data instead: sources, lengths, what was left out and why, languages, some
documents, and with a --config what training on it takes. --verify reads all files and compares every checksum.
"""

from absl import flags
from etils import epath
from rich.console import Console

from refusion_jax.batch.rows import Rows, noise_keys
from refusion_jax.cli import command
from refusion_jax.cli.errors import UserError
from refusion_jax.cli.flag_values import check_file
from refusion_jax.config import check, check_stores, default_config, help_texts
from refusion_jax.config.keys import keys
from refusion_jax.config.model import adopt_shape
from refusion_jax.config.run_config import check_same_run
from refusion_jax.data.fast_tokenizer import find_tokenizer_file, load_tokenizer_file
from refusion_jax.data.interface import Tokenizer
from refusion_jax.data.prepared import PreparedRows
from refusion_jax.data.tokenizer import MASK_PIECE
from refusion_jax.distributed.storage import write_file
from refusion_jax.training import data_page
from refusion_jax.training.inspection import BEGINNING, corrupted, row_page, show_row, training_batch, verify

_CONFIG = command.define_config("Config file of the training, such as configs/quickstart.py")
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Run of that config, for its tokenizer and the rows it left out; by default as in a new run"
)
_PLACE = flags.DEFINE_integer("place", 0, "Which row of the batch, from 0", 0, 2**24)
_STEP = flags.DEFINE_integer("step", 1, "Step to show, from 1, as in metrics.jsonl", lower_bound=1)
_DATA = flags.DEFINE_string("data", None, "A directory that `prepare` wrote, instead of --config")
_ROW = flags.DEFINE_integer("row", 0, "Which row of --data, from 0", lower_bound=0)
_MASK_PIECE = flags.DEFINE_string("mask_piece", MASK_PIECE, "As --config.data.mask_piece of `train`, for --data")
_LABELS = flags.DEFINE_bool("labels", False, "Also list each token the model is given and what it must predict")
_HTML = flags.DEFINE_string(
    "html",
    None,
    "HTML file to write, with the row and what each token attends to; for --data without --row, with all of the data",
)
_VERIFY = flags.DEFINE_bool("verify", False, "Compare all checksums of --data instead of showing a row")
_OF_ROWS = {"data", "seed", "batch_size", "row_length"}  # config keys that determine a run's rows


def _tokenizer() -> Tokenizer:
    file = find_tokenizer_file(epath.Path(_DATA.value))
    if not file:
        raise UserError(f"{_DATA.value} holds no tokenizer")
    return load_tokenizer_file(file, _MASK_PIECE.value)


def main() -> None:
    is_page = bool(_DATA.value and _HTML.value and not (_ROW.present or _VERIFY.value))
    if (_CONFIG.value is None) == (_DATA.value is None) and not is_page:
        raise UserError("one of --config=configs/NAME.py and --data=DIR is needed; --help explains")
    console = Console(soft_wrap=True, highlight=False)
    for flag in (_WORKDIR,) if _DATA.value else (_ROW, _MASK_PIECE, _VERIFY):
        if flag.present:
            raise UserError(f"--{flag.name} goes with --{'config' if _DATA.value else 'data'}; --help explains")
    if _VERIFY.value and _HTML.value:
        raise UserError("--verify shows no row that --html could write; leave one of them out")
    if _HTML.value:
        check_file("html", epath.Path(_HTML.value), data_page.BEGINNING if is_page else BEGINNING)
    if is_page:
        if _CONFIG.value:
            check(_CONFIG.value)
        data = PreparedRows(_DATA.value)
        write_file(_HTML.value, data_page.data_page(data, _tokenizer(), _CONFIG.value).encode(errors="replace"))
        console.print(f"{_HTML.value} is about {_DATA.value}")
        return
    if _CONFIG.value:
        config, place = _CONFIG.value, _PLACE.value
        check(config)
        check_stores(config)
        if place >= config.batch_size:
            raise UserError(f"--place={place}: a batch holds rows 0 to {config.batch_size - 1}")
        workdir = epath.Path(_WORKDIR.value) if _WORKDIR.value else None
        if workdir and not (workdir / "config.json").exists():
            raise UserError(f"--workdir={workdir}: holds no run to take the tokenizer from")
        adopt_shape(config, workdir)
        if workdir:
            check_same_run(workdir, config, resumable=set(config) - _OF_ROWS)
        tokenizer, rows, batch = training_batch(config, workdir, _STEP.value - 1)
        title = f"row {place} of the batch of step {_STEP.value}, objective {config.objective}"
    elif _VERIFY.value:
        console.print(f"{_DATA.value}: all {verify(_DATA.value):,} rows are as they were written")
        return
    else:
        data = PreparedRows(_DATA.value)
        if _ROW.value >= len(data):
            raise UserError(f"--row={_ROW.value}: {_DATA.value} holds rows 0 to {len(data) - 1}")
        tokenizer, config, place = _tokenizer(), default_config(), 0
        rows = Rows(**{name: value[None] for name, value in data[_ROW.value].items()})
        batch = corrupted(config, tokenizer, rows, noise_keys(config.seed, _STEP.value - 1, _PLACE.value + 1)[-1:])
        title = f"{_DATA.value}: row {_ROW.value} of {len(data):,}"
    if _HTML.value:
        write_file(_HTML.value, row_page(title, tokenizer, rows, batch, place))
    console.print(title, style="bold")
    show_row(console, tokenizer, rows, batch, place, _LABELS.value)


if __name__ == "__main__":
    command.run(main, help_texts, keys)

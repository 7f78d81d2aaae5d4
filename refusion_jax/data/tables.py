"""Reads examples from Parquet files, one batch of rows at a time."""

from collections.abc import Iterator

import pyarrow
import pyarrow.parquet
from etils import epath

from refusion_jax.cli.errors import first_line
from refusion_jax.data.examples import KNOWN_FIELDS, Bad, Example, Fields, to_examples

_ROWS = 64  # read at a time: each may be a book


def row_group_sizes(path: str) -> list[int]:
    """Bytes of each row group; empty if the file cannot be read, which is reported when it is read."""
    try:
        with epath.Path(path).open("rb") as file:
            metadata = pyarrow.parquet.ParquetFile(file).metadata
            return [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    except Exception:  # noqa: BLE001  pyarrow raises anything on a broken file
        return []


def read_row_groups(path: str, start: int, end: int, fields: Fields) -> Iterator[Example | Bad]:
    """Examples of the row groups start .. end - 1; Bad for bad rows, and at the end if the rest cannot be read."""
    row = 0
    try:
        with epath.Path(path).open("rb") as file:
            table = pyarrow.parquet.ParquetFile(file)
            row = sum(table.metadata.row_group(group).num_rows for group in range(start))
            columns = [name for name in table.schema_arrow.names if _may_be_read(table, name, fields)]
            for batch in table.iter_batches(_ROWS, range(start, end), columns or None):
                for item in batch.to_pylist():
                    row += 1
                    yield from to_examples(item, f"{path}: row {row}", fields)
    except Exception as error:  # noqa: BLE001  dates out of range and repeated columns raise none of pyarrow's own
        yield Bad(f"{path}: row {row + 1}", f"not a whole Parquet file: {first_line(error)}", "unreadable file")


def _may_be_read(table: pyarrow.parquet.ParquetFile, name: str, fields: Fields) -> bool:
    """Whether to read a column: it holds text, or its mere presence matters. Others would cost time and memory."""
    kind = table.schema_arrow.field(name).type
    is_text = pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)
    return is_text or name in {*KNOWN_FIELDS, fields.query, fields.response, fields.text}

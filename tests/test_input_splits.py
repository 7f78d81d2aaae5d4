"""Source files of every kind, read whole or in splits."""

import random
import re

import pyarrow
import pyarrow.parquet
import pytest
from test_prepare import write_pairs

from refusion_jax.data.examples import Example, Fields
from refusion_jax.data.input_splits import find_files, read, splits_of, whole


def test_a_directory_with_a_link_to_one_above_is_read_once(tmp_path):
    (tmp_path / "in" / "below").mkdir(parents=True)
    write_pairs(tmp_path / "in" / "below" / "a.jsonl", 1)
    (tmp_path / "in" / "below" / "back").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "aside").symlink_to(tmp_path / "in" / "below")  # is another name, which the user gave
    found = find_files(str(tmp_path / "in"))
    assert found == [str(tmp_path / "in" / name / "a.jsonl") for name in ("aside", "below")]


def test_every_kind_of_file_gives_the_same_examples_whole_or_in_pieces(tmp_path):
    pairs = write_pairs(tmp_path / "a.jsonl", 100)
    table = pyarrow.table({"query": [q for q, _ in pairs], "response": [r for _, r in pairs], "image": [b"x"] * 100})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=9)
    for suffix in ("jsonl", "parquet"):
        path = str(tmp_path / f"a.{suffix}")
        for size in (1, 300, 1 << 20):
            splits = splits_of(path, size)
            assert len(splits) == 1 if size > 1 << 19 else len(splits) > 3
            examples = [e for part in splits for e in read(part, Fields())]
            assert [(e.prompt, e.response) for e in examples] == pairs
            wheres = [str(e.where).rsplit(":" if suffix == "jsonl" else " ", 1)[1] for e in examples]
            assert wheres == [str(i) for i in range(1, 101)]


def peak_of_first(path):
    """(the first example of a Parquet file, bytes that pyarrow held at most)."""
    usual = pyarrow.default_memory_pool()
    pyarrow.set_memory_pool(counted := pyarrow.proxy_memory_pool(usual))
    try:
        return next(read(whole(str(path)), Fields())), counted.max_memory()
    finally:
        pyarrow.set_memory_pool(usual)


def test_a_small_table_that_would_fill_the_memory_is_refused_unread(tmp_path):
    bomb = pyarrow.table({"text": ["a" * (96 << 20)]})
    pyarrow.parquet.write_table(bomb, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    first, peak = peak_of_first(tmp_path / "a.parquet")
    assert peak < 32 << 20
    assert re.search(r"not a whole Parquet file: [0-9,]+ bytes of text expand to 100,66[0-9,]+$", first.reason)


def test_one_long_text_in_every_row_of_a_table_is_read_a_few_rows_at_a_time(tmp_path):
    text = random.Random(0).randbytes(1 << 20).hex()
    pyarrow.parquet.write_table(pyarrow.table({"text": [text] * 200}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 4 << 20
    first, peak = peak_of_first(tmp_path / "a.parquet")
    assert first.response == text
    assert peak < 300 << 20


@pytest.mark.parametrize("size", [7, 64, 1000, 10**6])
def test_a_text_is_cut_between_characters_only(size, tmp_path):
    text = "grüße ☃\n" * 20 + "☃" * 30000 + "\n" + "x" * 500
    (tmp_path / "a.txt").write_text(text)
    parts = [e for part in splits_of(str(tmp_path / "a.txt"), size * 50) for e in read(part, Fields())]
    assert all(isinstance(e, Example) for e in parts)
    assert "".join(e.response for e in parts) == text
    assert [e.starts for e in parts] == [True] + [False] * (len(parts) - 1)
    assert [e.ends for e in parts] == [False] * (len(parts) - 1) + [True]

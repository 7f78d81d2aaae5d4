"""Source files of every kind, read whole or in splits."""

import pyarrow
import pyarrow.parquet
import pytest
from test_prepare import write_pairs

from refusion_jax.data.examples import Example, Fields
from refusion_jax.data.input_splits import find_files, read, splits_of


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


@pytest.mark.parametrize("size", [7, 64, 1000, 10**6])
def test_a_text_is_cut_between_characters_only(size, tmp_path):
    text = "grüße ☃\n" * 20 + "☃" * 30000 + "\n" + "x" * 500
    (tmp_path / "a.txt").write_text(text)
    parts = [e for part in splits_of(str(tmp_path / "a.txt"), size * 50) for e in read(part, Fields())]
    assert all(isinstance(e, Example) for e in parts)
    assert "".join(e.response for e in parts) == text
    assert [e.starts for e in parts] == [True] + [False] * (len(parts) - 1)
    assert [e.ends for e in parts] == [False] * (len(parts) - 1) + [True]

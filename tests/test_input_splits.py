"""Source files of every kind, read whole or in splits."""

import random
import re
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT, config_with
from test_prepare import write_pairs

from refusion_jax.data.examples import Bad, Example, Fields
from refusion_jax.data.input_splits import find_files, read, splits_of, whole
from refusion_jax.data.sources import read_examples


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


CAPPED = """
import resource, sys, types
import pyarrow.parquet
from refusion_jax.data import sources
from refusion_jax.data.packing import usable
sources._MOST = 1 << 25
pages = int(open("/proc/self/statm").read().split()[0])
most = int(sys.argv[2]) or pages * resource.getpagesize() + (256 << 20)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
fields = dict(query_field="", response_field="", text_field="", turns="last")
try:
    usable(sources.read_examples(types.SimpleNamespace(path=sys.argv[1], **fields), seed=0), "stop")
except sources.UserError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a.jsonl", "a.jsonl:1: a line of more than 16 MiB"),
        ("a.json", r"a.json: a list of more than 24 MiB; make it one object per line \(.jsonl\)"),
        ("a.txt", "a.txt holds more than 33,554,432 characters, all of which would be kept in memory: give a part"),
        ("a.txt.gz", "a.txt.gz: is compressed; unpack it, or make it JSON of one text per line"),
        ("a.parquet", "a.parquet: row 1: not a whole Parquet file: .* bytes hold 16,777,216 values of messages"),
    ],
)
def test_a_file_that_would_fill_the_memory_is_one_line_within_256_mib(name, said, tmp_path):
    path = tmp_path / name
    if name == "a.parquet":  # less than a KiB
        turns = pyarrow.nulls(1 << 24, pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.string()}))
        messages = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1 << 24], pyarrow.int32()), turns)
        pyarrow.parquet.write_table(pyarrow.table({"messages": messages}), path)
    elif name == "a.txt":
        path.write_bytes(b" " * (300 << 20))
    else:
        with path.open("wb") as file:
            file.truncate(4 << 30)  # without a newline, and without a block on the disk
    assert re.search(said, read_capped(path, 0))


def read_capped(path, most):
    """What a process says that reads a file with so many bytes of memory; 0: 256 MiB more than without a file."""
    line = [sys.executable, "-c", CAPPED, str(path), str(most)]
    ended = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (len(ended.stdout.splitlines()), ended.stderr, ended.returncode) == (1, "", 0), ended.stderr[-500:]
    return ended.stdout


@pytest.mark.thorough
def test_the_longest_list_of_what_takes_most_is_read_within_two_gib(tmp_path):
    (tmp_path / "a.json").write_bytes(b"[" + b",".join([b"[0]"] * ((6 << 20) - 1)) + b"]")
    assert "a.json: item 1: must be an object" in read_capped(tmp_path / "a.json", 2 << 30)


def test_what_follows_a_line_that_is_too_long_is_read_under_its_own_number(tmp_path):
    good = b'{"text": "one"}\n'
    (tmp_path / "a.jsonl").write_bytes(good + b" " * (40 << 20) + b"\n" + good)
    for size in (1 << 20, 1 << 30):
        found = [e for part in splits_of(str(tmp_path / "a.jsonl"), size) for e in read(part, Fields())]
        assert [str(e.where).rsplit(":", 1)[1] for e in found] == ["1", "2", "3"]
        assert [type(e) for e in found] == [Example, Bad, Example]


def test_a_long_text_is_trained_on_in_parts_that_lose_nothing(tmp_path):
    text = "one two three\n" * 200_000
    (tmp_path / "a.txt").write_text(text)
    parts = list(read_examples(config_with(**{"data.path": str(tmp_path / "a.txt")}).data, seed=0))
    assert len(parts) == 3
    assert "".join(part.response for part in parts) == text


@pytest.mark.parametrize("size", [7, 64, 1000, 10**6])
def test_a_text_is_cut_between_characters_only(size, tmp_path):
    text = "grüße ☃\n" * 20 + "☃" * 30000 + "\n" + "x" * 500
    (tmp_path / "a.txt").write_text(text)
    parts = [e for part in splits_of(str(tmp_path / "a.txt"), size * 50) for e in read(part, Fields())]
    assert all(isinstance(e, Example) for e in parts)
    assert "".join(e.response for e in parts) == text
    assert [e.starts for e in parts] == [True] + [False] * (len(parts) - 1)
    assert [e.ends for e in parts] == [False] * (len(parts) - 1) + [True]

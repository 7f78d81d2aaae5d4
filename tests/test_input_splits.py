"""Source files of every kind, compressed, in web archives and on a hub, whole or in splits."""

import bz2
import gzip
import json
import random
import re
from urllib.parse import urlsplit

import pyarrow
import pyarrow.parquet
import pytest
from conftest import config_with
from helpers import http_server, python
from test_prepare import contents, documents, make, words_tokenizer, write_pairs

from refusion_jax import UserError
from refusion_jax.data import packing, shards
from refusion_jax.data.examples import Bad, Example, Fields
from refusion_jax.data.fast_tokenizer import load_tokenizer_file
from refusion_jax.data.input_splits import find_files, pinned, read, splits_of, whole
from refusion_jax.data.sources import read_examples
from refusion_jax.data.tokenizer import SentencePieceTokenizer


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


def test_one_long_text_in_every_row_of_a_table_is_read_a_few_rows_at_a_time(tmp_path):
    text = random.Random(0).randbytes(1 << 20).hex()
    pyarrow.parquet.write_table(pyarrow.table({"text": [text] * 200}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 4 << 20
    usual = pyarrow.default_memory_pool()
    pyarrow.set_memory_pool(counted := pyarrow.proxy_memory_pool(usual))
    try:
        assert next(read(whole(str(tmp_path / "a.parquet")), Fields())).response == text
    finally:
        pyarrow.set_memory_pool(usual)
    assert counted.max_memory() < 300 << 20


CAPPED = """
import resource, sys, types
from refusion_jax.data import sources
from refusion_jax.data.packing import usable
sources._MOST = 1 << 25
pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + (256 << 20)
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
    ],
)
def test_a_file_that_would_fill_the_memory_is_one_line_within_256_mib(name, said, tmp_path):
    path = tmp_path / name
    if name == "a.txt":
        path.write_bytes(b" " * (300 << 20))
    else:
        with path.open("wb") as file:
            file.truncate(4 << 30)  # without a newline, and without a block on the disk
    ended = python("-c", CAPPED, path)
    assert (len(ended.stdout.splitlines()), ended.stderr, ended.returncode) == (1, "", 0), ended.stderr[-500:]
    assert re.search(said, ended.stdout)


def test_what_follows_a_line_that_is_too_long_is_read_under_its_own_number(tmp_path):
    good = b'{"text": "one"}\n'
    (tmp_path / "a.jsonl").write_bytes(good + b" " * (40 << 20) + b"\n" + good)
    for size in (1 << 20, 1 << 30):
        found = [e for part in splits_of(str(tmp_path / "a.jsonl"), size) for e in read(part, Fields())]
        assert [str(e.where).rsplit(":", 1)[1] for e in found] == ["1", "2", "3"]
        assert [type(e) for e in found] == [Example, Bad, Example]


@pytest.mark.parametrize("size", [7, 64, 1000, 10**6])
def test_a_text_is_cut_between_characters_only(size, tmp_path):
    text = "grüße ☃\n" * 20 + "☃" * 30000 + "\n" + "x" * 500
    (tmp_path / "a.txt").write_text(text)
    parts = [e for part in splits_of(str(tmp_path / "a.txt"), size * 50) for e in read(part, Fields())]
    assert all(isinstance(e, Example) for e in parts)
    assert "".join(e.response for e in parts) == text
    assert [e.starts for e in parts] == [True] + [False] * (len(parts) - 1)
    assert [e.ends for e in parts] == [False] * (len(parts) - 1) + [True]


def zstd(content):
    return pyarrow.compress(content, "zstd", asbytes=True)


def read_whole(path):
    (part,) = splits_of(str(path), 100)
    return list(read(part, Fields()))


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".zst", zstd)])
def test_compressed_lines_are_read_as_others_are_and_what_is_damaged_is_told(suffix, compress, tmp_path):
    lines = [json.dumps({"text": f"text {i} " * 50}) + "\n" for i in range(3000)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    plain = list(read(splits_of(str(tmp_path / "a.jsonl"), 1 << 30)[0], Fields()))
    packed = compress("".join(lines).encode())
    for name, content in (("a.jsonl", packed), ("b.json", packed), ("c.jsonl", packed[: len(packed) * 9 // 10])):
        (tmp_path / f"{name}{suffix}").write_bytes(content)
    whole = read_whole(tmp_path / f"a.jsonl{suffix}")
    assert [example.response for example in whole] == [example.response for example in plain]
    assert str(whole[7].where) == f"{tmp_path}/a.jsonl{suffix}:8"
    assert len(read_whole(tmp_path / f"b.json{suffix}")) == 3000
    *kept, last = read_whole(tmp_path / f"c.jsonl{suffix}")
    assert isinstance(last, Bad)
    assert last.kind == "unreadable file"
    assert all(isinstance(example, Example) for example in kept)
    assert [example.response for example in kept] == [example.response for example in plain[: len(kept)]]


def test_what_a_file_expands_to_is_packed_in_parts(tmp_path, monkeypatch):
    write_pairs(tmp_path / "a.jsonl", 400)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    make(tmp_path / "a.jsonl", tmp_path / "plain", shard=1 << 30)
    make(tmp_path / "a.jsonl.gz", tmp_path / "whole")
    monkeypatch.setattr(shards, "_PACKED", 500)
    manifest = make(tmp_path / "a.jsonl.gz", tmp_path / "parts")
    rows = [{n: c for n, c in contents(tmp_path / name).items() if n.startswith("rows")} for name in ("plain", "whole")]
    assert rows[0] == rows[1]
    assert len(manifest.shards) == 1
    assert documents(tmp_path / "parts") == documents(tmp_path / "plain")


def test_prompts_that_a_file_expands_to_are_tokenized_in_parts(tmp_path, monkeypatch):
    """However short their answers are: neither texts nor ids of more than a bounded part are in memory."""
    line = json.dumps({"query": "one two " * 1000, "response": "three"})
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(f"{line}\n".encode() * 20))
    held, encoded = [], []
    tokenize, encode = shards.tokenize, SentencePieceTokenizer.encode_prompts

    def tokenize_recorded(examples, *how):
        held.append(sum(map(len, (text for example in examples for text in example.texts))))
        return tokenize(examples, *how)

    def encode_recorded(self, texts):
        encoded.append(sum(map(len, filter(None, texts))))
        return encode(self, texts)

    monkeypatch.setattr(packing, "BATCH", 10_000)
    monkeypatch.setattr(shards, "tokenize", tokenize_recorded)
    monkeypatch.setattr(SentencePieceTokenizer, "encode_prompts", encode_recorded)
    make(path, tmp_path / "rows", row_length=8192)
    assert max(held) <= 2 * len(line)
    encoded.clear()
    load = load_tokenizer_file(words_tokenizer(), "<mask>")
    assert len(list(packing.tokenize(read_whole(path), load, 8192))) == 20
    assert max(encoded) <= 2 * len(line)
    encoded.clear()  # 16 MiB of prompt would take a tokenizer 4 GiB, only to say that it fits in no row
    (bad, *_) = packing.tokenize(read_whole(path), load, 60)
    assert bad.reason == "8,005 characters do not fit in row_length=60"
    assert not any(encoded)


def record(kind, url, content, content_type):
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {url}\r\nContent-Type: {content_type}\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content + b"\r\n\r\n"


def test_texts_of_web_archives_are_read_with_their_urls(tmp_path):
    for package in ("fastwarc", "resiliparse"):
        pytest.importorskip(package, reason="web archives are not read: pip install -e '.[archives]'")
    page = "<html><body><nav><a href='/'>menu</a></nav><main><p>Grüße an <b>alle</b>.</p></main></body></html>".encode()
    http_head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n"
    texts = [record("conversion", f"https://a.org/{i}", f"text {i} ü".encode(), "text/plain") for i in range(3)]
    pages = record("response", "https://b.org/", http_head + page, "application/http; msgtype=response")
    (tmp_path / "a.warc.wet.gz").write_bytes(b"".join(map(gzip.compress, texts)))
    (tmp_path / "b.warc.gz").write_bytes(gzip.compress(texts[0][:0] + record("metadata", "x", b"a: b", "x/y") + pages))
    (tmp_path / "c.wet").write_bytes(texts[0] + texts[1][:-9])
    found = read_whole(tmp_path / "a.warc.wet.gz")
    assert [(e.response, e.url) for e in found] == [(f"text {i} ü", f"https://a.org/{i}") for i in range(3)]
    assert re.fullmatch(rf"{tmp_path}/a.warc.wet.gz: record at byte [1-9]\d+", found[1].where)
    (only,) = read_whole(tmp_path / "b.warc.gz")
    assert (only.response.strip(), only.url) == ("Grüße an alle.", "https://b.org/")
    good, bad = read_whole(tmp_path / "c.wet")
    assert (good.response, bad.kind) == ("text 0 ü", "unreadable file")
    (tmp_path / "d.wet").write_bytes(texts[0].replace(b"\r\n", b"\n"))
    (none,) = read_whole(tmp_path / "d.wet")
    assert none.reason == "a record of no WARC-Type that is known"


FILES = {"README.md": b"# about", "data/a.jsonl": b'{"text": "one two"}\n' * 3, "b.jsonl": b'{"text": "three"}\n'}
COMMIT = "a" * 40


def hub(path, *_):
    """As much of the Hugging Face Hub as lists and reads the files of one data set."""
    path = urlsplit(path).path
    if path in ("/api/datasets/o/n/revision/v1", f"/api/datasets/o/n/revision/{COMMIT}"):
        return 200, json.dumps({"id": "o/n", "sha": COMMIT, "siblings": []}).encode()
    if found := re.fullmatch(rf"/api/datasets/o/n/tree/{COMMIT}(?:/(.*))?", path):
        inside = [name for name in FILES if name.startswith(found[1] or "")]
        deep = {name.split("/")[0] for name in inside if "/" in name and not found[1]}
        entries = [{"type": "directory", "path": name, "size": 0, "oid": "0" * 40} for name in deep]
        here = [name for name in inside if found[1] or "/" not in name]
        entries += [{"type": "file", "path": n, "size": len(FILES[n]), "oid": "0" * 40} for n in here]
        return 200, json.dumps(entries).encode()
    if found := re.fullmatch(rf"/datasets/o/n/resolve/{COMMIT}/(.*)", path):
        return 200, FILES[found[1]]
    return 404, b"{}"


def test_a_data_set_of_the_hub_is_read_at_the_commit_of_its_revision(tmp_path):
    line = ["-m", "refusion_jax.prepare", f"--tokenizer={words_tokenizer()}", "--workers=1"]
    with http_server(hub) as address:  # no fork: huggingface_hub reads both variables as it is imported
        hosted = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"}  # which other tests have set
        done = python(*line, "--input=hf://datasets/o/n@v1", f"--output={tmp_path}/out", **hosted)
        other = python(*line, "--input=hf://datasets/o/other", f"--output={tmp_path}/none", **hosted)
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 documents" in done.stdout
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert f"--input=hf://datasets/o/n@{COMMIT} " in manifest["command"]
    assert list(manifest["sources"]) == [f"hf://datasets/o/n@{COMMIT}"]
    assert other.returncode == 2
    assert other.stderr.startswith("error: --input=hf://datasets/o/other: ")
    for name, why in (("datasets/gsm8k", ""), ("datasets/o/", ""), ("datasets/@v1", ""), ("o/n", "is not a data set")):
        with pytest.raises(UserError, match=f"--input=hf://{name}: {why}"):
            pinned(f"hf://{name}")
    data = config_with(**{"data.path": "hf://o/n"}).data  # a model's
    with pytest.raises(UserError, match="--config.data.path=hf://o/n: is not a data set"):
        next(read_examples(data, seed=0))

"""Malformed input files of every kind we could think of, at random but the same each time."""

import gzip
import io
import json
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet

GOOD = json.dumps({"query": "one two", "response": "three four"}).encode()
VALUES = [None, 1, 1.5, True, [], {}, "", "x", "three", ["three"], "\ud800", "\x00", "\u2028", 10**400, "ü" * 50]


def write_files(directory: Path, count: int, seed: int = 0) -> None:
    """Writes `count` files, of which most have something wrong with them."""
    rng = random.Random(seed)
    makers = [*(_jsonl,) * 4, _list, _table, _text, _compressed]
    for index in range(count):
        suffix, content = rng.choice(makers)(rng)
        path = directory / f"{index % 50:02}" / f"{index:05}{suffix}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(damaged(rng, content) if rng.random() < 0.6 else content)


def _item(rng) -> object:
    names = ["query", "response", "text", "prompt", "answer", "messages", "foo", "", "tools", "history", "system"]
    names += ["instruction", "input", "output"]
    if rng.random() < 0.1:
        return rng.choice(VALUES)
    item = {rng.choice(names): rng.choice(VALUES) for _ in range(rng.randrange(4))}
    if rng.random() < 0.1:
        roles = ["user", "assistant", "system", None, 3]
        turn = {"role": rng.choice(roles), "content": rng.choice(VALUES)}
        turn[rng.choice(["weight", "tool_calls", "from", "value", "name"])] = rng.choice(VALUES)
        item["messages"] = rng.choice([[turn], [turn, turn], turn, [turn, {"role": "assistant", "content": "x"}]])
    return item


def _line(rng) -> bytes:
    kind = rng.randrange(8)
    if kind < 3:
        return GOOD
    if kind == 3:
        return json.dumps(_item(rng), ensure_ascii=rng.random() < 0.9).encode("utf-8", "surrogatepass")
    if kind == 4:
        return rng.randbytes(rng.randrange(60))
    if kind == 5:
        return rng.choice([b"[" * 3000, b'{"a":' * 3000, b"NaN", b"1" * 5000, b'"', b"{}", b"\xef\xbb\xbf", b"\x00"])
    if kind == 6:
        return json.dumps({"text": "one two " * rng.randrange(2000)}).encode()
    return GOOD[: rng.randrange(len(GOOD))]


def _jsonl(rng) -> tuple[str, bytes]:
    lines = rng.choice([b"\n", b"\r\n", b"\n\n", b"\r"]).join(_line(rng) for _ in range(rng.randrange(6)))
    return ".jsonl", rng.choice([b"", b"\xef\xbb\xbf", b"\xff\xfe"]) + lines


def _compressed(rng) -> tuple[str, bytes]:
    suffix, content = _jsonl(rng)
    return f"{suffix}.gz", gzip.compress(content, mtime=0) * rng.randrange(1, 3)


def _list(rng) -> tuple[str, bytes]:
    items = [_item(rng) for _ in range(rng.randrange(4))]
    return ".json", json.dumps(items if rng.random() < 0.7 else _item(rng)).encode()


def _table(rng) -> tuple[str, bytes]:
    columns = {
        "text": ["three", None, ""],
        "query": [b"one", b"\xff", None],
        "response": ["four"] * 3,
        "answer": [1, 2, None],
        "system": pyarrow.array(["one", "two", None]).dictionary_encode(),
        "tools": [["one"], [], None],
        "messages": [[{"role": "user", "content": "x"}, {"role": "assistant", "content": "three"}], [], None],
    }
    names = rng.sample(sorted(columns), rng.randrange(len(columns)))
    pyarrow.parquet.write_table(pyarrow.table({name: columns[name] for name in names}), file := io.BytesIO())
    return ".parquet", file.getvalue()


def _text(rng) -> tuple[str, bytes]:
    content = b"".join(
        rng.choice([b"one two\n", "gr\u00fc\u00dfe ".encode(), b"\r\n"]) for _ in range(rng.randrange(9))
    )
    return rng.choice([".txt", ".md", ".gz", "", ".py"]), content


def damaged(rng, content: bytes) -> bytes:
    """The content cut, with bytes put in or changed, gone, or several times."""
    kind = rng.randrange(5)
    at = rng.randrange(len(content) + 1)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + rng.randbytes(rng.randrange(1, 9)) + content[at:]
    if kind == 2:
        return content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]
    if kind == 3:
        return b""
    return content * rng.randrange(1, 3)

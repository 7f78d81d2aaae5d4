"""JSON from strangers: what is refused, in which words, and what is legal although it looks odd."""

import dataclasses
import json
import os

import pytest

from refusion_jax import UserError
from refusion_jax.distributed.json_input import JsonError, build, parse_json, parse_text, read_lines, read_object

REFUSED = {
    b'{"a": 1, "a": 2}': "the key 'a' stands there twice",
    b"[" * 65 + b"]" * 65: "more than 64 levels deep",
    b"[" * 100_000: "more than 64 levels deep",
    b'{"a": ' * 100_000: "more than 64 levels deep",
    b"9" * 5000: "a number of thousands of digits",
    b'"\xff"': "not UTF-8: byte 1",
    b"\xff\xfe{\0}\0": "not UTF-8: byte 0",
    b'"\xed\xa0\x80"': "not UTF-8",
    b'{"a": 1': "not JSON: Expecting",
    b"\0": "not JSON: Expecting",
    b'"a\nb"': "not JSON: Invalid control character",
}


@pytest.mark.parametrize("raw", REFUSED, ids=lambda raw: raw[:12].hex())
def test_what_json_allows_and_we_do_not_is_refused_by_its_reason(raw):
    with pytest.raises(JsonError, match=REFUSED[raw]):
        parse_json(raw)


def test_odd_but_legal_json_is_read_as_it_is():
    assert parse_json(b'\xef\xbb\xbf{"a": "[[[["}\r\n') == {"a": "[" * 4}
    assert parse_json(b"[" * 64 + b"]" * 64)
    assert parse_text('"\\ud83d\\ude00 \u2028 \u2029 \x85"'.encode()) == "\U0001f600 \u2028 \u2029 \x85"
    assert parse_json(b'"\\ud800"') == "\ud800"  # of a key that nobody reads
    with pytest.raises(JsonError, match="half of a surrogate pair"):
        parse_text(b'{"id": ["\\ud800"]}')


def test_lines_end_at_a_newline_only(tmp_path):
    lines = ["\ufeff", json.dumps("a\u2028b\u2029c\x85d\x1ce", ensure_ascii=False), " ", '"x"\r', '"last"']
    (tmp_path / "in").write_bytes("\n".join(lines).encode())
    assert [(n, parse_json(raw)) for n, raw in read_lines(tmp_path / "in")] == [
        *((2, "a\u2028b\u2029c\x85d\x1ce"), (4, "x"), (5, "last"))
    ]


@dataclasses.dataclass(frozen=True)
class Inner:
    name: str
    size: int = 1


@dataclasses.dataclass(frozen=True)
class Outer:
    share: float
    flag: bool
    counts: dict[str, int]
    parts: tuple[Inner, ...]


def test_a_dataclass_is_built_from_its_declared_types_or_the_field_is_named():
    good = {"share": 1, "flag": True, "counts": {"a": 2}, "parts": [{"name": "x"}]}
    assert build(Outer, good) == Outer(1.0, True, {"a": 2}, (Inner("x"),))
    for change, said in (
        ({"share": "1"}, "share must be a finite number"),
        ({"share": float("nan")}, "share must be a finite number"),
        ({"share": 10**400}, "share must be a finite number"),
        ({"share": True}, "share must be a finite number"),
        ({"flag": 1}, "flag must be true or false"),
        ({"counts": {"a": 1.5}}, "counts.a must be an integer"),
        ({"counts": {"a": 2**63}}, "counts.a must be an integer of at most 64 bits"),
        ({"counts": []}, "counts must be an object"),
        ({"parts": {}}, "parts must be a list"),
        ({"parts": ["x"]}, r"parts\[0\] must be an object, not a string"),
        ({"parts": [{}]}, "'name' is missing"),
        ({"parts": [{"name": "a\0b"}]}, "name must be a string"),
        ({"more": 1}, "'more' is no key that we know"),
    ):
        with pytest.raises(JsonError, match=said):
            build(Outer, good | change)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "x.json"
    os.mkfifo(tmp_path / "pipe")
    for content, said in ((b"[]", "must hold an object, not a list"), (b'{"a": "\\udc00"}', "surrogate"), (b"", "not")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"{path} cannot be read: .*{said}"):
            read_object(path)
    for other, said in (
        (tmp_path, "Is a directory"),
        (tmp_path / "pipe", "no file"),
        (tmp_path / ("x" * 300), "too long"),
    ):
        with pytest.raises(UserError, match=said):
            read_object(other)
    with pytest.raises(UserError, match="a directory"):
        list(read_lines(tmp_path))

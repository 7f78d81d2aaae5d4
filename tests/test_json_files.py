"""Files of JSON: what they hold, or one line that names the file, the line or field, and what is wrong."""

import dataclasses
import tracemalloc

import pytest

from refusion_jax import UserError
from refusion_jax.distributed.json_files import read_json, read_json_lines


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


GOOD = b'{"share": 1, "flag": true, "counts": {"a": 2}, "parts": [{"name": "x"}]}'


def test_a_file_is_read_as_the_declared_type(tmp_path):
    (tmp_path / "x.json").write_bytes(b"\xef\xbb\xbf" + GOOD)
    assert read_json(tmp_path / "x.json", Outer) == Outer(1.0, True, {"a": 2}, (Inner("x"),))
    assert read_json(tmp_path / "x.json")["counts"] == {"a": 2}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (GOOD.replace(b"1,", b'"1",'), "share: Input should be a valid number"),
        (GOOD.replace(b"true", b"1"), "flag: Input should be a valid boolean"),
        (GOOD.replace(b"2}", b"1.5}"), "counts.a: Input should be a valid integer"),
        (GOOD.replace(b'[{"name": "x"}]', b"{}"), "parts: Input should be a valid array"),
        (GOOD.replace(b'"name": "x"', b""), "parts.0.name: Field required"),
        (GOOD.replace(b'"name": "x"', b'"name": "x", "more": 1'), "parts.0.more: Unexpected keyword argument"),
        (b'{\n"share": 1\n"flag"', "Invalid JSON: expected `,` or `}` at line 3 column 1"),
        (b'{"share": "\xff"}', "Invalid JSON: .*unicode"),
        (b'{"share": "\\ud800"}', "Invalid JSON: .*hex escape"),
        (b"[" * 100_000, "Invalid JSON: recursion limit"),
        (b"9" * 5000, "Invalid JSON: number out of range"),
        (b"", "Invalid JSON: EOF"),
    ],
)
def test_what_is_not_of_the_type_is_one_line_that_names_file_and_field(tmp_path, content, said):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"^{path} cannot be read: {said}") as refused:
        read_json(path, Outer)
    assert "\n" not in str(refused.value)


def test_lines_end_at_a_newline_only_and_the_bad_one_is_named(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes('\ufeff\n{"a": "\u2028b\u2029c\x85d"}\n \n{"x": 1}\r\n{}'.encode())
    assert list(read_json_lines(path)) == [(2, {"a": "\u2028b\u2029c\x85d"}), (4, {"x": 1}), (5, {})]
    path.write_bytes(b'{"a": 1}\n\n{"a": 1')
    with pytest.raises(UserError, match=f"^{path}:3: Invalid JSON: EOF"):
        list(read_json_lines(path))


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(tmp_path):
    path = tmp_path / "x.jsonl"
    with path.open("wb") as file:
        file.write(b"{}\n")
        file.truncate(4 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=f"^{path}:2: a line of more than 16 MiB$"):
            list(read_json_lines(path))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path, said in (
        (tmp_path, "Is a directory"),
        (tmp_path / "none", "No such file"),
        (tmp_path / ("x" * 300), "too long"),
    ):
        with pytest.raises(UserError, match=f"^{path} cannot be read: .*{said}"):
            read_json(path)
    with pytest.raises(UserError, match=f"^{tmp_path} cannot be read: Is a directory"):
        list(read_json_lines(tmp_path))

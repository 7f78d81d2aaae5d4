import json

import pyarrow
import pyarrow.parquet
import pytest
from conftest import config_with

from refusion_jax import UserError
from refusion_jax.data.packing import usable
from refusion_jax.data.sources import read_examples


def read(path, **keys):
    data = config_with(**{f"data.{key}": value for key, value in keys.items()} | {"data.path": str(path)}).data
    return usable(read_examples(data, seed=0), data.on_error)


def pairs(path, **keys):
    return [(e.prompt, e.response) for e in read(path, **keys)]


def write(path, *lines):
    texts = (line if isinstance(line, str | bytes) else json.dumps(line) + "\n" for line in lines)
    path.write_bytes(b"".join(text.encode() if isinstance(text, str) else text for text in texts))
    return path


USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "r", "name": None}
PARTS = [{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"query": "2+2", "response": "4"}, ("2+2", "4")),
        ({"question": "2+2", "answer": "4", "id": 7}, ("2+2", "4")),
        ({"prompt": "2+2", "completion": "4"}, ("2+2", "4")),
        ({"text": "Grüße ☃"}, (None, "Grüße ☃")),
        ({"text": "both", "query": "q", "response": "r"}, ("q", "r")),
        ({"system": "s", "query": "q", "response": "r"}, ((("system", "s"), ("user", "q")), "r")),
        ({"system": "", "query": "q", "response": "r"}, ("q", "r")),
        ({"instruction": "add", "input": "2+2", "output": "4"}, ("add\n\n2+2", "4")),
        ({"instruction": "add", "input": "", "output": "4"}, ("add", "4")),
        ({"prompt": [{"role": "user", "content": "q"}], "completion": [ASSISTANT]}, ((("user", "q"),), "r")),
        ({"prompt": "q", "completion": [ASSISTANT]}, ((("user", "q"),), "r")),
        ({"messages": [{"role": "user", "content": PARTS}, ASSISTANT]}, ((("user", "two parts"),), "r")),
        ({"system": "s", "messages": [USER, ASSISTANT]}, ((("system", "s"), ("user", "q")), "r")),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]}, ((("user", "q"),), "r")),
        ({"query": None, "response": None, "tools": [], "messages": [USER, ASSISTANT]}, ((("user", "q"),), "r")),
        ({"messages": [{"role": None, "from": "human", "value": "q"}, ASSISTANT]}, ((("user", "q"),), "r")),
    ],
)
def test_json_lines_of_every_known_shape(tmp_path, line, expected):
    assert pairs(write(tmp_path / "a.jsonl", line, "\n", line)) == [expected] * 2


def test_each_answer_of_a_conversation_is_one_on_the_turns_before_it_if_asked_for(tmp_path):
    tool = {"role": "tool", "content": "t"}
    path = write(tmp_path / "a.jsonl", {"messages": [ASSISTANT, USER, ASSISTANT, tool, ASSISTANT]})
    a, u, t = ("assistant", "r"), ("user", "q"), ("tool", "t")
    assert pairs(path) == [((a, u, a, t), "r")]
    assert pairs(path, turns="all") == [((a, u), "r"), ((a, u, a, t), "r")]
    path = write(tmp_path / "b.jsonl", {"messages": [USER, ASSISTANT] * 501})  # megabytes of these fill 10 GB
    assert len(pairs(path)) == 1
    with pytest.raises(UserError, match="b.jsonl:1: has 1,002 turns; of at most 1,000 all answers are trained"):
        pairs(path, turns="all")


def test_other_field_names_by_flag(tmp_path):
    path = write(tmp_path / "a.jsonl", {"frage": "2+2", "antwort": "4", "query": "x", "response": "y"})
    assert pairs(path, query_field="frage", response_field="antwort") == [("2+2", "4")]
    path = write(tmp_path / "b.jsonl", {"body": "some text", "title": "t"})
    assert pairs(path, text_field="body") == [(None, "some text")]


def test_a_field_that_is_named_is_read_and_no_other_in_its_place(tmp_path):
    chat = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    whole = write(tmp_path / "a.jsonl", {"prompt": "p", "response": "r", "content": "c", "messages": chat})
    assert pairs(whole, text_field="content") == [(None, "c")]
    assert pairs(whole, query_field="content") == [("c", "r")]
    for said, fields in {
        "no --config.data.response_field=outptu; found": {"query_field": "prompt", "response_field": "outptu"},
        "no --config.data.query_field=instruction; found": {"query_field": "instruction"},
        "no --config.data.text_field=body; found": {"text_field": "body"},
    }.items():
        with pytest.raises(UserError, match=f"a.jsonl:1: {said}"):
            pairs(whole, **fields)
    both = write(tmp_path / "b.jsonl", {"q": "1", "response": "2"}, "\n", {"body": "3"})
    assert pairs(both, query_field="q", text_field="body") == [("1", "2"), (None, "3")]


def test_a_json_list_and_plain_text(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"query": "a", "response": "b"}, {"text": "c"}], indent=1))
    assert pairs(path) == [("a", "b"), (None, "c")]
    assert pairs(write(tmp_path / "a.txt", "\ufeffone\ntwo\n")) == [(None, "one\ntwo\n")]


def test_a_glob_reads_all_files_in_order_of_their_names(tmp_path):
    for name in "bca":
        write(tmp_path / f"{name}.jsonl", {"text": name})
    (tmp_path / "d.jsonl").mkdir()
    assert [r for _, r in pairs(tmp_path / "*.jsonl")] == ["a", "b", "c"]


def test_the_standard_library_is_a_corpus_of_source_code():
    examples = read("stdlib")
    assert len(examples) > 400
    assert all(e.prompt is None for e in examples)
    assert any("def dumps(" in e.response for e in examples)
    assert not any("/test/" in e.where or "site-packages" in e.where for e in examples)
    held_out = read("stdlib:held_out")
    assert 0.01 < len(held_out) / len(examples) < 0.05
    assert not {e.where for e in held_out} & {e.where for e in examples}


def test_built_in_problems_are_as_many_as_asked_for():
    assert len(read("tasks", examples=123)) == 123


GOOD = {"query": "q", "response": "r"}


@pytest.mark.parametrize(
    ("name", "lines", "said"),
    [
        ("a.jsonl", [GOOD, '{"query": "q"\n'], "a.jsonl:2: not JSON"),
        ("a.jsonl", [GOOD, "\n", "[1, 2]\n"], "a.jsonl:3: must be an object with text fields"),
        ("a.jsonl", [{"foo": 1, "bar": 2}], "a.jsonl:1: no field we know; found: foo, bar; name them with"),
        ("a.jsonl", [{"query": "q"}], "a.jsonl:1: no field we know; found: query"),
        ("a.jsonl", [{"a\x1b[2J\n": 1}], r"a.jsonl:1: no field we know; found: a\x1b[2J\n; name them with"),
        ("a.jsonl", [{"query": 1, "response": "r"}], "a.jsonl:1: prompt and answer must be text"),
        (
            "a.jsonl",
            [{"prompt": None, "response": "r"}],
            "a.jsonl:1: no field we know; found: prompt of null",
        ),
        ("a.jsonl", [{"instruction": "i", "input": 0, "output": "o"}], "a.jsonl:1: prompt and answer must be text"),
        ("a.jsonl", [{"prompt": [USER, ASSISTANT], "completion": []}], "a.jsonl:1: the answer is empty"),
        ("a.jsonl", [{"messages": [USER, ASSISTANT], "tools": [{}]}], "a.jsonl:1: tools would be left out; write what"),
        ("a.jsonl", [GOOD | {"history": [["a", "b"]]}], "a.jsonl:1: history would be left out; write what it says"),
        (
            "a.jsonl",
            [{"messages": [USER, ASSISTANT | {"weight": 0}]}],
            "a.jsonl:1: not a conversation: turn 1: weight",
        ),
        (
            "a.jsonl",
            [{"messages": [USER, ASSISTANT | {"tool_calls": [{}]}]}],
            "a.jsonl:1: not a conversation: turn 1: tool_calls would be left out; write it into the content",
        ),
        ("a.jsonl", [GOOD | {"system": 1}], "a.jsonl:1: prompt and answer must be text"),
        ("a.jsonl", [{"messages": [USER]}], "a.jsonl:1: the last of several turns must be the assistant's, not 'user'"),
        (
            "a.jsonl",
            [{"messages": [USER, {"role": "assistant"}]}],
            "a.jsonl:1: not a conversation: turn 1.content: Field",
        ),
        ("a.jsonl", [{"messages": "hello"}], "a.jsonl:1: not a conversation: "),
        ("a.jsonl", [{"text": ["r"]}], "a.jsonl:1: prompt and answer must be text"),
        ("a.jsonl", [{"query": "q", "response": ""}], "a.jsonl:1: the answer is empty"),
        ("a.jsonl", [""], "a.jsonl: the file is empty"),
        ("a.jsonl", ["\n\n"], "--config.data.path: {path} holds no example"),
        ("a.json", ["[]"], "--config.data.path: {path} holds no example"),
        ("a.json", [GOOD], "a.json: a .json file must hold a list of objects; one per line"),
        ("a.json", ["[" * 100_000], "a.json: not JSON"),
        ("a.json", ['[{"text": "x"}, 3]'], "a.json: item 2: must be an object with text fields"),
        ("a.txt", [b"caf\xe9"], "a.txt: not UTF-8: byte 3"),
        ("a.txt", ["plain text".encode("utf-16-le")], "a.txt: holds a byte of 0, as text in UTF-8 does not"),
    ],
)
def test_a_bad_file_is_one_line_that_names_file_and_line(tmp_path, name, lines, said):
    path = write(tmp_path / name, *lines)
    with pytest.raises(UserError) as error:
        read(path)
    assert said.replace("{path}", str(path)) in str(error.value)
    assert "\n" not in str(error.value)


def test_no_column_that_a_conversation_needs_is_passed_by(tmp_path):
    """Whatever the type in which it is stored."""
    chat = {"messages": [[USER, ASSISTANT]]}
    parts = pyarrow.table(chat | {"system": [[{"type": "text", "text": "s"}]]})
    pyarrow.parquet.write_table(parts, tmp_path / "a.parquet")
    assert pairs(tmp_path / "a.parquet") == [((("system", "s"), ("user", "q")), "r")]
    columns = {name: pyarrow.array([name]).dictionary_encode() for name in ("instruction", "input", "output")}
    pyarrow.parquet.write_table(pyarrow.table(columns | {"text": ["t"]}), tmp_path / "b.parquet")
    assert pairs(tmp_path / "b.parquet") == [("instruction\n\ninput", "output")]
    pyarrow.parquet.write_table(pyarrow.table(chat | {"tools": [[{"name": "f"}]]}), tmp_path / "c.parquet")
    with pytest.raises(UserError, match="c.parquet: row 1: tools would be left out"):
        read(tmp_path / "c.parquet")


def test_bad_lines_can_be_skipped_and_are_counted(tmp_path, caplog):
    path = write(tmp_path / "a.jsonl", GOOD, "nonsense\n", GOOD, {"foo": 1})
    assert len(read(path, on_error="skip")) == 2
    assert "left out 2 examples" in caplog.text
    assert "a.jsonl:2" in caplog.text


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(
        UserError, match=r"--config.data.path: .*nothing.jsonl does not exist \(built in: tasks, families, stdlib"
    ):
        read(tmp_path / "nothing.jsonl")
    with pytest.raises(UserError, match="is a directory; give a glob"):
        read(tmp_path)

"""What files hold becomes examples, and what is left out of them."""

import json
import random

import pyarrow
import pyarrow.parquet
import pytest
from conftest import config_with
from helpers import write_lines
from test_prepare import WORDS, contents, documents, make, words_tokenizer

from refusion_jax import UserError
from refusion_jax.data.examples import Fields
from refusion_jax.data.fast_tokenizer import load_tokenizer_file
from refusion_jax.data.filters import Filters, FilterSettings
from refusion_jax.data.manifest import file_checksum
from refusion_jax.data.packing import usable
from refusion_jax.data.preparation import plan_chunks
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


def test_a_field_that_is_named_is_read_and_no_other_in_its_place(tmp_path):
    chat = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    whole = write(tmp_path / "a.jsonl", {"prompt": "p", "response": "r", "content": "c", "messages": chat})
    assert pairs(whole, text_field="content") == [(None, "c")]
    assert pairs(whole, query_field="content") == [("c", "r")]
    assert pairs(whole, query_field="content", response_field="prompt") == [("c", "p")]
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
        ("a.jsonl", [{"query": 1, "response": "r"}], "a.jsonl:1: prompt and answer must be text"),
        ("a.jsonl", [{"prompt": None, "response": "r"}], "a.jsonl:1: no field we know; found: prompt of null"),
        ("a.jsonl", [{"instruction": "i", "input": 0, "output": "o"}], "a.jsonl:1: prompt and answer must be text"),
        ("a.jsonl", [{"prompt": [USER, ASSISTANT], "completion": []}], "a.jsonl:1: the answer is empty"),
        ("a.jsonl", [{"messages": [USER, ASSISTANT], "tools": [{}]}], "a.jsonl:1: tools would be left out; write what"),
        ("a.jsonl", [GOOD | {"context": "It rains."}], "a.jsonl:1: context would be left out; write what it says"),
        ("a.jsonl", [{"messages": [USER, ASSISTANT | {"weight": 0}]}], "a.jsonl:1: not a conversation: turn 1: weight"),
        ("a.jsonl", [{"messages": [USER, ASSISTANT | {"tool_calls": [1]}]}], "turn 1: tool_calls would be left out; "),
        ("a.jsonl", [GOOD | {"system": 1}], "a.jsonl:1: prompt and answer must be text"),
        ("a.jsonl", [{"messages": [USER]}], "a.jsonl:1: the last of several turns must be the assistant's, not 'user'"),
        ("a.jsonl", [{"messages": [USER, {"role": "assistant"}]}], "a.jsonl:1: not a conversation: turn 1.content: "),
        ("a.jsonl", [{"messages": "hello"}], "a.jsonl:1: not a conversation: "),
        ("a.jsonl", [{"text": ["r"]}], "a.jsonl:1: prompt and answer must be text"),
        ("a.jsonl", [{"query": "q", "response": ""}], "a.jsonl:1: the answer is empty"),
        ("a.jsonl", [""], "a.jsonl: the file is empty"),
        ("a.jsonl", ["\n\n"], "--config.data.path: {path} holds no example"),
        ("a.json", [GOOD], "a.json: a .json file must hold a list of objects; one per line"),
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
    with pytest.raises(UserError, match=f"--config.data.path: {tmp_path} holds no file$"):
        read(tmp_path)


def test_of_a_directory_all_files_below_it_are_read(tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "b.txt").write_text("b")
    write(tmp_path / "a.jsonl", GOOD)
    assert [example.response for example in read(tmp_path)] == [GOOD["response"], "b"]


VOCABULARY = [f"w{i}" for i in range(5000)]


def text_of(rng, words=150):
    return " ".join(rng.choices(VOCABULARY, k=words))


def listed(path):
    return ((str(path), file_checksum(path)),)


def dropped_lines(directory):
    return [json.loads(line) for line in (directory / "dropped.jsonl").read_text().splitlines()]


def test_near_duplicates_are_left_out_wherever_they_stand_and_nothing_else_is(tmp_path):
    rng = random.Random(0)
    texts = [text_of(rng) for _ in range(400)]
    # Of 146 5-grams 130 are shared, and 16 on each side are not: a Jaccard similarity of 0.80.
    copies = [" ".join([*text.upper().split()[:134], *rng.choices(VOCABULARY, k=16)]) for text in texts[:200]]
    write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    write_lines(tmp_path / "b.jsonl", [{"text": text} for text in [*copies, texts[300]]])
    keys = {"shard": 1 << 14, "row_length": 1 << 13, "dedup": True, "near_dedup": True}
    manifest = make(tmp_path / "*.jsonl", tmp_path / "out", **keys)
    assert manifest.dropped["duplicate"] == 1
    assert 190 <= manifest.dropped["near_duplicate"] <= 200
    dropped = dropped_lines(tmp_path / "out")
    assert all(line["where"].startswith(f"{tmp_path}/b.jsonl:") for line in dropped)
    assert len(dropped) >= 20
    assert manifest.documents + sum(manifest.dropped.values()) == manifest.input["examples"] == 601


def test_a_conversation_of_which_all_answers_are_trained_is_compared_and_held_out_as_a_whole(tmp_path):
    rng, roles = random.Random(0), ["user", "assistant"] * 3
    talks = [[text_of(rng, 120 if at == 0 else 4) for at in range(6)] for _ in range(20)]
    copy = [*talks[3][:5], "another answer"]
    lines = [[{"role": role, "content": text} for role, text in zip(roles, t, strict=True)] for t in [*talks, copy]]
    write_lines(tmp_path / "a.jsonl", [{"messages": turns} for turns in lines])
    keys = {"fields": Fields(flag="--", turns="all"), "row_length": 1 << 12, "near_dedup": True, "held_out": 0.3}
    manifest = make(tmp_path / "a.jsonl", tmp_path / "out", **keys)
    assert manifest.dropped == {"near_duplicate": 3}
    assert {line["where"][-3:] for line in dropped_lines(tmp_path / "out")} == {":21"}
    splits = [documents(tmp_path / "out" / split) for split in ("", "held_out")]
    assert sum(map(len, splits)) == 60
    trained, held_out = ({tuple(prompt[:100]) for prompt, _ in split} for split in splits)
    assert (len(trained) + len(held_out), trained & held_out) == (20, set())


def test_what_shares_thirteen_words_with_a_test_is_left_out(tmp_path):
    rng = random.Random(0)
    question = text_of(rng, 40).split()
    (tmp_path / "tests").mkdir()
    write_lines(tmp_path / "tests" / "t.jsonl", [{"a": {"b": ["short", " ".join(question)]}, "c": 1}])
    texts = [f"{text_of(rng, 20)} {'-'.join(question[5 : 5 + n]).upper()}, {text_of(rng, 20)}" for n in (12, 13)]
    pair = {"query": texts[1], "response": "one"}
    write_lines(tmp_path / "a.jsonl", [*({"text": text} for text in texts), pair])
    filters = FilterSettings(decontaminate=listed(tmp_path / "tests" / "t.jsonl"))
    manifest = make(tmp_path / "a.jsonl", tmp_path / "out", filters=filters, row_length=1 << 12)
    assert (manifest.documents, manifest.dropped) == (1, {"decontaminate": 2})
    assert [line["where"][-2:] for line in dropped_lines(tmp_path / "out")] == [":2", ":3"]
    write_lines(tmp_path / "short.jsonl", [{"a": " ".join(question[:12])}])
    with pytest.raises(UserError, match="short.jsonl has no 13 words in a row"):
        Filters(FilterSettings(decontaminate=listed(tmp_path / "short.jsonl")))


def test_texts_of_blocked_urls_are_left_out_but_not_their_duplicates(tmp_path):
    (tmp_path / "blocked.txt").write_text("\ufeffBad.org\n# a comment\n\nhttps://good.org/private/\n")
    urls = [
        "https://www.bad.org/x",
        "https://notbad.org/x",
        "https://good.org/private/1",
        "https://good.org/",
        None,
        "http://[x",
    ]
    lines = [{"text": "one two", "url": url} for url in urls[:2]] + [{"text": str(u), "url": u} for u in urls[2:]]
    write_lines(tmp_path / "a.jsonl", lines)
    filters = FilterSettings(blocked_urls=listed(tmp_path / "blocked.txt"))
    manifest = make(tmp_path / "a.jsonl", tmp_path / "out", filters=filters, dedup=True)
    assert (manifest.documents, manifest.dropped) == (4, {"blocked_url": 2})
    for line in ("*.bad.org", "bad.org/x", ".bad.org", "bad.org,1"):  # which would block nothing
        (tmp_path / "blocked.txt").write_text(f"good.org\n{line}\n")
        with pytest.raises(UserError, match=r"blocked.txt:2: '.*' must be a domain, which stands for all below it"):
            Filters(FilterSettings(blocked_urls=listed(tmp_path / "blocked.txt")))


def test_rules_of_datatrove_and_languages_leave_out_and_change_texts(tmp_path):
    for package in ("datatrove", "spacy", "py3langid"):
        pytest.importorskip(package, reason="the filters are not installed: pip install -e '.[filters]'")
    plain = "The people of the town went to the river and they saw that the water was high. "
    good = "".join(f"{plain}It was day {n} of the {n * n} days with rain, said {n + 3} of them.\n" for n in range(9))
    german = "Die Leute der Stadt gingen an den Fluss und sahen, dass das Wasser sehr hoch war. " * 3
    texts = [good + "Ask me@mine.org or 8.8.8.8 or 10.0.0.1 for the list of all that we know.", "one two", german]
    write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts] + [{"query": "one", "response": "x@y.org"}])
    settings = FilterSettings(("pii", "c4", "gopher_quality"), ("all",))
    make(tmp_path / "a.jsonl", tmp_path / "1", filters=settings, row_length=1 << 13)
    manifest = make(tmp_path / "a.jsonl", tmp_path / "2", filters=settings, row_length=1 << 13)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert sum(manifest.dropped.values()) == 2
    assert manifest.dropped["gopher_quality: short_doc"] >= 1
    assert manifest.languages["en"] >= 1
    tokenizer = load_tokenizer_file(words_tokenizer(), "<mask>")
    found = " ".join(tokenizer.decode(response) for _, response in documents(tmp_path / "1"))
    assert "email@example.com or 22.214.171.124 or 10.0.0.1" in found
    assert found.count("@") == 2
    with pytest.raises(UserError, match="--languages: 'english' unknown; known: all, af, am"):
        Filters(FilterSettings(languages=("en", "english")))


def test_a_shuffled_shard_is_of_parts_of_all_files_and_none_is_lost(tmp_path):
    for name in "abcd":
        write_lines(tmp_path / f"{name}.jsonl", [{"text": f"{name} {i} {' '.join(WORDS)}"} for i in range(200)])
    plan = plan_chunks([f"{tmp_path}/*.jsonl"], 1 << 14, shuffle=True)
    assert plan == plan_chunks([f"{tmp_path}/*.jsonl"], 1 << 14, shuffle=True)
    assert all(len({part.path for part in chunk}) == 4 for chunk in plan[:-1])
    for name in "abcd":
        parts = sorted((p.start, p.end) for chunk in plan for p in chunk if p.path.endswith(f"{name}.jsonl"))
        size = (tmp_path / f"{name}.jsonl").stat().st_size
        assert [start for start, _ in parts] + [size] == [0, *(end for _, end in parts)]


def test_filters_refuse_a_text_of_which_they_see_a_part(tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps({"x": " ".join(VOCABULARY[:20])}))
    (tmp_path / "a.txt").write_text("one two three\n" * 500)
    filters = FilterSettings(decontaminate=listed(tmp_path / "t.jsonl"))
    with pytest.raises(UserError, match=r"a.txt: filters see whole documents, and this one is longer than --shard_mib"):
        make(tmp_path / "a.txt", tmp_path / "out", filters=filters)


def test_buckets_of_lengths_hold_every_document_once_and_count_the_others(tmp_path):
    rng = random.Random(0)
    answers = [" ".join(rng.choices(WORDS, k=n)) for n in range(1, 50)]
    write_lines(tmp_path / "a.jsonl", [{"text": answer} for answer in answers])
    write_lines(tmp_path / "b.jsonl", [{"query": "one", "response": answer} for answer in answers])
    make(tmp_path / "*.jsonl", tmp_path / "all", row_length=256)
    whole, found = documents(tmp_path / "all"), []
    for least, most in (0, 16), (17, 32), (33, 0):
        out, bounds = tmp_path / f"{least}", {"min_tokens": least, "max_tokens": most, "row_length": most or 256}
        manifest = make(tmp_path / "*.jsonl", out, **bounds)
        bucket = documents(out)
        assert all(least <= len(prompt) + len(answer) <= (most or 256) for prompt, answer in bucket)
        assert manifest.dropped == {"length": len(whole) - len(bucket)}
        found += bucket
    assert sorted(found) == whole
    assert len(whole) == 98

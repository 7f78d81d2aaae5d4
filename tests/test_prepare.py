import collections
import dataclasses
import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, run, start
from etils import epath
from fuzz_inputs import write_files
from helpers import python, wait_until, write_lines, write_tokenizer

from refusion_jax import UserError
from refusion_jax.data import duplicates
from refusion_jax.data.examples import Fields
from refusion_jax.data.fast_tokenizer import load_tokenizer_file
from refusion_jax.data.manifest import read_manifest
from refusion_jax.data.preparation import Preparation, plan_chunks
from refusion_jax.data.prepared import PreparedRows
from refusion_jax.data.runners import Processes
from refusion_jax.data.shards import PrepareSettings, Worker
from refusion_jax.data.tokenizer import MASK_PIECE, SentencePieceTokenizer

FUZZED = int(os.environ.get("REFUSION_FUZZ", 400))  # 10,000 take two minutes
REFUSING = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    "{{ m.content or raise_exception('an empty turn') }}{% endfor %}"
)
WORDS = "one two three four five six seven".split()


@functools.cache
def words_tokenizer() -> Path:
    """The file of a tokenizer of WORDS."""
    path = Path(os.environ["XDG_CACHE_HOME"], f"words-{os.getpid()}.model")  # which the tests remove at their end
    path.write_bytes(SentencePieceTokenizer.train([" ".join(WORDS)] * 20, 300).model)
    return path


def make(source, output, *, tokenizer=None, shard=1 << 10, processes=1, runner=None, row_length=64, **changes):
    """Prepares in this process, by default with the tokenizer of WORDS."""
    tokenizer = tokenizer or words_tokenizer()
    settings = PrepareSettings(str(tokenizer), MASK_PIECE, "unset", row_length, "stop", False, 0.0, Fields(flag="--"))
    settings = dataclasses.replace(settings, **changes)
    return Preparation(
        plan_chunks([str(source)], shard),
        epath.Path(output),
        settings,
        load_tokenizer_file(tokenizer, MASK_PIECE),
        command="",
        runner=runner or functools.partial(Processes, count=processes),
    ).run()


def write_pairs(path, count, seed=0):
    """Pairs of which every one is another."""
    rng = random.Random(seed)
    lines = [
        {
            "query": f"{i} " + " ".join(rng.choices(WORDS, k=3)),
            "response": " ".join(rng.choices(WORDS, k=rng.randrange(1, 9))),
        }
        for i in range(count)
    ]
    write_lines(path, lines)
    return [(line["query"], line["response"]) for line in lines]


def documents(path):
    """(prompt ids, response ids) of all documents of a prepared directory, sorted."""
    rows, found = PreparedRows(str(path)), []
    for index in range(len(rows)):
        row = rows[index]
        for segment in range(1, row["segment_ids"].max() + 1):
            inside, response = row["segment_ids"] == segment, row["is_response"]
            found.append((row["tokens"][inside & ~response].tolist(), row["tokens"][inside & response].tolist()))
    return sorted(found)


def expected(pairs):
    tokenizer = load_tokenizer_file(words_tokenizer(), MASK_PIECE)
    own = [tokenizer.encode(list(pair)) for pair in pairs]
    return sorted(([tokenizer.bos_id, *query], [*response, tokenizer.eos_id]) for query, response in own)


def contents(directory):
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_every_pair_is_in_the_rows_once_and_whole(tmp_path):
    pairs = write_pairs(tmp_path / "a.jsonl", 300)
    manifest = make(tmp_path / "a.jsonl", tmp_path / "out")
    assert len(manifest.shards) > 5
    found = documents(tmp_path / "out")
    assert found == expected(pairs)
    assert manifest.documents == manifest.segments == 300
    assert manifest.tokens == sum(len(p) + len(r) for p, r in found)
    assert manifest.fill == manifest.tokens / (manifest.rows * 64)
    assert manifest.dropped == {}


def test_texts_lose_no_token_however_they_are_cut(tmp_path):
    (tmp_path / "in").mkdir()
    text = "".join(f"{word} {i}\n" for i, word in enumerate(WORDS * 200))
    (tmp_path / "in" / "a.txt").write_text(text)
    (tmp_path / "in" / "b.md").write_text("one two")
    manifest = make(tmp_path / "in", tmp_path / "out", row_length=32)
    assert len(manifest.shards) > 5
    tokenizer, rows = load_tokenizer_file(words_tokenizer(), MASK_PIECE), PreparedRows(str(tmp_path / "out"))
    tokens = [t for i in range(len(rows)) for t in rows[i]["tokens"][rows[i]["segment_ids"] > 0].tolist()]
    count = collections.Counter(tokens)
    assert (count[tokenizer.bos_id], count[tokenizer.eos_id], manifest.documents) == (2, 2, 2)
    assert manifest.tokens == len(tokens)
    assert sorted(tokenizer.decode(tokens)) == sorted(text + "one two")


def test_the_number_of_processes_changes_no_byte(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    write_pairs(source / "a.jsonl", 200)
    (source / "b.jsonl").write_text((source / "a.jsonl").read_text()[:4000] + '\n{"broken\n')
    (source / "c.txt").write_text("one two three\n" * 500)
    keys = {"dedup": True, "held_out": 0.1, "on_error": "skip"}
    for processes in (1, 3):
        make(source, tmp_path / str(processes), processes=processes, **keys)
    one, three = contents(tmp_path / "1"), contents(tmp_path / "3")
    assert one == three
    assert {"manifest.json", "held_out/manifest.json", "dropped.jsonl", "tokenizer.model"} <= set(one)


@pytest.mark.parametrize("compared", [1000, 8])  # keys at a time
def test_duplicates_are_left_out_wherever_they_stand(compared, tmp_path, monkeypatch):
    monkeypatch.setattr(duplicates, "_PARTITION", compared)
    pairs = write_pairs(tmp_path / "a.jsonl", 100)
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "b.jsonl").write_text("".join(lines[::-1] + lines[:50]))
    kept = make(tmp_path / "*.jsonl", tmp_path / "all")
    manifest = make(tmp_path / "*.jsonl", tmp_path / "once", dedup=True)
    assert kept.documents == 250
    assert manifest.dropped == {"duplicate": 150}
    make(tmp_path / "a.jsonl", tmp_path / "first")  # it stands before b.jsonl, and is what is kept
    shards = [{n: c for n, c in contents(tmp_path / name).items() if "rows-" in n} for name in ("first", "once")]
    assert shards[0] == shards[1]
    assert documents(tmp_path / "once") == expected(pairs)


@pytest.mark.parametrize("turns", ["last", "all"])
def test_a_pair_and_a_conversation_of_the_same_texts_are_the_same_example(turns, tmp_path):
    pairs = write_pairs(tmp_path / "a.jsonl", 100)
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": r}] for q, r in pairs]
    write_lines(tmp_path / "b.jsonl", [{"messages": chat} for chat in chats])
    keys = {"held_out": 0.2, "fields": Fields(flag="--", turns=turns)}
    make(tmp_path / "*.jsonl", tmp_path / "twice", **keys)
    train, held = documents(tmp_path / "twice"), documents(tmp_path / "twice" / "held_out")
    assert sorted(train + held) == sorted(2 * expected(pairs))
    assert not [document for document in held if document in train]
    assert make(tmp_path / "*.jsonl", tmp_path / "once", dedup=True, **keys).dropped == {"duplicate": 100}


def test_what_is_held_out_of_texts_depends_neither_on_their_names_nor_on_their_cuts(tmp_path):
    tokenizer = load_tokenizer_file(words_tokenizer(), MASK_PIECE)
    texts = [" ".join(random.Random(i).choices(WORDS, k=3000)) for i in range(20)]
    held = []
    for directory, order, shard in (("a", texts, 1 << 12), ("b/c", texts[::-1], 1 << 20), ("d", texts, 5000)):
        source = tmp_path / directory
        source.mkdir(parents=True)
        for i, text in enumerate(order):
            (source / f"{i:02}.txt").write_bytes(("\ufeff" * (shard == 5000) + text).encode())
        make(source, source / "out", shard=shard, held_out=0.3, row_length=1 << 15)
        rows = PreparedRows(str(source / "out" / "held_out"))
        tokens = [t for i in range(len(rows)) for t in rows[i]["tokens"][rows[i]["segment_ids"] > 0].tolist()]
        assert tokens.count(tokenizer.bos_id) == tokens.count(tokenizer.eos_id)  # no text is torn apart
        held.append({text for text in texts if text[:99] in tokenizer.decode(tokens)})  # their parts are not in order
        assert sum(map(len, held[-1])) == len(tokenizer.decode(tokens))
    assert held[0] == held[1] == held[2]
    assert 2 <= len(held[0]) <= 12


def test_an_error_names_the_line_of_the_whole_file_and_leaves_nothing(tmp_path):
    write_pairs(tmp_path / "a.jsonl", 100)
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "bad.jsonl").write_text("".join([*lines, '{"query"\n', *lines]))
    with pytest.raises(UserError, match=r"bad.jsonl:101: not JSON.*--on_error=skip"):
        make(tmp_path / "bad.jsonl", tmp_path / "out", shard=1 << 20)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"bad.jsonl:101: not JSON"):  # in a later shard; those before are kept
        make(tmp_path / "bad.jsonl", tmp_path / "out")
    with pytest.raises(UserError, match="out is not finished: give `prepare` the same flags again"):
        PreparedRows(str(tmp_path / "out"))
    manifest = make(tmp_path / "bad.jsonl", tmp_path / "out", on_error="skip")
    assert (manifest.documents, manifest.dropped) == (200, {"not JSON": 1})
    (dropped,) = [json.loads(line) for line in (tmp_path / "out" / "dropped.jsonl").read_text().splitlines()]
    assert dropped["where"].endswith("bad.jsonl:101")


def test_what_a_chat_template_refuses_is_named_or_counted(tmp_path):
    own = {"tokenizer": write_tokenizer(tmp_path, chat_template=REFUSING)}
    turns = [["user"], ["system", "user"], ["user"]]
    lines = [{"messages": [{"role": role, "content": "is it"} for role in [*roles, "assistant"]]} for roles in turns]
    write_lines(tmp_path / "a.jsonl", lines)
    with pytest.raises(UserError, match=r"a.jsonl:2: .*the chat template fails: no system turns"):
        make(tmp_path / "a.jsonl", tmp_path / "out", **own)
    manifest = make(tmp_path / "a.jsonl", tmp_path / "out", **own, on_error="skip")
    assert (manifest.documents, manifest.dropped) == (2, {"refused by the tokenizer": 1})
    write_lines(tmp_path / "b.jsonl", [lines[0], {"query": "is it " * 10_000, "response": "it is"}])
    manifest = make(tmp_path / "b.jsonl", tmp_path / "long", **own, on_error="skip", max_tokens=60)
    assert (manifest.documents, manifest.dropped) == (1, {"length": 1})  # it is not asked of what fits in no row


def test_turns_that_a_chat_template_leaves_out_are_counted(tmp_path):
    users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    lines = [{"system": "be brief", "query": "is it", "response": "it is"}] * 3
    write_lines(tmp_path / "a.jsonl", [*lines, {"query": "one", "response": "two"}])
    tokenizer = write_tokenizer(tmp_path, chat_template=users)
    manifest = make(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=tokenizer)
    assert (manifest.documents, manifest.left_out) == (4, {"system": 3})


def test_a_file_that_two_patterns_match_is_read_once(tmp_path):
    write_pairs(tmp_path / "a.jsonl", 5)
    name, pattern = f"{tmp_path}/a.jsonl", f"{tmp_path}/*.jsonl"
    one, both = (plan_chunks(patterns, 1 << 20) for patterns in ([pattern], [pattern, name]))
    assert one == both


def test_another_input_or_another_flag_is_no_continuation(tmp_path, caplog):
    write_pairs(tmp_path / "a.jsonl", 30)
    manifest = make(tmp_path / "a.jsonl", tmp_path / "out")
    assert make(tmp_path / "a.jsonl", tmp_path / "out") == manifest
    os.utime(tmp_path / "a.jsonl", (0, 0))
    with caplog.at_level("WARNING"):
        assert make(tmp_path / "a.jsonl", tmp_path / "out") == manifest
    assert "out is finished, and was not made again: files of the input were modified since" in caplog.text
    with pytest.raises(UserError, match=r"holds other rows \(other input or flags\)"):
        make(tmp_path / "a.jsonl", tmp_path / "out", row_length=32)


@pytest.mark.thorough
def test_a_killed_process_goes_on_where_it_was_and_its_workers_die(tmp_path):
    for index in range(4):
        (tmp_path / f"{index}.txt").write_text(" ".join(random.Random(index).choices(WORDS, k=500_000)))
    flags = [f"--input={tmp_path}/*.txt", f"--tokenizer={words_tokenizer()}", "--shard_mib=1", "--row_length=512"]
    flags += ["--held_out=0.3"]
    run("prepare", *flags, f"--output={tmp_path}/straight", "--workers=1")
    process = start("prepare", *flags, f"--output={tmp_path}/killed", "--workers=2")
    progress = tmp_path / "killed" / ".progress"
    wait_until(lambda: len(list(progress.glob("done-*.json"))) >= 3, process)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(psutil.wait_procs(workers, timeout=300)[1]) == 0
    process.communicate()
    assert not (tmp_path / "killed" / "manifest.json").exists()
    with pytest.raises(UserError, match="is not finished"):
        PreparedRows(str(tmp_path / "killed"))
    done = {path.stem[-5:] for path in progress.glob("done-*.json")}
    shards = [p for p in (tmp_path / "killed").rglob("rows-*") if p.stem[-5:] in done]
    before = {path: path.stat().st_mtime_ns for path in shards}
    assert len(before) >= 3
    run("prepare", *flags, f"--output={tmp_path}/killed", "--workers=2")
    assert {path: path.stat().st_mtime_ns for path in shards} == before
    assert contents(tmp_path / "killed") == contents(tmp_path / "straight")


@pytest.mark.parametrize(
    ("number", "ends"),
    [
        (signal.SIGINT, (130, "error: interrupted; the same command resumes from here\n")),
        (signal.SIGTERM, (143, "")),
    ],
)
def test_an_interrupted_one_tells_how_to_go_on(number, ends, tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(random.Random(0).choices(WORDS, k=3_000_000)))
    flags = [f"--input={tmp_path}/a.txt", f"--tokenizer={words_tokenizer()}", "--shard_mib=1", "--workers=2"]
    process = start("prepare", *flags, f"--output={tmp_path}/out")
    children = functools.partial(psutil.Process(process.pid).children, recursive=True)
    wait_until(lambda: len(children()) >= 3, process)  # two workers, which import still, and Python's own
    for child in children():  # as Ctrl-C on a terminal, which they leave to their parent
        child.send_signal(signal.SIGINT)
    wait_until(lambda: list((tmp_path / "out" / ".progress").glob("done-*.json")), process)
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == ends


def test_workers_that_die_are_told_in_one_line_in_every_pass(tmp_path):
    settings = PrepareSettings("none", MASK_PIECE, "unset", 64, "stop", False, 0.0, Fields(flag="--"))
    with Processes(settings, epath.Path(tmp_path), count=2) as runs:  # which cannot load that tokenizer
        for _ in range(2):
            with pytest.raises(UserError, match="a worker process died"):
                list(runs.run(Worker.write_keys, {0: [], 1: []}))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_told_in_one_line(workers, tmp_path, full_disk):
    (tmp_path / "a.txt").write_text(" ".join(random.Random(0).choices(WORDS, k=300_000)))
    flags = [f"--input={tmp_path}/a.txt", f"--tokenizer={words_tokenizer()}", "--shard_mib=1", f"--workers={workers}"]
    full_disk(1 << 13)
    process = start("prepare", *flags, f"--output={tmp_path}/out")
    full_disk(-1)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert re.fullmatch(r"error: File too large: .*\n", err)


def test_two_at_a_time_do_not_write_to_one_directory(tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(random.Random(0).choices(WORDS, k=3_000_000)))
    flags = [f"--input={tmp_path}/a.txt", f"--tokenizer={words_tokenizer()}", f"--output={tmp_path}/out", "--workers=1"]
    first = start("prepare", *flags)
    wait_until((tmp_path / "out" / ".progress" / "plan.json").exists, first)
    _, err = run("prepare", *flags, code=2)
    assert "another `prepare` is writing to it" in err
    first.communicate()
    assert first.returncode == 0


def test_fuzzed_files_are_counted_and_named_and_never_raise(tmp_path):
    (tmp_path / "in").mkdir()
    write_files(tmp_path / "in", FUZZED)
    manifest = make(tmp_path / "in", tmp_path / "out", shard=1 << 14, on_error="skip", dedup=True)
    dropped = [json.loads(line) for line in (tmp_path / "out" / "dropped.jsonl").read_text().splitlines()]
    assert len(dropped) > FUZZED / 2
    assert all(item["where"].startswith(f"{tmp_path}/in/") and "\n" not in item["reason"] for item in dropped)
    whole = ("empty file", "unreadable file")
    lines = [item["where"] for item in dropped if ".jsonl" in item["where"] and item["kind"] not in whole]
    assert all(int(where.rsplit(":", 1)[1]) > 0 for where in lines)
    counted = collections.Counter(item["kind"] for item in dropped if item["kind"] != "duplicate")  # samples
    assert {kind: n for kind, n in manifest.dropped.items() if kind != "duplicate"} == dict(counted)
    assert len(counted) > 8
    assert manifest.documents + sum(manifest.dropped.values()) == manifest.input["examples"]
    assert len(documents(tmp_path / "out")) == manifest.segments


def test_workers_need_no_jax():
    """It would cost each of them 200 MB and two seconds."""
    script = "import sys, refusion_jax.prepare, refusion_jax.data.runners; sys.exit('jax' in sys.modules)"
    assert python("-c", script).returncode == 0


def test_the_rate_is_shown_however_long_a_shard_takes(tmp_path):
    """By a clock that goes on by a minute whenever the bar looks at it."""
    (tmp_path / "a.txt").write_text("one two three four\n" * 60_000)  # two shards
    clock = "import itertools, rich.console as c; times = itertools.count(0, 60); c.monotonic = lambda: next(times)"
    script = f"{clock}\nfrom refusion_jax import prepare\nprepare.command.run(prepare.main)"
    flags = ["--shard_mib=1", "--workers=1", f"--tokenizer={words_tokenizer()}", "--row_length=64"]
    terminal, end = os.openpty()
    line = [sys.executable, "-c", script, f"--input={tmp_path}/a.txt", f"--output={tmp_path}/out", *flags]
    subprocess.run(line, env=os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm"}, stdout=end, check=True)
    os.set_blocking(terminal, False)
    shown = os.read(terminal, 1 << 20).decode()
    os.close(end)
    os.close(terminal)
    assert re.search(r"1.1/1.1 MiB\S* \S*m[0-9.]+ \w+/s", shown)


def test_a_manifest_that_is_not_ours_is_one_line(tmp_path):
    for content in ("", "[]", "{}", '{"format": 1, "shards": []}', '{"shards": [{}]}'):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(UserError, match="manifest.json cannot be read"):
            read_manifest(str(tmp_path))

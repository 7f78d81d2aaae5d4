import json
import random

import pytest
from helpers import write_lines
from test_prepare import WORDS, contents, documents, make, tokenizer_file  # noqa: F401  a fixture

from refusion_jax import UserError
from refusion_jax.data.examples import Fields
from refusion_jax.data.filters import Filters, FilterSettings
from refusion_jax.data.manifest import file_checksum
from refusion_jax.data.preparation import plan_chunks

VOCABULARY = [f"w{i}" for i in range(5000)]


def text_of(rng, words=150):
    return " ".join(rng.choices(VOCABULARY, k=words))


def listed(path):
    return ((str(path), file_checksum(path)),)


def dropped_lines(directory):
    return [json.loads(line) for line in (directory / "dropped.jsonl").read_text().splitlines()]


def test_near_duplicates_are_left_out_wherever_they_stand_and_nothing_else_is(tmp_path, tokenizer_file):  # noqa: F811
    rng = random.Random(0)
    texts = [text_of(rng) for _ in range(400)]
    # Of 146 5-grams 130 are shared, and 16 on each side are not: a Jaccard similarity of 0.80.
    copies = [" ".join([*text.upper().split()[:134], *rng.choices(VOCABULARY, k=16)]) for text in texts[:200]]
    write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    write_lines(tmp_path / "b.jsonl", [{"text": text} for text in [*copies, texts[300]]])
    keys = {"shard": 1 << 14, "row_length": 1 << 13, "dedup": True, "near_dedup": True}
    manifest = make(tokenizer_file, tmp_path / "*.jsonl", tmp_path / "out", **keys)
    assert manifest.dropped["duplicate"] == 1
    assert 190 <= manifest.dropped["near_duplicate"] <= 200
    dropped = dropped_lines(tmp_path / "out")
    assert all(line["where"].startswith(f"{tmp_path}/b.jsonl:") for line in dropped)
    assert len(dropped) >= 20
    assert manifest.documents + sum(manifest.dropped.values()) == manifest.input["examples"] == 601


def test_a_conversation_of_which_all_answers_are_trained_is_compared_and_held_out_as_a_whole(tmp_path, tokenizer_file):  # noqa: F811
    rng, roles = random.Random(0), ["user", "assistant"] * 3
    talks = [[text_of(rng, 120 if at == 0 else 4) for at in range(6)] for _ in range(20)]
    copy = [*talks[3][:5], "another answer"]
    lines = [[{"role": role, "content": text} for role, text in zip(roles, t, strict=True)] for t in [*talks, copy]]
    write_lines(tmp_path / "a.jsonl", [{"messages": turns} for turns in lines])
    keys = {"fields": Fields(flag="--", turns="all"), "row_length": 1 << 12, "near_dedup": True, "held_out": 0.3}
    manifest = make(tokenizer_file, tmp_path / "a.jsonl", tmp_path / "out", **keys)
    assert manifest.dropped == {"near_duplicate": 3}
    assert {line["where"][-3:] for line in dropped_lines(tmp_path / "out")} == {":21"}
    splits = [documents(tmp_path / "out" / split) for split in ("", "held_out")]
    assert sum(map(len, splits)) == 60
    trained, held_out = ({tuple(prompt[:100]) for prompt, _ in split} for split in splits)
    assert (len(trained) + len(held_out), trained & held_out) == (20, set())


def test_what_shares_thirteen_words_with_a_test_is_left_out(tmp_path, tokenizer_file):  # noqa: F811
    rng = random.Random(0)
    question = text_of(rng, 40).split()
    (tmp_path / "tests").mkdir()
    write_lines(tmp_path / "tests" / "t.jsonl", [{"a": {"b": ["short", " ".join(question)]}, "c": 1}])
    texts = [f"{text_of(rng, 20)} {'-'.join(question[5 : 5 + n]).upper()}, {text_of(rng, 20)}" for n in (12, 13)]
    pair = {"query": texts[1], "response": "one"}
    write_lines(tmp_path / "a.jsonl", [*({"text": text} for text in texts), pair])
    filters = FilterSettings(decontaminate=listed(tmp_path / "tests" / "t.jsonl"))
    manifest = make(tokenizer_file, tmp_path / "a.jsonl", tmp_path / "out", filters=filters, row_length=1 << 12)
    assert (manifest.documents, manifest.dropped) == (1, {"decontaminate": 2})
    assert [line["where"][-2:] for line in dropped_lines(tmp_path / "out")] == [":2", ":3"]
    write_lines(tmp_path / "short.jsonl", [{"a": " ".join(question[:12])}])
    with pytest.raises(UserError, match="short.jsonl holds no 13 words in a row"):
        Filters(FilterSettings(decontaminate=listed(tmp_path / "short.jsonl")))


def test_texts_of_blocked_urls_are_left_out_but_not_their_duplicates(tmp_path, tokenizer_file):  # noqa: F811
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
    manifest = make(tokenizer_file, tmp_path / "a.jsonl", tmp_path / "out", filters=filters, dedup=True)
    assert (manifest.documents, manifest.dropped) == (4, {"blocked_url": 2})
    for line in ("*.bad.org", "bad.org/x", ".bad.org", "bad.org,1"):  # which would block nothing
        (tmp_path / "blocked.txt").write_text(f"good.org\n{line}\n")
        with pytest.raises(UserError, match=r"blocked.txt:2: '.*' must be a domain, which stands for all below it"):
            Filters(FilterSettings(blocked_urls=listed(tmp_path / "blocked.txt")))


def test_rules_of_datatrove_and_languages_leave_out_and_change_texts(tmp_path, tokenizer_file):  # noqa: F811
    for package in ("datatrove", "spacy", "py3langid"):
        pytest.importorskip(package, reason="the filters are not installed: pip install -e '.[filters]'")
    plain = "The people of the town went to the river and they saw that the water was high. "
    good = "".join(f"{plain}It was day {n} of the {n * n} days with rain, said {n + 3} of them.\n" for n in range(9))
    german = "Die Leute der Stadt gingen an den Fluss und sahen, dass das Wasser sehr hoch war. " * 3
    texts = [good + "Ask me@mine.org or 8.8.8.8 or 10.0.0.1 for the list of all that we know.", "one two", german]
    write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts] + [{"query": "one", "response": "x@y.org"}])
    settings = FilterSettings(("pii", "c4", "gopher_quality"), ("all",))
    make(tokenizer_file, tmp_path / "a.jsonl", tmp_path / "1", filters=settings, row_length=1 << 13)
    manifest = make(tokenizer_file, tmp_path / "a.jsonl", tmp_path / "2", filters=settings, row_length=1 << 13)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert sum(manifest.dropped.values()) == 2
    assert manifest.dropped["gopher_quality: short_doc"] >= 1
    assert manifest.languages["en"] >= 1
    from refusion_jax.data.fast_tokenizer import load_tokenizer_file

    tokenizer = load_tokenizer_file(tokenizer_file, "<mask>")
    found = " ".join(tokenizer.decode(response) for _, response in documents(tmp_path / "1"))
    assert "email@example.com or 22.214.171.124 or 10.0.0.1" in found
    assert found.count("@") == 2
    with pytest.raises(UserError, match="--languages: 'english' is none that is known; these are all, af, am"):
        Filters(FilterSettings(languages=("en", "english")))


def test_a_shuffled_shard_is_of_parts_of_all_files_and_none_is_lost(tmp_path, tokenizer_file):  # noqa: F811
    for name in "abcd":
        write_lines(tmp_path / f"{name}.jsonl", [{"text": f"{name} {i} {' '.join(WORDS)}"} for i in range(200)])
    plan = plan_chunks([f"{tmp_path}/*.jsonl"], 1 << 14, shuffle=True)
    assert plan == plan_chunks([f"{tmp_path}/*.jsonl"], 1 << 14, shuffle=True)
    assert all(len({part.path for part in chunk}) == 4 for chunk in plan[:-1])
    for name in "abcd":
        parts = sorted((p.start, p.end) for chunk in plan for p in chunk if p.path.endswith(f"{name}.jsonl"))
        size = (tmp_path / f"{name}.jsonl").stat().st_size
        assert [start for start, _ in parts] + [size] == [0, *(end for _, end in parts)]


def test_filters_refuse_a_text_of_which_they_see_a_part(tmp_path, tokenizer_file):  # noqa: F811
    (tmp_path / "t.jsonl").write_text(json.dumps({"x": " ".join(VOCABULARY[:20])}))
    (tmp_path / "a.txt").write_text("one two three\n" * 500)
    filters = FilterSettings(decontaminate=listed(tmp_path / "t.jsonl"))
    with pytest.raises(UserError, match=r"a.txt: filters see whole documents, and this one is longer than --shard_mib"):
        make(tokenizer_file, tmp_path / "a.txt", tmp_path / "out", filters=filters)


def test_buckets_of_lengths_hold_every_document_once_and_count_the_others(tmp_path, tokenizer_file):  # noqa: F811
    rng = random.Random(0)
    answers = [" ".join(rng.choices(WORDS, k=n)) for n in range(1, 50)]
    write_lines(tmp_path / "a.jsonl", [{"text": answer} for answer in answers])
    write_lines(tmp_path / "b.jsonl", [{"query": "one", "response": answer} for answer in answers])
    make(tokenizer_file, tmp_path / "*.jsonl", tmp_path / "all", row_length=256)
    whole, found = documents(tmp_path / "all"), []
    for least, most in (0, 16), (17, 32), (33, 0):
        out, bounds = tmp_path / f"{least}", {"min_tokens": least, "max_tokens": most, "row_length": most or 256}
        manifest = make(tokenizer_file, tmp_path / "*.jsonl", out, **bounds)
        bucket = documents(out)
        assert all(least <= len(prompt) + len(answer) <= (most or 256) for prompt, answer in bucket)
        assert manifest.dropped == {"length": len(whole) - len(bucket)}
        found += bucket
    assert sorted(found) == whole
    assert len(whole) == 98

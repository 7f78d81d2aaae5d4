import json
import os
import re
import shutil
import stat

import pytest
from conftest import TINY_RUN, run, start, tiny_config
from helpers import Letters, wait_until

from refusion_jax import DecodeSettings, UserError, decode, load_model, load_tokenizer
from refusion_jax.decoding.prompts import read_prompts, to_record
from refusion_jax.decoding.requests import Answer, prepare
from refusion_jax.decoding.stops import Stops

KEYS = ["id", "text", "tokens", "commit_order", "forwards", "rounds", "finish_reason"]


def test_prompts_in_answers_out_line_by_line(trained_run, tmp_path):
    tokenizer = load_tokenizer(trained_run)
    ids = tokenizer.encode_prompts(["Sort 7 3 9."])[0]
    lines = [{"prompt": "Sort 7 3 9."}, {"prompt_ids": ids, "id": "mine"}, {"prompt": "Quote ann fig bob.", "id": 9}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    output = tmp_path / "new" / "out.jsonl"
    flags = [f"--checkpoint={trained_run}", f"--input={tmp_path}/in.jsonl", f"--output={output}"]
    flags += ["--decode.max_new_tokens=16", "--decode.slot_size=4", "--decode.token_threshold=0.3"]
    run("generate", *flags)

    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [answer["id"] for answer in answers] == [0, "mine", 9]
    assert all(list(answer) == KEYS for answer in answers)
    first, second = ({key: a[key] for key in KEYS[1:]} for a in answers[:2])
    assert first == second
    prompts = [ids, ids, tokenizer.encode_prompts(["Quote ann fig bob."])[0]]
    out = decode(
        load_model(trained_run),
        prompts,
        DecodeSettings("refusion", max_new_tokens=16, slot_size=4, token_threshold=0.3),
    )
    for i, answer in enumerate(answers):
        assert answer["tokens"] == out.tokens[i]
        assert answer["commit_order"] == out.commit_order[i]
        assert answer["text"] == tokenizer.decode(out.tokens[i])


def test_a_stop_string_is_refused_where_there_is_no_text_to_look_in(trained_run, tmp_path):
    shutil.copytree(trained_run, tmp_path / "run", ignore=shutil.ignore_patterns("tokenizer.model"))
    (tmp_path / "in.jsonl").write_text('{"prompt_ids": [1, 7]}\n')
    _, err = run("generate", f"--checkpoint={tmp_path}/run", f"--input={tmp_path}/in.jsonl", "--stop=x", code=2)
    assert re.fullmatch("error: --stop=x: .* has no tokenizer, .*\n", err)


def kill_when_answered(process, journal):
    """Kills a call once its journal holds two answers."""
    wait_until(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 2, process)
    process.kill()
    process.communicate()


@pytest.fixture
def many(trained_run, tmp_path):
    """Flags that decode 200 prompts one after the other, every other the same."""
    lines = [{"prompt": f"Sort {i % 2} 3 9.", "id": f"n{i}"} for i in range(200)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [f"--checkpoint={trained_run}", f"--input={tmp_path}/in.jsonl", "--decode.max_new_tokens=8"]
    return [*flags, "--decode.batch_size=1"]


@pytest.mark.thorough
def test_a_killed_call_decodes_only_what_is_missing(many, tmp_path):
    output, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    output.write_text('{"id": "from before"}')
    kill_when_answered(start("generate", *many, f"--output={output}"), journal)
    assert output.read_text() == '{"id": "from before"}'
    content = journal.read_text().split("\n")
    kept = {entry["key"]: entry["record"] for entry in map(json.loads, content[1:-1])}
    assert 2 <= len(kept) < 200

    _, err = run("generate", *many, f"--output={output}", "--decode.temperature=0.5", code=2)
    assert re.search(r"out.jsonl.partial holds answers of another call \(differs in settings\)", err)
    with journal.open("a") as file:
        file.write('{"key": 199, "rec')  # torn by the kill
    out, _ = run("generate", *many, f"--output={output}")
    assert f"{journal}: {len(kept)} of 200 answers are there, going on" in out
    assert f"{output}: 200 answers, {200 - len(kept)} of them decoded now" in out
    answers = [json.loads(line) for line in output.read_text().split("\n")[:-1]]
    assert [answer["id"] for answer in answers] == [f"n{i}" for i in range(200)]
    assert all(answers[i] == record for i, record in kept.items())
    assert all(a | {"id": 0} == answers[i % 2] | {"id": 0} for i, a in enumerate(answers))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.thorough
def test_parts_that_processes_answer_make_the_file_of_one_and_a_killed_one_goes_on(many, tmp_path):
    flags, output = [*many, f"--output={tmp_path}/out.jsonl"], tmp_path / "out.jsonl"
    run("generate", *many, f"--output={tmp_path}/one.jsonl")
    kill_when_answered(start("generate", *flags, "--part=2/3"), tmp_path / "out.jsonl.partial-2-of-3")
    for part in (1, 3):
        out, _ = run("generate", *flags, f"--part={part}/3")
        assert "are left to other parts" in out
        assert not output.exists()
    _, err = run("generate", *flags, "--part=2/3", "--decode.temperature=0.5", code=2)
    assert re.search(r"partial-1-of-3 holds answers of another call \(differs in settings\)", err)
    out, _ = run("generate", *flags, "--part=2/3")
    assert re.search(r"partial-2-of-3: \d+ of 67 answers are there, going on", out)
    assert output.read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "one.jsonl", "out.jsonl"]
    for part, given in (("4/3", flags), ("0/3", flags), ("1", flags), ("1/2", many)):
        _, err = run("generate", *given, f"--part={part}", code=2)
        assert err.startswith(f"error: --part={part}: ")


def test_answers_of_all_parts_stay_where_their_file_cannot_be_written(trained_run, tmp_path, full_disk):
    lines = [{"prompt": f"Sort {i} 3 9."} for i in range(40)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = tmp_path / "out.jsonl"
    flags = [f"--checkpoint={trained_run}", f"--input={tmp_path}/in.jsonl", f"--output={output}"]
    flags += ["--decode.max_new_tokens=8"]
    run("generate", *flags, "--part=1/2")
    parts = [tmp_path / f"out.jsonl.partial-{i}-of-2" for i in (1, 2)]
    full_disk(3 * parts[0].stat().st_size // 2)  # room for each part, and not for both
    _, err = run("generate", *flags, "--part=2/2", code=1)
    assert err == f"error: {output}: File too large\n"
    assert all(len(part.read_text().splitlines()) == 21 for part in parts)
    full_disk(-1)
    out, _ = run("generate", *flags, "--part=2/2")
    assert f"{output}: 40 answers, 0 of them decoded now" in out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.thorough
def test_programs_that_cannot_be_kept_for_the_next_call_are_not_told_of(trained_run, tmp_path, full_disk, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    full_disk(1024)
    _, err = run("generate", f"--checkpoint={trained_run}", "--prompt=Sort 3 1.", "--decode.max_new_tokens=8")
    assert err == ""
    assert (tmp_path / "refusion_jax").is_dir()


def test_a_reader_that_has_enough_ends_it_quietly(many):
    process = start("generate", *many)
    assert json.loads(process.stdout.readline())["id"] == "n0"
    process.stdout.close()
    assert process.wait() == 141
    assert process.stderr.read() == ""
    process.stderr.close()


def test_devices_are_written_to_and_stay_devices(many):
    _, err = run("generate", *many, "--output=/dev/full", code=1)
    assert err == "error: the output: No space left on device\n"
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    assert not os.path.lexists("/dev/full.partial")


def test_a_terminal_shows_the_text_of_one_prompt(trained_run):
    terminal, end = os.openpty()
    flags = [f"--checkpoint={trained_run}", "--prompt=Sort 7 3.", "--decode.max_new_tokens=8"]
    process = start("generate", *flags, stdout=end)
    assert process.wait() == 0, process.stderr.read()
    process.stderr.close()
    os.close(end)
    said = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert '{"id": 0, "text": ' not in said
    assert "░" * 8 in said
    assert "░" not in said.rpartition("\x1b[2K")[2]  # what is left of it is the text


def test_compiled_programs_are_kept_in_a_directory_of_the_users_own(trained_run, tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")  # as users have it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = tmp_path / "refusion_jax" / "compiled"
    run("generate", f"--checkpoint={trained_run}", "--prompt=Sort 7 3.", "--decode.max_new_tokens=8")
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert list(cache.iterdir())


def test_prompts_are_named_by_file_and_line(trained_run, tmp_path):
    tokenizer, path = load_tokenizer(trained_run), tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert [r.name for _, r in read_prompts(path, tokenizer, DecodeSettings())] == [f"{path}:1", f"{path}:3"]
    for line in (
        *('{"prompt": 3}', '{"prompt_ids": [true]}', '{"prompt_ids": "1 2"}', "[]", "nonsense", '{"template": "a"}'),
        *('{"template": [1.5]}', '{"prompt": "a", "decode": {"slot_size": 4}}', '{"prompt": "a", "decode": 3}'),
        *('{"prompt": "a", "decode": {"temperature": -1}}', '{"prompt": "a", "decode": {"seed": "x"}}'),
        *('{"prompt": null}', '{"prompt": "a", "prompt_ids": [9]}', '{"prompt": "a", "prompt_ids": null}'),
        '{"prompt": "a", "id": "\\ud800"}',
        *('{"prompt_ids": [9999999999]}', '{"template": [99999999999]}', '{"prompt": "a", "decode": {"top_p": 1e999}}'),
    ):
        path.write_text('{"prompt": "a"}\n' + line)
        with pytest.raises(UserError, match="in.jsonl:2: "):
            read_prompts(path, tokenizer, DecodeSettings())


def test_lines_of_one_prompt_are_sampled_with_noise_of_their_own_unless_they_give_a_seed(tmp_path):
    lines = [{"prompt_ids": [9]}, *[{"prompt_ids": [9], "decode": {"temperature": 0.7}}] * 2]
    lines += [{"prompt_ids": [9], "decode": {"temperature": 0.7, "seed": 5}}] * 2
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    _, requests = zip(*read_prompts(tmp_path / "in.jsonl", None, DecodeSettings()), strict=True)
    noise = [request.noise for request in prepare(requests, DecodeSettings(), tiny_config())]
    assert noise == [0, 1, 2, 0, 0]


def test_templates_and_settings_of_a_line(trained_run, tmp_path):
    tokenizer = load_tokenizer(trained_run)
    lines = [
        {"prompt": "Sort 7 3.", "template": ["12", 8, ", 5", 4]},
        {"template": ["Sort 7 3.", 6]},
        {"prompt": "Sort 7 3.", "decode": {"max_new_tokens": 8, "temperature": 0.7, "seed": 5}},
        {"prompt": "Sort 7 3.", "decode": {"max_new_tokens": 8, "temperature": 0.7, "seed": 5}},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = ["--decode.slot_size=4", "--decode.max_new_tokens=16", "--decode.token_threshold=0.3"]
    out, _ = run("generate", f"--checkpoint={trained_run}", f"--input={tmp_path}/in.jsonl", *flags)
    answers = [json.loads(line) for line in out.splitlines()]
    given, after = tokenizer.encode(["12", ", 5"])
    first = answers[0]["tokens"]
    assert first[: len(given)] == given
    assert first[len(given) + 8 : len(given) + 8 + len(after)] == after
    assert answers[0]["text"].startswith("12")
    given = tokenizer.encode(["Sort 7 3."])[0]
    assert answers[1]["tokens"][: len(given)] == given  # a template needs no prompt
    assert len(answers[1]["commit_order"]) <= 6
    assert len(answers[2]["commit_order"]) <= 8
    assert answers[2] | {"id": 3} == answers[3]  # noise is that of the line's own seed, whatever its place


@pytest.mark.parametrize(
    ("stops", "text", "tokens", "reason"),
    [
        ([], "ABCDEF", 6, "length"),
        (["X"], "ABCDEF", 6, "length"),
        (["DE"], "ABC", 3, "stop"),
        (["E", "B"], "A", 1, "stop"),
        (["A"], "", 0, "stop"),
    ],
)
def test_answers_are_cut_where_a_stop_string_begins(stops, text, tokens, reason):
    answer = Answer(list(b"ABCDEF"), [0, 1, 2, 3, 4, 5], list(b"ABCDEF"), 3, 1, "length")
    record = to_record(7, answer, Letters(), Stops(tuple(stops)))
    assert (record["text"], record["tokens"], record["finish_reason"]) == (text, list(b"ABCDEF")[:tokens], reason)


@pytest.mark.thorough
def test_several_devices_answer_as_one(trained_run, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "Sort 7 3."}\n{"prompt": "Quote ann fig."}\n{"prompt": "Add 3."}')
    flags = [f"--checkpoint={trained_run}", f"--input={tmp_path}/in.jsonl", "--decode.max_new_tokens=8"]
    one, _ = run("generate", *flags)
    four, _ = run("generate", *flags, "--mesh.data=2", devices=4)
    assert one == four
    _, err = run("generate", *flags, "--mesh.tensor=3", devices=4, code=2)
    assert "--mesh.tensor=3: does not divide the model's" in err


@pytest.mark.thorough
def test_a_tokenizer_trained_by_our_command_serves_a_run(tmp_path):
    model, workdir = tmp_path / "new" / "t.model", tmp_path / "run"
    out, _ = run("train_tokenizer", "--input=tasks", f"--output={model}", "--vocab_size=400")
    assert f"{model}: " in out
    run("train", *TINY_RUN, f"--workdir={workdir}", f"--config.data.tokenizer={model}", "--config.steps=10")
    assert (workdir / "tokenizer.model").read_bytes() == model.read_bytes()
    assert load_tokenizer(workdir).size == load_model(workdir).config.num_tokens


def test_a_setting_that_stands_beside_a_prompt_is_told_to_have_no_effect(tmp_path, caplog):
    lines = ({"prompt_ids": [1]}, {"prompt_ids": [1], "temperature": 1, "id": 3}, {"prompt_ids": [1], "temperature": 2})
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    read_prompts(tmp_path / "in.jsonl", None, DecodeSettings())
    (said,) = caplog.messages
    assert said.startswith(
        f'{tmp_path}/in.jsonl:2: temperature has no effect there; a setting of a prompt is {{"decode"'
    )


def test_a_tokenizer_of_a_corpus_with_malformed_lines_says_how_to_leave_them_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "sort three words"}\n{"text"\n{"text": ""}\n')
    line = ["train_tokenizer", f"--input={tmp_path}/a.jsonl", f"--output={tmp_path}/t.model", "--vocab_size=300"]
    _, err = run(*line, code=2)
    assert re.search(r"a.jsonl:2: not JSON.* \(--on_error=skip leaves such examples out\)", err)
    out, err = run(*line, "--on_error=skip")
    assert ("from 1 examples" in out, "left out 2 examples; the first: " in err) == (True, True)

import json

import pytest
from conftest import TINY_RUN, run

from refusion_jax import DecodeSettings, UserError, decode, load_model, load_tokenizer
from refusion_jax.generate import read_prompts

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
    out = decode(load_model(trained_run), prompts, DecodeSettings("refusion", 16, 4, token_threshold=0.3))
    for i, answer in enumerate(answers):
        assert answer["tokens"] == out.tokens[i]
        assert answer["commit_order"] == out.commit_order[i]
        assert answer["text"] == tokenizer.decode(out.tokens[i])


def test_one_prompt_answers_on_the_terminal(trained_run):
    out, _ = run("generate", f"--checkpoint={trained_run}/checkpoints/40", "--prompt=Sort 7 3.", "--dtype=bfloat16")
    answer = json.loads(out)
    assert list(answer) == KEYS
    assert answer["id"] == 0


def test_an_older_step_can_be_loaded(trained_run):
    new, old = load_model(trained_run), load_model(trained_run / "checkpoints" / "40")
    assert (new.final_norm[...] != old.final_norm[...]).any()
    assert load_model(trained_run, dtype="bfloat16").final_norm[...].dtype == "bfloat16"


def test_prompts_are_named_by_file_and_line(trained_run, tmp_path):
    tokenizer, path = load_tokenizer(trained_run), tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert [p.where for p in read_prompts(path, tokenizer)] == [f"{path}:1", f"{path}:3"]
    for line in ('{"prompt": 3}', '{"prompt_ids": [true]}', '{"prompt_ids": "1 2"}', "[]", "nonsense"):
        path.write_text('{"prompt": "a"}\n' + line)
        with pytest.raises(UserError, match="in.jsonl:2: "):
            read_prompts(path, tokenizer)


def test_a_tokenizer_trained_by_our_command_serves_a_run(tmp_path):
    model, workdir = tmp_path / "new" / "t.model", tmp_path / "run"
    out, _ = run("train_tokenizer", "--input=tasks", f"--output={model}", "--vocab_size=400")
    assert f"{model}: " in out
    run("train", *TINY_RUN, f"--workdir={workdir}", f"--config.data.tokenizer={model}", "--config.steps=10")
    assert (workdir / "tokenizer.model").read_bytes() == model.read_bytes()
    assert load_tokenizer(workdir).size == load_model(workdir).config.num_tokens

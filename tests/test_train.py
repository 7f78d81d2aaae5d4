"""Training as users run it: real processes, killed and resumed, and tasks that are scored meanwhile."""

import json
import re
import shutil
import signal
import socket

import jax
import pytest
from conftest import SHARED, TINY_RUN, run, start
from helpers import computed, wait_for_steps, write_lines
from local_task import GENERATE, evaluate

from refusion_jax import UserError, load_model, load_tokenizer
from refusion_jax.checkpoints.run_directory import read_model_config, saved_steps
from refusion_jax.config import check
from refusion_jax.config.run_config import read_config
from refusion_jax.data.tokenizer import SentencePieceTokenizer
from refusion_jax.distributed.sharding import make_mesh
from refusion_jax.training.events import read_events
from refusion_jax.training.metrics import read_metrics
from refusion_jax.training.program import train_program
from refusion_jax.training.task_scores import TaskScores, scores_of

KEYS = set(
    "step loss loss_ar loss_mdm loss_preference grad_norm learning_rate tokens tokens_per_second mfu seconds epoch "
    "skipped".split()
)


def losses(workdir, first: int, last: int) -> float:
    found = [record["loss"] for record in read_metrics(workdir)][first:last]
    return sum(found) / len(found)


def test_a_run_leaves_what_it_promises(trained_run):
    records = read_metrics(trained_run)
    assert [record["step"] for record in records] == list(range(1, 61))
    assert all(set(record) == KEYS for record in records)
    assert all(record["mfu"] is None for record in records)  # nobody documents a CPU's peak
    assert saved_steps(trained_run) == [40, 50, 60]  # keep=3
    config = json.loads((trained_run / "config.json").read_text())
    assert config["model"]["hidden_size"] == 32
    assert list((trained_run / "tensorboard").glob("events*"))
    assert (trained_run / "tokenizer.model").exists()
    assert losses(trained_run, 50, 60) < losses(trained_run, 0, 10)


def test_a_profiler_port_that_is_in_use_is_told(tmp_path):
    with socket.create_server(("", 0)) as other:
        port = f"--profiler_port={other.getsockname()[1]}"
        out, _ = run("train", *TINY_RUN, "--config.steps=0", f"--workdir={tmp_path}", port, code=2)
    assert out == f"{port}: the port cannot be opened: Address already in use; this process trains without\n"


def test_saves_are_in_no_rate(trained_run):
    """What the intervals of the rates and the pauses between them come to is all the time; every step is logged."""
    records = read_metrics(trained_run)
    tokens = [0, *(record["tokens"] for record in records)]
    rated = sum((b - a) / r["tokens_per_second"] for a, b, r in zip(tokens[:-1], tokens[1:], records, strict=True))
    found = [e for e in read_events(trained_run) if e["event"] in ("compile", "save") and e.get("step") != 60]
    assert len(found) == 6
    assert rated + sum(event["seconds"] for event in found) <= records[-1]["seconds"] + 0.001


@pytest.mark.thorough
def test_looking_whether_the_weights_are_finite_is_in_no_rate_either(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import runpy, time\n"
        "from refusion_jax.training import recovery\n"
        "look, get_config = recovery._sizes, runpy.run_path('configs/quickstart.py')['get_config']\n"
        "recovery._sizes = lambda *state: [time.sleep(0.6), look(*state)][1]\n"
    )
    flags = ["--config.steps=6", "--config.checkpoint.every=3", f"--workdir={tmp_path / 'run'}"]
    run("train", f"--config={tmp_path / 'slow.py'}", *TINY_RUN[1:], *flags)
    assert [e["seconds"] > 0.6 for e in read_events(tmp_path / "run") if e["event"] == "save"] == [True, True]


def test_a_complete_run_says_so_and_changes_nothing(trained_run):
    before = {p: p.stat().st_mtime_ns for p in trained_run.rglob("*")}
    out, _ = run("train", *TINY_RUN, f"--workdir={trained_run}")
    assert f"training is complete: {trained_run} holds step 60 of 60" in out
    assert {p: p.stat().st_mtime_ns for p in trained_run.rglob("*")} == before


def test_a_run_can_be_resumed_on_more_devices_and_with_accumulation(trained_run, tmp_path):
    workdir = tmp_path / "copy"
    shutil.copytree(trained_run, workdir)
    shutil.rmtree(workdir / "checkpoints" / "60")
    write_lines(workdir / "samples.jsonl", [{"step": 50}, {"step": 55}])  # of tasks, which are scored no more
    flags = ["--config.mesh.data=2", "--config.mesh.fsdp=2", "--config.accumulation=2"]
    out, _ = run("train", *TINY_RUN, f"--workdir={workdir}", *flags, devices=4)
    assert "4 cpu (data=2, fsdp=2); step 50 of 60" in out
    assert (workdir / "samples.jsonl").read_text() == '{"step": 50}\n'  # the weights of step 55 are others now
    for straight, resumed in zip(computed(trained_run), computed(workdir), strict=True):
        assert resumed == pytest.approx(straight, rel=1e-4)  # float32 sums in another order, ten steps of Adam long


def test_data_of_ones_own_is_learnt_and_refused_once_it_has_changed(tmp_path):
    """By heart, and written in fewer forwards than tokens."""
    data, workdir = tmp_path / "a.jsonl", tmp_path / "run"
    line = json.dumps({"query": "Sort 3 1 2.", "response": "1 2 3"}) + "\n"
    data.write_text(line * 200)
    flags = [*TINY_RUN, f"--workdir={workdir}", f"--config.data.path={data}", "--config.model.vocab_size=300"]
    flags += ["--config.learning_rate=0.01"]
    run("train", *flags)
    out, _ = run("generate", f"--checkpoint={workdir}", "--prompt=Sort 3 1 2.", "--decode.max_new_tokens=16")
    answer = json.loads(out)
    assert (answer["text"], answer["finish_reason"]) == ("1 2 3", "eos")
    assert answer["forwards"] < len(answer["tokens"])
    data.write_text(line * 201)
    config = (workdir / "config.json").read_text()
    _, err = run("train", *flags, "--config.steps=70", code=2)
    assert re.search("no longer holds the rows this run was trained on.*--allow_change=data\n", err)
    assert (workdir / "config.json").read_text() == config


def test_what_may_change_on_resume_changes_and_is_logged(trained_run, tmp_path):
    workdir = tmp_path / "copy"
    shutil.copytree(trained_run, workdir)
    write_lines(tmp_path / "a.jsonl", [{"query": f"Sort {i} 1 2.", "response": f"1 2 {i}"} for i in range(3, 301)])
    changes = ["--config.steps=64", "--config.learning_rate=1e-5", f"--config.data.path={tmp_path}/a.jsonl"]
    _, err = run("train", *TINY_RUN, f"--workdir={workdir}", *changes, code=2)
    assert "(differs in data.path, learning_rate): give the flags" in err
    _, err = run("train", *TINY_RUN, f"--workdir={workdir}", *changes, "--allow_change=seed", code=2)
    assert "--allow_change=seed: cannot change in a run; these can: learning_rate, " in err
    allowed = "--allow_change=learning_rate,data"
    (tmp_path / "other.model").write_bytes(SentencePieceTokenizer.train(["Wozu? Darum! Warum nicht?"] * 9, 300).model)
    other = f"--config.data.tokenizer={tmp_path}/other.model"
    _, err = run("train", *TINY_RUN, f"--workdir={workdir}", *changes, other, allowed, code=2)
    assert f"--workdir={workdir}: its tokenizer is another one than that of the data (token " in err
    out, _ = run("train", *TINY_RUN, f"--workdir={workdir}", *changes, allowed)
    assert "changed: learning_rate: 0.002 -> 1e-05" in out
    assert read_metrics(workdir)[-1]["learning_rate"] < 1.1e-5 < read_metrics(workdir)[58]["learning_rate"]
    found = [e["what"] for e in read_events(workdir) if e["event"] == "changed"]
    assert [what.split(":")[0] for what in found] == ["data.path", "learning_rate"]


@pytest.mark.thorough
def test_the_baseline_trains_and_decodes_and_a_window_of_steps_is_profiled(tmp_path):
    run("train", *TINY_RUN, f"--workdir={tmp_path}", "--config.objective=ar", "--config.profile_steps=(3,4)")
    (trace,) = (tmp_path / "tensorboard" / "plugins" / "profile").glob("*/*.xplane.pb")
    assert trace.read_bytes().count(b"train_step") > 0
    records = read_metrics(tmp_path)
    assert all(record["loss"] == record["loss_ar"] and record["loss_mdm"] is None for record in records)
    assert losses(tmp_path, 50, 60) < losses(tmp_path, 0, 10)
    out, _ = run("generate", f"--checkpoint={tmp_path}", "--prompt=Sort 3 1 2.")
    answer = json.loads(out)
    assert answer["forwards"] == len(answer["tokens"]) > 0
    _, err = run("generate", f"--checkpoint={tmp_path}", "--prompt=Sort 3 1 2.", "--decode.method=refusion", code=2)
    assert "trained with objective=ar, which decodes with ar" in err


@pytest.mark.slow
@pytest.mark.parametrize(("file", "row_length"), [("gsm8k_train.jsonl", 256), ("refusion_sample.json", 1024)])
def test_real_data_trains_by_flags_alone(tmp_path, file, row_length):
    data = SHARED / "data" / file
    if not data.exists():
        pytest.skip(f"{data} is not here; it belongs to the developers' checkout")
    if data.suffix == ".jsonl":
        some = tmp_path / file  # all of it takes half a minute to tokenize
        some.write_text("".join(data.read_text().splitlines(keepends=True)[:600]))
        data = some
    flags = [*TINY_RUN, f"--config.data.path={data}", f"--config.row_length={row_length}", "--config.batch_size=4"]
    flags += ["--config.data.on_error=skip", "--config.model.vocab_size=1024", "--config.steps=60"]
    run("train", *flags, f"--workdir={tmp_path}/run")
    assert losses(tmp_path / "run", 50, 60) < 0.9 * losses(tmp_path / "run", 0, 10)


SPLIT = ["--config.mesh.data=1", "--config.mesh.fsdp=2", "--config.mesh.sequence=2"]


@pytest.mark.parametrize(
    ("devices", "mesh"), [(1, []), pytest.param(4, SPLIT, marks=pytest.mark.slow)], ids=["one device", "four devices"]
)
@pytest.mark.thorough
def test_tasks_are_scored_while_training_which_does_not_notice(trained_run, tasks, tmp_path, devices, mesh):
    """From step 50 on, as after a restart that takes steps again."""
    directory, workdir = tasks(GENERATE), tmp_path / "run"
    flags = [*TINY_RUN, *mesh, "--config.eval.tasks=sums", f"--config.eval.include_path={directory}"]
    flags += ["--config.eval.tasks_every=5", "--config.eval.limit=12", "--config.eval.decode=batch_size=8"]
    shutil.copytree(trained_run, workdir)
    shutil.rmtree(workdir / "checkpoints" / "60")
    (workdir / "samples.jsonl").write_text("".join(f'{{"step": {step}, "problem": 0}}\n' for step in (50, 55)))
    run("train", *flags, f"--workdir={workdir}", devices=devices)
    records = read_metrics(workdir)
    losses, expected = ([record["loss"] for record in read_metrics(d)] for d in (workdir, trained_run))
    assert losses == (expected if devices == 1 else pytest.approx(expected, abs=1e-4))
    assert [record["step"] for record in records if "eval_sums_exact_match_last" in record] == [55, 60]

    results, samples = evaluate(
        (load_model(workdir), load_tokenizer(workdir)), tmp_path / "journal", "sums", directory, limit=12
    )
    assert records[-1]["eval_sums_exact_match_last"] == results["results"]["sums"]["exact_match,last"]
    # Four devices speculate four times as many tokens per forward (--decode.speculate is of each shard).
    for name in ("mean_tokens", "truncated_share", *["tokens_per_forward"] * (devices == 1)):
        assert records[-1][f"eval_sums_{name}"] == results["decoding"][name]
    board = b"".join(path.read_bytes() for path in (workdir / "tensorboard").iterdir())
    for sample in samples[:5]:
        assert f"eval_sums/{sample['doc_id']}".encode() in board
        assert f"**Answered**\n\n    {(sample['resps'][0][0].splitlines() or [''])[0]}".encode() in board
    assert b"eval_sums/5" not in board
    before, *kept = [json.loads(line) for line in (workdir / "samples.jsonl").read_text().splitlines()]
    assert before == {"step": 50, "problem": 0}
    assert [(sample["step"], sample["problem"]) for sample in kept] == [
        (step, i) for step in (55, 60) for i in range(5)
    ]
    assert [sample["answered"] for sample in kept[5:]] == [sample["resps"][0][0] for sample in samples[:5]]
    for sample, own in zip(kept[5:], samples[:5], strict=True):  # which report plays
        counts = sample["scene"]["counts"]
        assert len(counts) == len(sample["scene"]["drafts"]) + 1 == own["decoding"][0]["forwards"] + 1
        assert counts[-1] >= own["decoding"][0]["tokens"]


def test_where_the_prefill_writes_all_answers_no_tokens_per_forward_are_logged():
    """As of a model that ends every answer at once; 0 would be a rate."""
    decoding = {"tokens_per_forward": None, "mean_tokens": 1.0, "truncated_share": 0.0}
    scores = scores_of({"results": {}, "decoding": {"tasks": {"sums": decoding}}})
    assert scores == {"eval_sums_mean_tokens": 1.0, "eval_sums_truncated_share": 0.0}


def test_tasks_that_cannot_be_scored_while_training_are_refused_before_it(trained_run, tasks, tmp_path):
    directory = tasks(GENERATE)
    tokenizer = load_tokenizer(trained_run)
    mesh = make_mesh({}, jax.devices()[:1])

    def begin(config):
        check(config)
        TaskScores(config, tokenizer, train_program(config, read_model_config(trained_run), mesh))

    for keys, message in (
        ({"tasks": "sums", "include_path": "/none"}, "--config.eval.include_path=/none is not a directory"),
        ({"tasks": "sums", "decode": "slot_size"}, "--config.eval.decode='slot_size': '' is not a number"),
        ({"decode": "method=ar"}, "--config.eval.decode='method=ar': models of objective=refusion are decoded by ref"),
        ({"decode": "slot_size=0"}, "--config.eval.decode='slot_size=0': slot_size=0: must be at least 1"),
        ({"tasks": "sums", "decode": "max_new_tokens=60"}, "--config.eval.tasks=sums: .*64 tokens.*; give at most 48"),
        ({"tasks": "sums", "decode": "slot_size=64"}, "; give smaller slots or blocks than 64 tokens"),
        ({"tasks": "humaneval", "task_data": str(tmp_path)}, "humaneval runs .*--config.eval.allow_code_execution"),
    ):
        (tmp_path / "humaneval.jsonl").write_text(json.dumps({"prompt": "a", "test": "b", "entry_point": "f"}))
        config = read_config(trained_run)
        config.eval.update({"include_path": str(directory)} | keys)
        with pytest.raises(UserError, match=message):
            begin(config)


@pytest.mark.slow
def test_told_to_go_while_tasks_are_decoded_a_run_leaves_them_and_saves(tasks, tmp_path):
    flags = [*TINY_RUN, "--config.eval.tasks=sums", f"--config.eval.include_path={tasks(GENERATE)}"]
    flags += ["--config.eval.tasks_every=10", "--config.eval.decode=batch_size=1", f"--workdir={tmp_path}/run"]
    process = start("train", *flags)
    wait_for_steps(process, tmp_path / "run", 9)  # written after the dispatch of step 10
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 75, out + err
    assert "saved step 10 of 60" in out
    assert not any("eval_sums_exact_match_last" in record for record in read_metrics(tmp_path / "run"))

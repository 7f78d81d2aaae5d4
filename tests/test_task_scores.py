"""Tasks that are decoded and scored while a model trains."""

import json
import shutil
import signal

import jax
import pytest
from conftest import TINY_RUN, run, start
from helpers import wait_for_steps
from local_task import GENERATE, evaluate

from refusion_jax import UserError, load_model, load_tokenizer
from refusion_jax.checkpoints.run_directory import read_model_config
from refusion_jax.config import check
from refusion_jax.config.run_config import read_config
from refusion_jax.distributed.sharding import make_mesh
from refusion_jax.training.metrics import read_metrics
from refusion_jax.training.program import train_program
from refusion_jax.training.task_scores import TaskScores

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


def test_tasks_that_cannot_be_scored_while_training_are_refused_before_it(trained_run, tasks, tmp_path):
    directory = tasks(GENERATE)
    tokenizer = load_tokenizer(trained_run)
    mesh = make_mesh({}, jax.devices()[:1])

    def begin(config):
        check(config)
        TaskScores(config, tokenizer, train_program(config, read_model_config(trained_run), mesh))

    for keys, message in (
        ({"tasks": "sums", "include_path": "/none"}, "--config.eval.include_path=/none is no directory"),
        ({"tasks": "sums", "decode": "slot_size"}, "--config.eval.decode='slot_size': '' is no number"),
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

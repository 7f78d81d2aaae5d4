"""Several real processes on this machine, joined as the hosts of a pod are."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import rows_probe
from conftest import QUICK_COMPILE, ROOT, TINY_RUN, run
from etils import epath
from helpers import ended, free_port, python, start_hosts, tiny_qwen3, wait_for_steps, wait_until, workers
from local_task import GENERATE

from refusion_jax.checkpoints.contents import copy_stamp
from refusion_jax.checkpoints.run_directory import saved_steps
from refusion_jax.cli.errors import UserError
from refusion_jax.distributed import processes
from refusion_jax.training.events import account, read_events
from refusion_jax.training.metrics import read_metrics

FLAGS = [*TINY_RUN, "--config.batch_size=16", "--config.steps=20", "--config.checkpoint.every=100"]
FLAGS += ["--config.eval.path=tasks", "--config.eval.every=5", "--config.eval.rows=20"]  # the last part is not full


@pytest.fixture(autouse=True)
def _programs_of_the_run(monkeypatch):
    """As users of one machine have it, in the tests' own cache directory."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")


def start_two(line: list[str], homes: list[Path], **variables: str) -> list[subprocess.Popen]:
    """Two processes that find each other, each in a directory of its own and in a process group of its own."""
    env = os.environ | {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "2"} | variables
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    envs = [env | {"JAX_PROCESS_ID": str(index)} for index in range(2)]
    return [subprocess.Popen(line, cwd=home, env=own, **how) for home, own in zip(homes, envs, strict=True)]


def both_refuse(tmp_path: Path, homes: list[Path], command: str, *flags: str, said: str) -> None:
    """Two processes with the same flags end with one line each, and write nothing to tmp_path/out."""
    line = [sys.executable, "-m", f"refusion_jax.{command}", *flags]
    for process in start_two(line, homes, PYTHONPATH=str(ROOT), XLA_FLAGS=QUICK_COMPILE):
        _, err = ended(process)
        assert process.returncode == 2, err
        assert re.search(f"error: {said}", err)
    assert not (tmp_path / "out").exists()


def losses(workdir) -> list[float]:
    """Of every step, and where the held-out set was evaluated all that was found."""
    records = read_metrics(workdir)
    evaluated = [value for record in records for name, value in record.items() if name.startswith("eval_")]
    return [record["loss"] for record in records] + [-1.0 if value is None else value for value in evaluated]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """The losses of 20 steps on one process with 4 devices."""
    workdir = tmp_path_factory.mktemp("one") / "run"
    run("train", *FLAGS, f"--workdir={workdir}", devices=4)
    found = losses(workdir)
    evaluated = [record for record in read_metrics(workdir) if "eval_loss" in record]
    assert [record["step"] for record in evaluated] == [5, 10, 15, 20]
    assert all(record["eval_bits_per_byte"] for record in evaluated)
    assert len(found) >= 20 + 4 * 3
    return found


def test_two_processes_see_the_rows_the_noise_and_the_faults_of_one():
    flag = "--xla_force_host_platform_device_count=4"
    both = start_two([sys.executable, "tests/rows_probe.py"], [ROOT, ROOT], XLA_FLAGS=f"{flag} {QUICK_COMPILE}")
    (out, err), _ = map(ended, both)
    assert both[0].returncode == 0, err
    found = json.loads(out.strip().splitlines()[-1])
    assert found["processes"] == 2
    expected = [rows_probe.digest(mesh, 2, 5) for mesh in rows_probe.MESHES]
    assert len(set(expected)) == 1
    assert found["digests"] == expected
    assert found["faults"] == ["a damaged file", None], "what the other one finds is told here"


@pytest.mark.thorough
def test_two_processes_are_preempted_at_one_step_and_resume_to_the_losses_of_one(tmp_path, one_process):
    """SIGTERM on one host: both save the same step, once, and leave with 75, on which they are started again."""
    process = start_hosts(2, *FLAGS, f"--workdir={tmp_path}", RESTARTS="1")
    wait_for_steps(process, tmp_path, 2)
    os.kill(workers(process)[1], signal.SIGTERM)  # not the one that writes
    out, err = ended(process)
    assert process.returncode == 0, out + err
    assert "starting again after exit code 75 (1 of 1)" in out
    step, last = saved_steps(tmp_path)
    assert 1 < step < last == 20, "too late to show anything"
    assert f"interrupted: saved step {step} of 20" in out
    assert f"step {step} of 20" in out.split("starting again")[1]
    assert [e["reason"] for e in read_events(tmp_path) if e["event"] == "end"] == ["preempted", "complete"]
    assert losses(tmp_path) == pytest.approx(one_process, rel=1e-6)
    spent = account(read_events(tmp_path))
    assert spent["sessions"] == 2
    assert spent["lost"] == 0
    steps = [(e["first"], e["last"]) for e in read_events(tmp_path) if e["event"] == "steps"]
    assert [first for first, _ in steps[1:]] == [last + 1 for _, last in steps[:-1]]


def test_a_signal_before_the_first_step_of_a_resumed_run_is_heard():
    code = """
import os, signal, time
from refusion_jax.distributed import preemption, processes
with processes.together():
    asked = preemption.Preemption()
    if os.environ["JAX_PROCESS_ID"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)  # as compilation takes
    print(next((step for step in range(8, 100) if time.sleep(0.01) or asked.reached()), "never"))
"""
    for process in start_two([sys.executable, "-c", code], [ROOT, ROOT]):
        out, err = ended(process)
        assert out.splitlines()[-1:] == ["8"], out + err


def test_processes_that_would_evaluate_different_steps_are_refused(tmp_path):
    """As when a run saves one while they start: their answers would be of two models."""
    homes = [tmp_path / "0", tmp_path / "1"]
    for step, home in enumerate(homes, 7):
        (params := home / "run" / "checkpoints" / str(step) / "params").mkdir(parents=True)
        (params / "x").write_text("")
    said = r"the newest step of --checkpoint \(name one: DIR/checkpoints/STEP\) is not the same on all"
    both_refuse(tmp_path, homes, "evaluate", "--checkpoint=run", "--tasks=x", f"--output={tmp_path}/out", said=said)


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_processes_whose_copies_of_a_model_differ_are_refused(tmp_path, command):
    models = [tmp_path / home / "model" for home in "01"]
    models[0].mkdir(parents=True)
    tiny_qwen3(models[0])
    shutil.copytree(*models)
    (models[0] / "adapter_config.json").write_text("{}")  # which may name a directory of this host
    assert len({copy_stamp(epath.Path(model)) for model in models}) == 1
    with next(models[1].glob("*.safetensors")).open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(bytes(4))  # a weight
    if command == "train":
        flags = [f"--config={ROOT}/configs/quickstart.py", *TINY_RUN[1:], f"--workdir={tmp_path}/out"]
        flags += ["--config.init_from=model", "--config.data.tokenizer=model/tokenizer.json", "--config.row_length=128"]
        flags += ["--config.model.rope_theta=1e6"]
    else:
        flags = ["--checkpoint=model", "--tasks=x", f"--output={tmp_path}/out"]
    said = r"the model in --\S+=model is not the same on all hosts \(processes \[1\] differ"
    both_refuse(tmp_path, [model.parent for model in models], command, *flags, said=said)


@pytest.mark.thorough
def test_a_directory_that_is_not_shared_is_refused_and_leaves_nothing(tmp_path):
    homes = [tmp_path / "0", tmp_path / "1"]  # a relative path, on machines of their own
    for home in homes:
        home.mkdir()
    flags = [f"--config={ROOT}/configs/quickstart.py", *FLAGS[1:], "--workdir=runs/new"]
    both_refuse(tmp_path, homes, "train", *flags, said="--workdir=runs/new is not one directory for all hosts")
    assert list(tmp_path.rglob("runs")) == []


@pytest.mark.slow
def test_one_host_then_two_four_and_one_lose_nothing_where_each_is_killed(tmp_path, one_process):
    """Losses agree to 1e-6 and not to the bit, as another number of devices adds up gradients in another order."""
    saved = 0
    for hosts in (1, 2, 4):
        flags = [*FLAGS, "--config.checkpoint.every=2", f"--workdir={tmp_path}"]
        process = start_hosts(hosts, *flags, RESTARTS="0")
        wait_until(lambda saved=saved: (saved_steps(tmp_path) or [0])[-1] > saved, process)
        os.kill(workers(process)[-1], signal.SIGKILL)
        out, err = ended(process)
        assert process.returncode == 137, out + err
        saved = saved_steps(tmp_path)[-1]
        assert saved < 20, "too late to show anything"
    process = start_hosts(1, *FLAGS, f"--workdir={tmp_path}", RESTARTS="0")
    out, err = ended(process)
    assert process.returncode == 0, out + err
    assert account(read_events(tmp_path))["sessions"] == 4
    assert losses(tmp_path) == pytest.approx(one_process, rel=1e-6)
    assert [record["step"] for record in read_metrics(tmp_path)] == list(range(1, 21))


@pytest.mark.slow
def test_two_processes_score_tasks_as_one(tmp_path, tasks):
    flags = [*FLAGS, "--config.steps=6", "--config.eval.tasks=sums", f"--config.eval.include_path={tasks(GENERATE)}"]
    flags += ["--config.eval.limit=20"]
    flags += ["--config.eval.tasks_every=3", "--config.eval.decode=batch_size=8 slot_size=4"]
    run("train", *flags, f"--workdir={tmp_path}/one", devices=4)
    process = start_hosts(2, *flags, f"--workdir={tmp_path}/two")
    out, err = ended(process)
    assert process.returncode == 0, out + err
    one, two = (
        [{k: v for k, v in r.items() if k.startswith("eval_sums_")} for r in read_metrics(tmp_path / name)]
        for name in ("one", "two")
    )
    assert [bool(scores) for scores in one] == [False, False, True, False, False, True]
    # Speculation takes the room that others in the batch leave, and hosts fill it in another order: the same tokens, in
    # more or fewer forwards.
    assert all(scores.pop("eval_sums_tokens_per_forward") > 0 for scores in one + two if scores)
    assert "eval_sums_exact_match_last" in one[2]
    assert one == two


@pytest.fixture
def stand_in(tmp_path):
    """A PYTHON for local_hosts.sh whose processes train nothing: each runs a line of shell that names its case."""

    def make(case: str) -> str:
        script = tmp_path / "python"
        script.write_text(
            f"""#!/usr/bin/env bash
if [ "$1" = -c ]; then exec {sys.executable} "$@"; fi
echo start >>{tmp_path}/starts.$JAX_PROCESS_ID
cd {tmp_path}
case $JAX_PROCESS_ID in {case} esac
"""
        )
        script.chmod(0o755)
        return str(script)

    make.starts = lambda: (tmp_path / "starts.1").read_text().count("start")
    make.waiting = lambda: len(list(tmp_path.glob("waits.*")))
    return make


WAIT = "trap 'exit 75' TERM; touch waits.$JAX_PROCESS_ID; while :; do sleep 0.05; done"


@pytest.mark.parametrize(
    ("case", "code", "starts", "said"),
    [
        (f"0) {WAIT} ;; 1) echo bad; exit 2 ;;", 2, 1, "process 1 ended with exit code 2:\nbad"),  # never again
        (f"1) {WAIT} ;; 0) echo bad >&2; exit 2 ;;", 2, 1, "bad"),
        (f"0) {WAIT} ;; 1) exit 1 ;;", 1, 1, "process 1 ended with exit code 1"),  # a mistake of ours: never again
        (f"0) {WAIT} ;; 1) kill -KILL $$ ;;", 137, 3, "process 1 ended with exit code 137"),  # lost: again
        ("*) exit 75 ;;", 75, 3, ""),  # preempted: again
        (f"0) {WAIT} ;; 1) kill -TERM $$ ;;", 143, 3, "process 1 ended with exit code 143"),  # while it was imported
        ("*) exit 0 ;;", 0, 1, ""),
    ],
)
def test_when_one_process_ends_badly_the_others_are_ended_and_some_codes_start_it_again(
    stand_in, case, code, starts, said
):
    process = start_hosts(2, PYTHON=stand_in(case), RESTARTS="2")
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, out + err
    assert stand_in.starts() == starts
    assert said in err
    assert out.count("starting again after exit code") == starts - 1


def test_a_signal_is_passed_on_and_nothing_is_started_again(stand_in):
    process = start_hosts(3, PYTHON=stand_in(f"*) {WAIT} ;;"), RESTARTS="3")
    wait_until(lambda: stand_in.waiting() == 3, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 75, out + err
    assert stand_in.starts() == 1


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"JAX_PROCESS_ID": "1"}, "JAX_COORDINATOR_ADDRESS is not set, but JAX_PROCESS_ID is"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "h:1"}, "JAX_PROCESS_ID is not set, but .* are"),
        (
            {"JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "h:1", "JAX_PROCESS_ID": "2"},
            "JAX_PROCESS_ID=2 must be at least 0 and below JAX_NUM_PROCESSES=2",
        ),
        (
            {"JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "h", "JAX_PROCESS_ID": "1"},
            "JAX_COORDINATOR_ADDRESS=h must be host:port",
        ),
    ],
)
def test_an_environment_that_names_only_some_peers_is_refused(monkeypatch, variables, said):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=said):
        processes.initialize()


def test_the_only_host_of_a_tpu_in_a_container_asks_nobody_for_others():
    """Colab's and Kaggle's say that they are alone; JAX would ask a server that such containers do not reach."""
    code = "from jax._src.clusters import cloud_tpu_cluster\ncloud_tpu_cluster.running_in_cloud_tpu_vm = True\n"
    code += "from refusion_jax.distributed.processes import together\nwith together(): pass"
    done = python("-c", code, TPU_WORKER_HOSTNAMES="localhost", GCE_METADATA_IP="127.0.0.1:1")
    assert done.returncode == 0, done.stderr

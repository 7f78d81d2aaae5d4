"""The scripts in launch/: a stub of gcloud on PATH notes their calls, and stands for a TPU."""

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import QUICK_COMPILE, ROOT, TINY_RUN
from helpers import computed, wait_for_steps, wait_until

from refusion_jax.training.events import account, read_events
from refusion_jax.training.metrics import read_metrics

PLACE = "--zone=us-east5-a"
ALL = ["--node=all", "--worker=all"]
TRAIN = ["--config=configs/small.py", "--config.data.path=my/*.jsonl", "--workdir=gs://bucket/run"]
ASKED = [PLACE, "--accelerator=v5p-64", "--spot"]
NODE = "tpu.nodeSpec[0].node"
FIELDS = f"state.state,{NODE}.acceleratorType.basename(),{NODE}.acceleratorConfig.topology"
SEEN = ["describe", "tpu", f'--format=value[separator=","]({FIELDS})', PLACE]
CREATED = ["create", "tpu", "--node-id=tpu", "--accelerator-type=v5p-64", "--runtime-version=v2-alpha-tpuv5", "--spot"]
DELETED = ["delete", "tpu", "--force", "--quiet", PLACE]
ABSENT = (1, "ERROR: NOT_FOUND: no such thing")


def write_script(path: Path, lines: str) -> None:
    """Writes lines of shell that can be run by their path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)


@pytest.fixture
def gcloud(tmp_path):
    """A directory of the stub's; its bin/ is to be on PATH."""
    write_script(tmp_path / "bin" / "gcloud", f'exec {sys.executable} {ROOT / "tests" / "gcloud_stub.py"} "$@"')
    return tmp_path


@pytest.fixture
def worker(tmp_path):
    """Runs the commands of worker.sh on a machine whose home is this directory, and gives their exit codes."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")

    def call(*arguments: str, **variables: str) -> int:
        line = ["bash", str(tmp_path / "launch" / "worker.sh"), *arguments]
        return subprocess.run(line, env=os.environ | variables, timeout=60).returncode

    return call


def start(gcloud, *arguments: str, poll: str = "0.2") -> subprocess.Popen:
    env = os.environ | {"PATH": f"{gcloud / 'bin'}:{os.environ['PATH']}", "GCLOUD_STUB": str(gcloud)}
    env |= {"POLL_SECONDS": poll, "XDG_STATE_HOME": str(gcloud), "PYTHONPATH": str(ROOT), "XLA_FLAGS": QUICK_COMPILE}
    line = ["bash", str(ROOT / "launch" / "tpu_vm.sh"), *arguments]
    return subprocess.Popen(line, env=env, cwd=gcloud, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def tpu_vm(gcloud, *arguments: str, code: int = 0, poll: str = "0.2") -> tuple[str, str]:
    process = start(gcloud, *arguments, poll=poll)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, out + err
    return out, err


def answer(gcloud, **answers) -> None:
    """Scripts the stub: wait=... answers `worker.sh wait`, describe=... the state."""
    names = {key if key == "describe" else f"ssh {key}": value for key, value in answers.items()}
    (gcloud / "answers.json").write_text(json.dumps(names))


def calls(gcloud) -> list[list[str]]:
    """All calls of gcloud, without what is the same in all; what is copied has no fixed name."""
    lines = [json.loads(line)[3:] for line in (gcloud / "calls.jsonl").read_text().splitlines()]
    return [["scp", "ARCHIVE", *call[2:]] if call[0] == "scp" else call for call in lines]


def remote(*command: str) -> list[str]:
    return [
        "ssh",
        "tpu",
        *ALL,
        "--command=echo reached; " + " ".join(["bash refusion_jax/launch/worker.sh", *command]),
        PLACE,
    ]


SET_UP = [
    ["scp", "ARCHIVE", "tpu:refusion_jax.tgz", *ALL, PLACE],
    [
        *("ssh", "tpu", *ALL),
        "--command=echo reached; mkdir -p refusion_jax && tar -xzf refusion_jax.tgz -C refusion_jax && "
        "rm refusion_jax.tgz && bash refusion_jax/launch/worker.sh install",
        PLACE,
    ],
]
STARTED = remote("start", "--config=configs/small.py", r"--config.data.path=my/\*.jsonl", "--workdir=gs://bucket/run")


def test_scripts_use_no_more_than_the_bash_of_macos_has():
    newer = r"mapfile|readarray|wait -[np]|declare -[Ag]|local -n|\|&|&>>|\$\{\w+(,|\^|@)|=~ [^$]*\("
    newer += r"|set -\w*u.*\n(.*\n)*.*\[@\]\}"  # there an empty array is an unset variable
    scripts = [*(ROOT / "launch").glob("*.sh")]
    assert {script.name for script in scripts} >= {"tpu_vm.sh", "local_hosts.sh", "quickstart.sh"}
    for script in scripts:
        assert not (found := re.search(newer, script.read_text())), f"{script}: {found[0]}"


def test_scripts_are_clean():
    checker = shutil.which("shellcheck") or shutil.which("shellcheck", path=Path(sys.executable).parent)
    if not checker:
        pytest.skip("shellcheck is not here; pip install -e '.[test]' brings it")
    scripts = sorted(str(path) for path in (ROOT / "launch").glob("*.sh"))
    assert len(scripts) > 4
    done = subprocess.run([checker, "-x", "-P", "SCRIPTDIR", *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_run_asks_for_the_tpu_waits_for_it_and_trains_on_all_workers(gcloud):
    answer(gcloud, describe=[ABSENT, (0, "WAITING_FOR_RESOURCES"), (0, "PROVISIONING"), (0, "ACTIVE")])
    out, _ = tpu_vm(gcloud, "run", "tpu", *ASKED, "--", *TRAIN)
    assert "tpu is WAITING_FOR_RESOURCES" in out
    assert calls(gcloud) == [SEEN, [*CREATED, PLACE], SEEN, SEEN, SEEN, *SET_UP, STARTED, remote("wait")]


def test_dry_run_prints_the_calls_makes_none_and_removes_nothing(gcloud, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(gcloud))
    out, _ = tpu_vm(gcloud, "run", "tpu", *ASKED, "--project=p", "--slices=2", "--dry-run", "--", *TRAIN)
    assert [path.name for path in gcloud.iterdir()] == ["bin"]
    lines = [line for line in out.splitlines() if line.startswith("gcloud compute tpus queued-resources ")]
    assert [line.split()[4] for line in lines] == "describe create describe scp ssh ssh ssh".split()
    packed = re.search(r"^tar -czf (\S+)", out, re.M)[1]
    assert packed in lines[3]
    assert "--node-count=2 --node-prefix=tpu" in lines[1]
    assert all(line.rstrip().endswith("--zone=us-east5-a --project=p") for line in lines)


def test_flags_of_gcloud_go_to_create_as_they_are_and_are_remembered(gcloud):
    asked = ["--reserved", "--service-account=a@p", "--network=n", "--internal-ips", "--labels=a=b c"]
    reach = "--tunnel-through-iap"
    answer(gcloud, describe=[ABSENT, (0, "ACTIVE"), (0, "SUSPENDED"), ABSENT, (0, "ACTIVE")], wait=[(75, "")])
    tpu_vm(gcloud, "run", "tpu", *ASKED[:2], *asked, reach, "--", *TRAIN)
    created = [call for call in calls(gcloud) if call[0] == "create"]
    assert created == [[*CREATED[:-1], *asked, PLACE]] * 2
    tpu_vm(gcloud, "logs", "tpu")
    reached = {call[0]: reach in call for call in calls(gcloud)}
    assert reached == {"describe": False, "create": False, "ssh": True, "scp": True}
    answer(gcloud, describe=[ABSENT, (0, "ACTIVE")])
    tpu_vm(gcloud, "create", "tpu", "--network=other", "--accelerator=v6e-8")  # in place of those before
    accelerator = ["--accelerator-type=v6e-8", "--runtime-version=v2-alpha-tpuv6e"]
    assert ["create", "tpu", "--node-id=tpu", *accelerator, "--network=other", PLACE] in calls(gcloud)


def test_flex_start_by_a_topology_is_asked_of_gcloud_alpha(gcloud):
    asked = ["--type=v6e", "--topology=4x4", "--provisioning-model=flex-start", "--max-run-duration=2d"]
    options = [PLACE, "--runtime=v2-alpha-tpuv6e", "--alpha", *asked, "--dry_run"]
    out, _ = tpu_vm(gcloud, "run", "tpu", *options, "--", *TRAIN)
    lines = [line for line in out.splitlines() if " queued-resources " in line]
    assert all(line.startswith("gcloud alpha compute tpus queued-resources ") for line in lines)
    assert "create tpu --node-id=tpu --runtime-version=v2-alpha-tpuv6e " + " ".join(asked) in lines[1]


def test_a_tpu_that_exists_in_another_size_is_told(gcloud):
    by_topology = ["--runtime=v2-alpha-tpuv5", "--type=v5p", "--topology=4x4x4"]
    for asked, there, said in [
        (ASKED[1:], "v5p-32,", "tpu exists, as v5p-32 and not as v5p-64;"),
        (ASKED[1:], "v5p-64,4x4x2", ""),
        (by_topology, ",4x4x2", "tpu exists, as 4x4x2 and not as 4x4x4;"),
        (by_topology, "v5p-128,4x4x4", ""),
        (by_topology, "v5p-128,", ""),  # gcloud does not say
    ]:
        shutil.rmtree(gcloud / "refusion_jax", ignore_errors=True)
        answer(gcloud, describe=[(0, f"ACTIVE,{there}")])
        out, _ = tpu_vm(gcloud, "create", "tpu", PLACE, *asked)
        assert out.startswith(said), out
        assert bool(out) == bool(said)


@pytest.mark.parametrize("wait", [(255, "ssh: no route to host"), (0, None)])  # gcloud ends so where no node is left
def test_a_preempted_tpu_is_created_again_and_the_run_resumed(gcloud, wait):
    there, gone = (0, "ACTIVE"), (0, "SUSPENDED")
    answer(gcloud, describe=[there, gone, gone, ABSENT, there], wait=[wait, (0, "")])
    out, _ = tpu_vm(gcloud, "run", "tpu", *ASKED, "--", *TRAIN)
    assert "tpu is SUSPENDED: creating it again" in out
    again = [SEEN, SEEN, DELETED, SEEN, [*CREATED, PLACE], SEEN, *SET_UP, STARTED, remote("wait")]
    assert calls(gcloud) == [SEEN, *SET_UP, STARTED, remote("wait"), *again]


@pytest.mark.parametrize("state", [(0, "DELETING"), ABSENT])
def test_a_tpu_that_somebody_deletes_is_not_created_again(gcloud, state):
    answer(gcloud, describe=[(0, "ACTIVE"), state, ABSENT, (0, "ACTIVE")], wait=[(75, "")])
    out, _ = tpu_vm(gcloud, "run", "tpu", *ASKED, "--", *TRAIN, code=75)
    assert "tpu has been deleted" in out
    assert calls(gcloud) == [SEEN, *SET_UP, STARTED, remote("wait"), SEEN]


def test_a_tpu_that_is_preempted_before_the_run_begins_is_created_again(gcloud):
    there, gone, unreached = (0, "ACTIVE"), (0, "SUSPENDED"), (255, None)
    states = [there, gone, gone, ABSENT, there, gone, gone, ABSENT, there]
    answer(gcloud, describe=states, install=[unreached], start=[unreached], wait=[unreached])
    tpu_vm(gcloud, "run", "tpu", *ASKED, "--", *TRAIN)
    again = [SEEN, SEEN, DELETED, SEEN, [*CREATED, PLACE], SEEN, *SET_UP, STARTED, remote("wait")]
    assert calls(gcloud) == [SEEN, *SET_UP, *again, *again]


@pytest.mark.parametrize(
    ("wait", "lost", "between"),
    [
        (75, 0, [SEEN, STARTED]),  # preempted, and the machines are still there
        (254, 0, [SEEN, STARTED]),  # one was restarted under the run
        (134, 254, [remote("lost"), SEEN, STARTED]),  # the others died of its absence
        (1, 75, [remote("lost"), SEEN, STARTED]),  # one left since it could not save, and the others for its absence
        (255, 0, [SEEN]),  # only our connection was lost
    ],
)
def test_what_is_started_again_and_what_is_not(gcloud, wait, lost, between):
    answer(gcloud, describe=[(0, "ACTIVE")] * 2, wait=[(wait, ""), (0, "")], lost=[(lost, "")])
    tpu_vm(gcloud, "run", "tpu", *ASKED, "--", *TRAIN)
    assert calls(gcloud) == [SEEN, *SET_UP, STARTED, remote("wait"), *between, remote("wait")]


@pytest.mark.parametrize(("text", "code", "said"), [("", 0, ""), (None, 1, "has not answered 21 times")])
def test_connections_may_be_lost_as_often_as_they_are_made(gcloud, text, code, said):
    answer(gcloud, describe=[(0, "ACTIVE")] * 30, wait=[(255, text)] * 22 + [(0, "")])
    _, err = tpu_vm(gcloud, "run", "tpu", *ASKED, "--", *TRAIN, code=code, poll="0")
    assert said in err


@pytest.mark.parametrize("code", [2, 1])
def test_an_error_of_the_run_itself_is_never_tried_again(gcloud, code):
    answer(gcloud, describe=[(0, "ACTIVE")], wait=[(code, "")])
    out, _ = tpu_vm(gcloud, "run", "tpu", *ASKED, "--", *TRAIN, code=code)
    assert f"train has ended with exit code {code}; what it said: bash launch/tpu_vm.sh logs tpu" in out
    asked = [remote("lost")] if code == 1 else []
    assert calls(gcloud) == [SEEN, *SET_UP, STARTED, remote("wait"), *asked]


@pytest.mark.parametrize(
    ("ended", "said"), [("75", 75), ("137", 254), ("143", 254), (None, 254), ("1", 0), ("134", 0), ("0", 0)]
)
def test_a_worker_says_whether_it_is_to_be_started_again(worker, tmp_path, ended, said):
    if ended:
        (tmp_path / "train.exit").write_text(f"{ended}\n")
    assert worker("lost") == said


def test_a_worker_installs_the_locked_versions_once_and_again_after_a_failure_or_a_change(worker, tmp_path):
    begun, path = tmp_path / ".venv" / "bin", tmp_path / "path"  # an interrupted `python -m venv` leaves no pip
    write_script(begun / "python", "")
    write_script(path / "python3", f"[ $1 = -c ] || cp {path}/pip .venv/bin/pip")
    write_script(path / "pip", 'echo "$*" >>calls\n[ ! -e broken ]')
    for name in ("requirements.txt", "pyproject.toml", "broken"):
        (tmp_path / name).touch()

    def install() -> tuple[int, list[str]]:
        (tmp_path / "calls").write_text("")
        code = worker("install", PATH=f"{path}:{os.environ['PATH']}")
        calls = (tmp_path / "calls").read_text().splitlines()
        return code, [call.removeprefix("install --quiet --disable-pip-version-check ") for call in calls]

    lock, project = "--require-hashes --requirement launch/requirements.lock", "--editable .[tpu]"
    assert install() == (1, [lock])
    (tmp_path / "broken").unlink()
    assert install() == (0, [lock, project])
    assert install() == (0, [])
    later = time.time() + 9
    os.utime(tmp_path / "launch" / "requirements.lock", (later, later))
    assert install() == (0, [lock, project])


def test_a_worker_with_an_old_python_begins_again_after_an_interrupted_uv(worker, tmp_path):
    for file in [".venv/bin/python", *(f"path/python3{minor}" for minor in ("", ".13", ".12", ".11"))]:
        write_script(tmp_path / file, '[ $1 = -m ] && [ ! -e .venv ] && echo "$*" >>calls')
    worker("install", PATH=f"{tmp_path / 'path'}:/usr/bin:/bin")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["-m pip install --quiet --user uv", "-m uv venv --quiet --seed --python 3.11 .venv"]


UNTIL_TOLD_TO_SAVE = "trap 'echo saved; exit 75' TERM; echo training; while :; do sleep 0.1; done"


def test_a_worker_that_is_started_again_lets_the_run_save_first(worker, tmp_path):
    write_script(tmp_path / ".venv" / "bin" / "python", UNTIL_TOLD_TO_SAVE)
    log = tmp_path / "train.log"
    for starts in (1, 2):
        assert worker("start") == 0
        wait_until(lambda n=starts: log.read_text().count("training") == n)
    assert worker("stop") == 0
    assert log.read_text() == "training\nsaved\n" * 2


def test_what_a_worker_prints_is_in_the_bucket_before_its_machine_is_gone(worker, store, tmp_path):
    copies = f'[ $1 = -m ] || PYTHONPATH={ROOT} exec {sys.executable} "$@"'
    write_script(tmp_path / ".venv" / "bin" / "python", f"{copies}\n{UNTIL_TOLD_TO_SAVE}")
    name = f"run/logs/{platform.node()}.log"
    for end in ("stop", "shutdown"):  # as `delete` does, and as a machine that is shut down: to all of its processes
        assert worker("start", "--workdir=gs://bucket/run", LOG_SECONDS="1") == 0
        wait_until(lambda: store.objects.get(name, ["", b""])[1].endswith(b"training\n"))
        if end == "stop":
            assert worker(end) == 0
            assert store.objects[name][1] == b"training\nsaved\n"
        else:
            os.killpg(os.getsid(int((tmp_path / "train.pid").read_text())), signal.SIGTERM)
    wait_until(lambda: store.objects[name][1].endswith(b"saved\n"))


def test_what_was_asked_for_is_remembered(gcloud):
    answer(gcloud, describe=[(0, "ACTIVE")] * 2, wait=[(0, ""), (75, ""), (0, "")])
    tpu_vm(gcloud, "run", "tpu", *ASKED, "--", *TRAIN)
    (gcloud / "calls.jsonl").unlink()
    tpu_vm(gcloud, "resume", "tpu")
    tpu_vm(gcloud, "logs", "tpu", "--worker=1")
    tpu_vm(gcloud, "delete", "tpu")
    shown = ["ssh", "tpu", "--node=0", "--worker=1", "--command=bash refusion_jax/launch/worker.sh logs", PLACE]
    assert calls(gcloud) == [remote("wait"), SEEN, STARTED, remote("wait"), shown, remote("stop"), DELETED]
    _, err = tpu_vm(gcloud, "resume", "tpu", PLACE, code=2)
    assert "no run of tpu is remembered" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no command: the first argument is one of create, setup, run"),
        (["run"], "no name: the second argument names the TPU"),
        (["run", "Tpu"], "Tpu: the second argument names the TPU"),
        (["run", "tpu"], "--zone=Z is needed"),
        (["run", "tpu", PLACE], "--accelerator=TYPE is needed, such as --accelerator=v5p-64"),
        (["run", "tpu", PLACE, "--accelerator=h100-8"], "known are v4-N, v5litepod-N, v5p-N, v6e-N"),
        (["run", "tpu", *ASKED, "--slices=0"], "--slices=0: must be a number of at least 1"),
        (["run", "tpu", PLACE, "--accelerator=tpu7x-8"], "Google has this generation on GKE only"),
        (["run", "tpu", PLACE, "--topology=4x4x4"], "--runtime=VERSION is needed with --topology"),
        (["run", "tpu", *ASKED, "steps"], "steps: no such option; write --flag=value, and flags of train after --"),
        (["run", "tpu", *ASKED, "--config.steps=1"], "--config.steps=1: flags of train come after --"),
        (["logs", "tpu", PLACE, "--reserved"], "--reserved: no such option of logs"),
        (["run", "tpu", *ASKED], "--config=configs/NAME.py is one of them"),
        (["run", "tpu", *ASKED, "--", "--config=c.py", "--workdir=runs/x"], "--workdir=gs://BUCKET/DIR"),
        (["run", "tpu", *ASKED, "--", "--config=none.py:x", TRAIN[-1]], "--config=none.py: workers get only"),
        (["run", "tpu", *ASKED, "--", "--config=tests/conftest.py", TRAIN[-1]], "--config=tests/conftest.py: workers"),
        (["resume", "tpu", PLACE], "no run of tpu is remembered"),
    ],
)
def test_bad_input_is_one_line_and_calls_nothing(gcloud, arguments, said):
    _, err = tpu_vm(gcloud, *arguments, code=2)
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert said in err
    assert not (gcloud / "calls.jsonl").exists()
    assert not (gcloud / "refusion_jax").exists()


@pytest.mark.thorough
def test_a_machine_that_is_killed_and_taken_away_costs_nothing_but_time(gcloud, trained_run):
    """The whole road with real processes: the stub's machine is killed, its folder removed, and made again."""
    workdir = gcloud / "shared" / "run"
    process = start(gcloud, "run", "tpu", *ASKED, "--", *TINY_RUN, f"--workdir={workdir}")
    wait_for_steps(process, workdir, 25)
    (gcloud / "state").write_text("SUSPENDED")
    pid = int((gcloud / "vm" / "refusion_jax" / "train.pid").read_text())
    os.killpg(os.getsid(pid), signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert [call[0] for call in calls(gcloud)].count("create") == 2
    assert [path.name for path in (gcloud / "vm").iterdir()] == ["refusion_jax"]  # no archive for a later `run` to take

    assert computed(workdir) == computed(trained_run)
    seconds = [record["seconds"] for record in read_metrics(workdir)]
    assert seconds == sorted(seconds)
    spent = account(read_events(workdir))
    assert spent["sessions"] == 2
    assert spent["lost"] + spent["down"] > 0

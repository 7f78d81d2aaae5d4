"""A run in an object store, which gcsfs and tensorstore take for Google's, and one run at a time in a directory."""

import contextlib
import fcntl
import json
import os
import re
import shlex
import signal
import stat
import threading
import time

import pytest
from conftest import ROOT, TINY_RUN, run, start
from etils import epath
from helpers import free_port, tiny_qwen3, wait_for_steps, wait_until
from test_huggingface import assert_same_tensors

from refusion_jax import UserError
from refusion_jax.checkpoints import lock
from refusion_jax.cli import paths
from refusion_jax.cli.errors import Failure
from refusion_jax.distributed import storage
from refusion_jax.distributed.append_log import AppendLog, parse_log
from refusion_jax.training import events

COMPUTED = ("step", "loss", "grad_norm", "tokens")


@pytest.mark.thorough
def test_a_run_lives_in_an_object_store_and_resumes_from_what_is_whole_there(store, trained_run, tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")  # as users have it
    flags = [*TINY_RUN, "--workdir=gs://bucket/run", "--config.checkpoint.every=20"]
    out, _ = run("train", *flags)
    assert "trained to step 60; the run is in gs://bucket/run" in out
    assert not any(name.startswith("run/compilation_cache") for name in store.objects)
    assert "run/lock" not in store.objects
    names = "config.json model.json tokenizer.model metrics.jsonl events.jsonl".split()
    assert {f"run/{name}" for name in names} <= store.objects.keys()
    assert any(name.startswith("run/tensorboard/events.out") for name in store.objects)

    # The last save was cut off: its folder is there, but not the mark that it is whole.
    del store.objects["run/checkpoints/60/commit_success.txt"]
    address = f"localhost:{free_port()}"
    with monkeypatch.context() as pod:  # of one host
        for name, value in {"COORDINATOR_ADDRESS": address, "NUM_PROCESSES": "1", "PROCESS_ID": "0"}.items():
            pod.setenv(f"JAX_{name}", value)
        out, _ = run("train", *flags, "--config.compilation_cache=shared")
    assert "step 40 of 60" in out
    assert "in 2 sessions" in out
    lines = store.objects["run/metrics.jsonl"][1].decode().splitlines()
    straight = (trained_run / "metrics.jsonl").read_text().splitlines()
    for ours, theirs in zip(map(json.loads, lines), map(json.loads, straight), strict=True):
        assert [ours[key] for key in COMPUTED] == [theirs[key] for key in COMPUTED]
    (tmp_path / events.FILE).write_bytes(store.objects["run/events.jsonl"][1])
    spent = events.account(events.read_events(tmp_path))
    assert spent["lost"] > 0
    assert any(name.startswith("run/compilation_cache/jit_train_step") for name in store.objects)

    out, _ = run("generate", "--checkpoint=gs://bucket/run", "--prompt=Sort 3 1 2.")
    assert json.loads(out)["tokens"]


@pytest.mark.thorough
def test_models_are_converted_from_and_to_the_store(store, tmp_path):
    tiny_qwen3(tmp_path / "Qwen3")
    orbax, huggingface = (["convert", f"--format={name}"] for name in ("orbax", "huggingface"))
    run(*orbax, f"--from={tmp_path}/Qwen3", "--to=gs://bucket/ours")
    run(*huggingface, "--from=gs://bucket/ours", "--to=gs://bucket/theirs", devices=4)
    run(*orbax, "--from=gs://bucket/theirs", f"--to={tmp_path}/ours")
    run(*huggingface, f"--from={tmp_path}/ours", f"--to={tmp_path}/again")
    assert_same_tensors(tmp_path / "Qwen3", tmp_path / "again")
    _, err = run(*orbax, f"--from={tmp_path}/Qwen3", "--to=gs://bucket/theirs", code=2)
    assert "--to=gs://bucket/theirs exists; name a new directory" in err
    before = dict(store.objects)
    (tmp_path / "Qwen3" / "model.safetensors.index.json").write_text("{")
    run(*orbax, f"--from={tmp_path}/Qwen3", "--to=gs://bucket/new", code=2)
    assert store.objects == before


def written(store) -> dict[str, bytes]:
    """The files of a run in the store."""
    return {name.removeprefix("run/"): content for name, (_, content) in list(store.objects.items()) if content}


def test_logs_of_a_store_that_does_not_answer_are_written_later(store, monkeypatch, caplog):
    monkeypatch.setattr(storage, "SYNC_SECONDS", 0.05)
    workdir, failures = epath.Path("gs://bucket/run"), [OSError("503")]
    (workdir / "metrics.jsonl").write_text("1\n")
    write_bytes = type(workdir).write_bytes

    def fail_at_first(path, content):
        if failures:
            raise failures.pop()
        write_bytes(path, content)

    monkeypatch.setattr(type(workdir), "write_bytes", fail_at_first)
    logs = storage.LogDirectory(workdir)
    with logs.fetch("metrics.jsonl").open("a") as file:
        file.write("2\n")
    logs.sync()
    wait_until(lambda: written(store) == {"metrics.jsonl": b"1\n2\n"})
    (logs.path / "tensorboard").mkdir()
    (logs.path / "tensorboard" / "events").write_text("x")
    logs.close()
    assert written(store) == {"metrics.jsonl": b"1\n2\n", "tensorboard/events": b"x"}
    assert "cannot be written now: 503" in caplog.text
    assert not logs.path.exists()


def test_what_is_written_while_a_copy_is_under_way_is_copied_before_the_end(store, monkeypatch):
    under_way, go_on, copy = threading.Event(), threading.Event(), storage.LogDirectory._copy

    def slow_copy(*arguments):
        copy(*arguments)
        under_way.set()
        go_on.wait(300)

    monkeypatch.setattr(storage.LogDirectory, "_copy", slow_copy)
    logs = storage.LogDirectory(epath.Path("gs://bucket/run"))
    with logs.fetch("metrics.jsonl").open("a") as file:
        print("1", file=file, flush=True)
        logs.sync()
        assert under_way.wait(300)
        print("2", file=file, flush=True)
    closing = threading.Thread(target=logs.close)
    closing.start()
    wait_until(lambda: logs._closing)
    go_on.set()
    closing.join(300)
    assert written(store) == {"metrics.jsonl": b"1\n2\n"}


def test_a_file_is_written_whole_with_its_mode_through_links_and_nothing_else_is_left(tmp_path):
    path, link = tmp_path / "a" / "file", tmp_path / "link"
    storage.write_file(path, "one")
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    path.chmod(0o640)
    link.symlink_to(path)
    storage.write_file(link, b"two")
    assert (path.read_text(), link.is_symlink()) == ("two", True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [p.name for p in path.parent.iterdir()] == ["file"]
    storage.write_file("/dev/null", "x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize(
    ("path", "is_known"),
    [("gs://b/x", True), ("hf://x", True), ("a/b", True), ("file:///x", False), ("http://x", False), ("/a://b", False)]
    + [("a/b, gs://b/x", True), ("gs://b/x,http://x", False)],  # as --config.data.path names several
)
def test_a_store_is_known_by_its_prefix_in_every_part_of_a_list(path, is_known):
    assert (paths.names_no_store(path) == "") == is_known


def test_a_full_disk_leaves_the_old_file_and_no_part_of_the_new(tmp_path, full_disk):
    storage.write_file(tmp_path / "file", "old")
    full_disk(1)
    with pytest.raises(OSError, match=f"File too large: '{tmp_path}/file'$"):
        storage.write_file(tmp_path / "file", "new" * 100)
    full_disk(-1)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "old")]


def test_a_full_disk_at_the_start_of_a_run_is_told_with_the_file(tmp_path, full_disk):
    full_disk(0)
    with pytest.raises(Failure, match=f"^{tmp_path / 'run' / 'lock'} cannot be written: File too large$"):
        lock.file_lock(tmp_path / "run").__enter__()
    full_disk(-1)
    lock.check_free(tmp_path / "run")


def test_a_directory_which_late_writes_make_anew_stays_removed(tmp_path):
    directory = epath.Path(tmp_path / "partial")

    def write_again_and_again():
        for number in range(10):  # with pauses in which the directory may be gone
            with contextlib.suppress(FileNotFoundError):  # removed just now
                (directory / "params").mkdir(parents=True, exist_ok=True)
                (directory / "params" / str(number)).touch()
            time.sleep(0.2)

    writer = threading.Thread(target=write_again_and_again)
    writer.start()
    storage.remove(directory)
    writer.join()
    assert not directory.exists()


def test_lines_that_find_no_room_are_written_later_each_once(tmp_path, full_disk, caplog):
    (tmp_path / "log").write_text('{"n": 0}\n{"cut o')
    log = AppendLog(tmp_path / "log", keeps_trying=True)
    log.append({"n": 1})
    full_disk((tmp_path / "log").stat().st_size + 3)
    log.append({"n": "two is longer"})
    log.append({"n": 3})
    full_disk(-1)
    log.append({"n": 4})
    log.close()
    assert [record["n"] for record in parse_log((tmp_path / "log").read_bytes())] == [0, 1, "two is longer", 3, 4]
    assert caplog.text.count("cannot be written now") == 1


@pytest.mark.thorough
def test_the_page_for_8b_runs_as_it_is_written(store, tmp_path):
    """From the download, which is a tiny one, to the server; `plan` has tests of its own."""
    page = (ROOT / "launch" / "README.md").read_text()
    lines = "".join(re.findall(r"```sh\n(.*?)```", page, re.DOTALL)).replace("$BUCKET", "gs://bucket").splitlines()
    commands = [shlex.split(line) for line in lines if line.startswith("python -m ")]
    tiny_qwen3(tmp_path / "Qwen3-8B")
    rows = "".join(f'{{"query": "What is {i}?", "response": "It is the number {i}."}}\n' for i in range(300))
    (tmp_path / "a.jsonl").write_text(rows)
    small = [*TINY_RUN[1:], "--config.steps=2", "--config.warmup_steps=1", "--config.row_length=128"]
    small += ["--config.dtype=float32", "--config.model.vocab_size=512", "--config.model.tie_word_embeddings=true"]
    done = []
    for _, _, module, *flags in commands:
        command = module.removeprefix("refusion_jax.")
        flags = [flag.replace("Qwen3-8B", f"{tmp_path}/Qwen3-8B").replace("my/*", f"{tmp_path}/*") for flag in flags]
        flags = [flag.replace("--output=scores", f"--output={tmp_path}/scores") for flag in flags]
        flags = [flag.replace("row_length=4096", "row_length=128") for flag in flags]
        done.append(command)
        if command == "serve":
            with start("serve", "--port=0", "--decode.batch_size=1", *flags) as server:
                assert server.stdout.readline().startswith("serving ")
                server.send_signal(signal.SIGINT)
                assert server.wait(300) == 130
        elif command != "plan":
            run(command, *flags, *(small if command == "train" else []))
    assert done == "convert prepare plan train evaluate convert serve".split()
    assert "held_out" in json.loads((tmp_path / "scores" / "results.json").read_text())
    assert b"objective=refusion" in store.objects["mine-8b/README.md"][1]


HOLD = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell starts in the background
from etils import epath
from refusion_jax.checkpoints.lock import locked
with locked(epath.Path(sys.argv[1])):
    print(1, flush=True)
    for _ in range(600):  # and not one minute at once, which a signal that comes just before it does not end
        time.sleep(0.1)
"""


def test_a_second_holder_is_refused_until_the_first_leaves_or_is_killed(tmp_path):
    directory = epath.Path(tmp_path)
    lock.check_free(directory)
    for sign in (signal.SIGKILL, signal.SIGINT):
        with start("-c", HOLD, str(tmp_path)) as holder:
            holder.stdout.readline()
            for refused in (lambda: lock.check_free(directory), lock.locked(directory).__enter__):
                with pytest.raises(UserError, match=rf"is in use by process {holder.pid} on .+, since 20\d\d-.*: wait"):
                    refused()
            holder.send_signal(sign)
    lock.check_free(directory)
    with lock.locked(directory) as check:
        check()


def test_in_a_store_the_last_one_holds_the_lease_and_the_one_before_stops_at_its_next_save(store, caplog):
    directory = epath.Path("gs://bucket/run")
    with lock.locked(directory) as check:
        check()
        with lock.locked(directory) as new_check:  # on another machine: the first may be dead, as far as this one sees
            assert "taking over from process " in caplog.text
            new_check()
            with pytest.raises(UserError, match="taken over by process .*: this run stops and saves nothing more"):
                check()
    assert not store.objects


@pytest.mark.parametrize("path", ["gs://", "hf://datasets/me/run"])
def test_a_place_that_can_hold_no_lease_is_refused_in_one_line(store, path):
    with pytest.raises(UserError, match=f"--workdir={path} cannot be written: "), lock.locked(epath.Path(path)):
        pass


def test_of_two_that_start_at_once_in_a_store_one_is_refused(store, monkeypatch):
    directory = epath.Path("gs://bucket/run")
    this_process = lock._this_process

    def late() -> bytes:
        store.objects["run/lock"] = (next(store.generations), b"process 7 on far, since then")
        return this_process()

    monkeypatch.setattr(lock, "_this_process", late)
    with pytest.raises(UserError, match="in use by process 7 on far, since then"), lock.locked(directory):
        pass
    assert store.objects["run/lock"][1] == b"process 7 on far, since then"


def test_a_second_training_is_refused_in_one_line_and_hurts_nothing(tmp_path):
    flags = [*TINY_RUN, "--config.steps=100000", f"--workdir={tmp_path}"]
    first = start("train", *flags)
    try:
        wait_for_steps(first, tmp_path, 10)
        _, err = run("train", *flags, code=2)
        (line,) = [line for line in err.splitlines() if line.startswith("error:")]
        assert f"--workdir={tmp_path} is in use by process {first.pid} on " in line
        assert first.poll() is None
        first.send_signal(signal.SIGHUP)  # as TERM, and INT and QUIT: saved, and the same exit code
        out, err = first.communicate(timeout=300)
    finally:
        first.kill()  # or it would train for an hour
    assert first.returncode == 75, err
    assert "start it again to resume" in out


@pytest.mark.parametrize("held", ["drill", "drill/faulty"])  # its run outlives a drill that is killed
def test_a_drill_is_refused_where_another_one_runs(tmp_path, held):
    with lock.file_lock(tmp_path / held):
        before = {*tmp_path.rglob("*")}
        _, err = run("drill", *TINY_RUN, f"--workdir={tmp_path}/drill", code=2)
    assert f"--workdir={tmp_path / held} is in use by process {os.getpid()} on " in err
    assert {*tmp_path.rglob("*")} == before | {tmp_path / "drill" / "lock"}


def test_a_conversion_starts_again_where_one_was_killed_but_not_where_one_runs(tmp_path, trained_run):
    flags = [f"--from={trained_run}", f"--to={tmp_path}/out", "--format=huggingface"]
    (partial := tmp_path / ".out.partial").mkdir()
    (partial / "tokenizer.json").write_text("{}")  # of another model
    (partial / "custom_generate").mkdir()
    holder = os.open(partial, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    _, err = run("convert", *flags, code=2)
    assert f"--to={tmp_path}/out: another `convert` is writing {partial}" in err
    assert len([*partial.iterdir()]) == 2
    os.close(holder)
    run("convert", *flags)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out/tokenizer.json").exists()


def test_a_disk_that_is_full_is_told_by_a_conversion_which_leaves_nothing(tmp_path, trained_run, full_disk):
    run("convert", f"--from={trained_run}", f"--to={tmp_path}/first", "--format=huggingface")
    full_disk(1 << 13)
    back = start("convert", f"--from={tmp_path}/first", f"--to={tmp_path}/ours", "--format=orbax")
    out = start("convert", f"--from={trained_run}", f"--to={tmp_path}/out", "--format=huggingface")
    full_disk(-1)
    for process in (back, out):
        assert re.match("error: .*File too large", process.communicate()[1].splitlines()[-1])
        assert process.returncode == 1
    assert [path.name for path in tmp_path.iterdir()] == ["first"]

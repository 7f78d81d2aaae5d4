"""A run in an object store: a small one of this machine's, which gcsfs and tensorstore take for Google's."""

import json
import time

import pytest
from conftest import TINY_RUN, run
from object_store import ObjectStore

from refusion_jax.runtime import storage
from refusion_jax.training import events

COMPUTED = ("step", "loss", "grad_norm", "tokens")


@pytest.fixture
def store(monkeypatch):
    pytest.importorskip("gcsfs", reason="pip install gcsfs to keep runs in gs://")
    store = ObjectStore()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.url)
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", store.url)
    monkeypatch.setenv("GCE_METADATA_HOST", "localhost:1")  # nobody is there: no one asks for credentials for long
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    yield store
    store.shutdown()
    store.server_close()


def test_a_run_lives_in_an_object_store_and_resumes_from_what_is_whole_there(store, trained_run):
    flags = [*TINY_RUN, "--workdir=gs://bucket/run", "--config.checkpoint.every=20"]
    out, _ = run("train", *flags)
    assert "trained to step 60; the run is in gs://bucket/run" in out
    names = "config.json model.json tokenizer.model metrics.jsonl events.jsonl".split()
    assert {f"run/{name}" for name in names} <= store.objects.keys()
    assert any(name.startswith("run/tensorboard/events.out") for name in store.objects)
    assert any(name.startswith("run/compilation_cache/jit_train_step") for name in store.objects)

    # The last save was cut off: its folder is there, but not the mark that it is whole.
    del store.objects["run/checkpoints/60/commit_success.txt"]
    out, _ = run("train", *flags)
    assert "step 40 of 60" in out
    assert "in 2 sessions" in out
    lines = store.objects["run/metrics.jsonl"][1].decode().splitlines()
    straight = (trained_run / "metrics.jsonl").read_text().splitlines()
    for ours, theirs in zip(map(json.loads, lines), map(json.loads, straight), strict=True):
        assert [ours[key] for key in COMPUTED] == [theirs[key] for key in COMPUTED]
    spent = events.account(events.read_events(store.objects["run/events.jsonl"][1].decode()))
    assert spent["lost"] > 0

    out, _ = run("generate", "--checkpoint=gs://bucket/run", "--prompt=Sort 3 1 2.")
    assert json.loads(out)["tokens"]


class Unreachable:
    """A path in a store that does not answer at first."""

    def __init__(self):
        self.written, self.failures = {}, 1

    def __fspath__(self):
        return "gs://bucket/run"

    def __truediv__(self, name):
        owner = self

        class Target:
            parent = type("Parent", (), {"mkdir": staticmethod(lambda **_: None)})

            def exists(self):
                return name in owner.written

            def read_bytes(self):
                return owner.written[name]

            def write_bytes(self, content):
                if owner.failures:
                    owner.failures -= 1
                    raise OSError("503")
                owner.written[name] = content

        return Target()


def test_logs_of_a_store_that_does_not_answer_are_written_later(monkeypatch, caplog):
    monkeypatch.setattr(storage, "SYNC_SECONDS", 0.05)
    workdir = Unreachable()
    workdir.written["metrics.jsonl"] = b"1\n"
    logs = storage.LogDirectory(workdir)
    with logs.fetch("metrics.jsonl").open("a") as file:
        file.write("2\n")
    logs.sync()
    while workdir.failures or workdir.written["metrics.jsonl"] != b"1\n2\n":
        time.sleep(0.01)
    (logs.path / "tensorboard").mkdir()
    (logs.path / "tensorboard" / "events").write_text("x")
    logs.close()
    assert workdir.written == {"metrics.jsonl": b"1\n2\n", "tensorboard/events": b"x"}
    assert "cannot be written now: 503" in caplog.text
    assert not logs.path.exists()


def test_a_local_directory_is_appended_to_where_it_is(tmp_path):
    logs = storage.LogDirectory(tmp_path)
    assert logs.fetch("metrics.jsonl") == tmp_path / "metrics.jsonl"
    logs.sync()
    logs.close()
    assert list(tmp_path.iterdir()) == []


def test_paths_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert storage.is_remote("gs://bucket/run")
    assert not storage.is_remote(tmp_path)
    assert str(storage.absolute(storage.epath.Path("gs://bucket/run"))) == "gs://bucket/run"
    assert str(storage.absolute(storage.epath.Path("run"))) == str(tmp_path / "run")

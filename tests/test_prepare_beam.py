"""`prepare` on Apache Beam; skipped where it is not installed: pip install -e '.[beam]'."""

import functools
import os
import signal

import psutil
import pytest
from conftest import run, start
from fuzz_inputs import write_files
from helpers import wait_until
from test_prepare import contents, make, words_tokenizer, write_pairs

pytest.importorskip("apache_beam", reason="Apache Beam is not installed: pip install -e '.[beam]'")

from refusion_jax.data import duplicates
from refusion_jax.data.beam import BeamRunner

# Beam's portable runner, a Go program, which it would otherwise download; or none.
PRISM = os.environ.get("REFUSION_PRISM", "")
ON_PRISM = pytest.param(
    ["--runner=PrismRunner", f"--prism_location={PRISM}"],
    marks=pytest.mark.skipif(not PRISM, reason="REFUSION_PRISM names no binary of Beam's Prism"),
)
INTERRUPTED = "error: interrupted; the same command resumes from here\n"
pytestmark = [pytest.mark.filterwarnings("default")]  # Beam has some


def write_source(directory):
    directory.mkdir()
    write_files(directory, 60)
    write_pairs(directory / "pairs.jsonl", 100)
    lines = (directory / "pairs.jsonl").read_text().splitlines(keepends=True)
    (directory / "again.jsonl").write_text("".join(lines[::-2]))


@pytest.mark.parametrize("options", [["--runner=FnApiRunner"], ON_PRISM])  # in this process
def test_beam_writes_the_same_bytes_and_goes_on_from_the_shards_that_are_there(options, tmp_path, monkeypatch, store):
    write_source(tmp_path / "in")
    beam = functools.partial(BeamRunner, options=options, count=1)
    keys = {"shard": 1 << 14, "dedup": True, "held_out": 0.1, "on_error": "skip"}
    make(tmp_path / "in", tmp_path / "local", **keys)
    monkeypatch.setattr(duplicates, "_PARTITION", 8)  # keys compared at a time
    manifest = make(tmp_path / "in", tmp_path / "beam", runner=beam, **keys)
    assert contents(tmp_path / "beam") == contents(tmp_path / "local")
    assert manifest.dropped["duplicate"] >= 50
    make(tmp_path / "in", "gs://bucket/beam", runner=beam, **keys)  # where Beam groups the keys
    kept = {name.removeprefix("beam/"): content for name, (_, content) in store.objects.items()}
    assert {name: content for name, content in kept.items() if content} == contents(tmp_path / "local")
    with pytest.raises(ValueError, match="on_error=skip"):
        make(tmp_path / "in", tmp_path / "mixed", **(keys | {"on_error": "stop"}))
    make(tmp_path / "in", tmp_path / "mixed", runner=beam, **keys)
    assert contents(tmp_path / "mixed") == contents(tmp_path / "local")


@pytest.mark.parametrize(
    ("kill", "how", "said"), [(os.kill, signal.SIGKILL, ""), (os.killpg, signal.SIGINT, INTERRUPTED)]
)
def test_workers_that_have_begun_nothing_end_with_the_pipeline(kill, how, said, tmp_path):
    write_pairs(tmp_path / "pairs.jsonl", 1000)
    flags = [f"--input={tmp_path}/pairs.jsonl", f"--tokenizer={words_tokenizer()}", "--workers=2", "--runner=beam"]
    process = start("prepare", *flags, f"--output={tmp_path}/out")
    children = functools.partial(psutil.Process(process.pid).children, recursive=True)
    wait_until(lambda: len(children()) >= 4, process)  # two workers, each below a shell
    workers = children()
    kill(process.pid, how)
    assert not psutil.wait_procs(workers, timeout=60)[1]
    assert process.communicate(timeout=60)[1] == said


@pytest.mark.slow
def test_a_killed_pipeline_goes_on_where_it_was(tmp_path):
    (tmp_path / "in").mkdir()
    for index in range(4):
        write_pairs(tmp_path / "in" / f"{index}.jsonl", 50_000, index)
    flags = [f"--input={tmp_path}/in", f"--tokenizer={words_tokenizer()}", "--shard_mib=1", "--workers=2", "--dedup"]
    run("prepare", *flags, f"--output={tmp_path}/straight")
    progress = tmp_path / "killed" / ".progress"
    for name, kill, how in (("digests-*", os.kill, signal.SIGKILL), ("done-*", os.killpg, signal.SIGINT)):
        process = start("prepare", *flags, f"--output={tmp_path}/killed", "--runner=beam")
        wait_until(lambda name=name: len(list(progress.glob(name))) >= 3, process)
        kill(process.pid, how)
        _, err = process.communicate()
    assert err == INTERRUPTED  # and nothing of Beam's workers
    assert not (tmp_path / "killed" / "manifest.json").exists()
    run("prepare", *flags, f"--output={tmp_path}/killed", "--runner=beam")
    assert contents(tmp_path / "killed") == contents(tmp_path / "straight")

"""`bench gpu`, as far as it can be tried where there is no GPU: its rehearsal, and its budget of minutes."""

import json
from pathlib import Path

import jax
import pytest
from absl import flags
from conftest import run
from helpers import SHIPPED

from refusion_jax.benchmarks import gpu


def results(output: Path) -> tuple[dict, list[dict]]:
    whole = json.loads((output / "results.json").read_text())
    return whole, whole["records"]


def test_what_does_not_fit_its_minutes_is_skipped_and_told(tmp_path):
    run("bench", "gpu", "--rehearse", "--minutes=0", f"--output={tmp_path / 'out'}")
    whole, records = results(tmp_path / "out")
    assert whole["rehearsal"]
    assert [record["part"] for record in records] == ["logits", "attention", "training tiny", "decoding tiny, batch 2"]
    assert all("0.0 are left" in record["skipped"] for record in records)
    assert "A rehearsal" in (tmp_path / "out" / "section.md").read_text()


def test_a_part_that_fails_is_told_and_the_others_are_measured(tmp_path, monkeypatch, capsys):
    def breaks():
        raise RuntimeError("RESOURCE_EXHAUSTED: out | of\nmemory")

    some = [gpu.Part("first", 0, breaks), gpu.Part("logits", 0, lambda: [{"largest_error": 0.5}])]
    monkeypatch.setattr(gpu, "parts", lambda own: some)
    own = flags.FlagValues()
    gpu.define_flags(own)
    own(["gpu", "--rehearse", f"--output={tmp_path / 'out'}"])
    gpu.main(own)
    _, records = results(tmp_path / "out")
    assert records[0]["failed"] == "RuntimeError: RESOURCE_EXHAUSTED: out | of\nmemory"
    assert json.loads(capsys.readouterr().out.splitlines()[1]) == records[1]
    section = (tmp_path / "out" / "section.md").read_text()
    assert "| first | RuntimeError: RESOURCE_EXHAUSTED: out / of memory |" in section
    assert "| part | largest error |\n| --- | --- |\n| logits | 0.5 |" in section


def test_the_use_of_several_devices_is_that_of_their_peaks_together(monkeypatch):
    monkeypatch.setattr(gpu, "peak_flops", lambda kind: 1e12)
    monkeypatch.setattr(gpu, "step_costs", lambda config: (2.0, 8e12))
    assert gpu.trained("tiny")[0]["mfu"] == 4 / jax.device_count() == 0.5


@pytest.mark.slow
def test_the_rehearsal_measures_every_part(tmp_path):
    asked = ("--rehearse", "--minutes=30", f"--checkpoint={SHIPPED / 'model'}", f"--output={tmp_path / 'out'}")
    run("bench", "gpu", *asked)
    _, records = results(tmp_path / "out")
    assert not [record for record in records if "failed" in record or "skipped" in record]
    by_part = {record["part"]: record for record in records}
    assert by_part["logits"]["largest_error"] < 1e-5
    errors = [value for name, value in by_part["attention"].items() if name.endswith("_error")]
    assert 0 < max(errors) < 0.02
    assert len(errors) == 4
    assert by_part["answers"]["same"] == 1
    assert by_part["training tiny"]["tokens_per_second"] > 0
    assert by_part["decoding tiny, batch 2"]["tokens_per_second"] > 0
    section = (tmp_path / "out" / "section.md").read_text()
    assert section.count("| tiny |") == 4  # training, two decoders, and one of them in int8

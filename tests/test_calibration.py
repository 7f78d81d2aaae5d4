"""What published runs say of our estimates: how well they are predicted, and that `plan` uses what follows."""

import importlib.util
import json
import statistics

import pytest
from conftest import run

from refusion_jax.benchmarks import calibration
from refusion_jax.benchmarks.calibration import calibrate, left_out_errors, read_runs
from refusion_jax.distributed.chips import CHIPS, find_chip
from refusion_jax.planning.compiler import prepare_environment

RUNS = read_runs()


def test_a_published_run_is_predicted_from_the_others():
    errors = left_out_errors(RUNS)
    assert len(errors) >= 20
    assert statistics.mean(map(abs, errors.values())) <= 0.04
    assert max(map(abs, errors.values())) <= 0.1


def test_chips_have_the_calibration_that_follows_from_the_runs():
    found = calibrate(RUNS)
    assert set(CHIPS) == set(found)
    for name, own in found.items():
        written = CHIPS[name].calibration
        assert written.runs == own.runs
        assert (written.factor, written.spread) == pytest.approx((own.factor, own.spread), abs=1e-3), name


def test_nearly_all_runs_lie_within_the_spread_of_the_others():
    outside = [name for name, error in left_out_errors(RUNS).items() if abs(error) > _spread(name)]
    assert len(outside) <= 1


def _spread(name: str) -> float:
    (topology,) = [r.topology for r in RUNS if r.name == name]
    return find_chip(topology).calibration.spread


def test_a_factor_comes_from_the_ratios_and_a_single_run_gives_none():
    first, second = [r for r in RUNS if r.generation == "v4"]
    (found,) = calibrate([first, second]).values()
    ratios = [r.seconds / r.expected for r in (first, second)]
    assert found.factor == pytest.approx(statistics.geometric_mean(ratios))
    assert found.spread > max(ratios) / found.factor - 1
    assert left_out_errors([first]) == {}


def test_runs_are_written_as_they_are_read(tmp_path, monkeypatch):
    (tmp_path / calibration.FILE).write_text(calibration.write_runs(RUNS))
    monkeypatch.setattr(calibration.resources, "files", lambda package: tmp_path)
    assert read_runs() == RUNS


def test_bench_calibration_prints_every_run_and_every_generation():
    out, _ = run("bench", "calibration")
    records = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [r["run"] for r in records if "run" in r] == [r.name for r in RUNS]
    factors = {r["generation"]: r["factor"] for r in records if "generation" in r}
    assert factors == {name: own.factor for name, own in calibrate(RUNS).items()}
    assert records[-1]["left_out_worst"] <= 0.1


@pytest.mark.slow
@pytest.mark.tpu_compile
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler: pip install libtpu")
@pytest.mark.parametrize("published", RUNS, ids=lambda r: r.name)
def test_stored_counts_are_those_of_our_programs(published):
    prepare_environment()
    assert calibration.compiled_again(published).expected == pytest.approx(published.expected, rel=0.02)

"""Benchmarks without their machines: estimates of published runs and by hand, a rehearsal of `bench gpu`."""

import itertools
import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from conftest import run, tiny_config
from helpers import SHIPPED, flags_of, scored

from refusion_jax.benchmarks import calibration, decode, gpu
from refusion_jax.benchmarks.calibration import calibrate, left_out_errors, read_runs
from refusion_jax.benchmarks.headline.results import BatchEstimate, Scored, TpuEstimate
from refusion_jax.benchmarks.headline.tpu_estimates import BATCH_SIZES, forward_costs, tpu_estimates
from refusion_jax.checkpoints.load import load_model
from refusion_jax.cli.errors import UserError
from refusion_jax.distributed.chips import CHIPS, find_chip
from refusion_jax.model import huggingface
from refusion_jax.planning.compiler import Compiled

RUNS = read_runs()


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


def test_bench_calibration_prints_every_run_and_every_generation_and_how_well_a_run_is_predicted_from_the_others():
    out, _ = run("bench", "calibration")
    *records, summary = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [r["run"] for r in records if "run" in r] == [r.name for r in RUNS]
    factors = {r["generation"]: r["factor"] for r in records if "generation" in r}
    assert factors == {name: own.factor for name, own in calibrate(RUNS).items()}
    assert summary["runs"] >= 20
    assert summary["left_out_mean"] <= 0.04
    assert summary["left_out_worst"] <= 0.09


@pytest.mark.parametrize(("gib", "overrun"), [(9999, ""), (1, "out of memory")])
def test_a_run_that_does_not_fit_is_not_counted_again(monkeypatch, gib, overrun):
    """The compiler would compute more in it, to need less memory, than the program that ran."""
    compiled = Compiled(0, 0, gib << 30, 0, module=None, seconds=0, cpu_seconds=None, overrun=overrun)
    monkeypatch.setattr(calibration, "compile_program", lambda *_, **__: compiled)
    monkeypatch.setattr(calibration, "tpu_devices", lambda *_: [None] * 64)
    with pytest.raises(UserError, match=rf"^{re.escape(RUNS[0].name)} does not fit: {gib}\.0 GiB"):
        calibration.compiled_again(RUNS[0])


@pytest.mark.slow
@pytest.mark.tpu_compile
@pytest.mark.usefixtures("tpu_compiler")
@pytest.mark.parametrize("published", RUNS, ids=lambda r: r.name)
def test_stored_counts_are_those_of_our_programs(published):
    assert calibration.compiled_again(published).expected == pytest.approx(published.expected, rel=0.02)


MODEL = tiny_config(hidden_size=1024, intermediate_size=4096, vocab_size=32_768, num_hidden_layers=8)
CHIP = find_chip("v5e:2x4")
WEIGHTS = 8 * 1024 * (32 + 32 + 32) + 8 * 3 * 1024 * 4096 + 32_768 * 1024  # attention, mlp, output head


def test_one_token_per_forward_is_bound_by_weights_at_batch_1():
    costs = forward_costs(MODEL, rows=1, places=1, context=100)
    assert costs.weight_bytes == 2 * WEIGHTS
    assert costs.seconds(CHIP) == pytest.approx(2 * WEIGHTS / CHIP.hbm_bandwidth, rel=0.01)


def test_a_large_batch_is_bound_by_arithmetic():
    costs = forward_costs(MODEL, rows=4096, places=16, context=0)
    attention = 8 * 2 * 2 * 4 * 8 * 16 * 16  # layers, products, FLOPs, heads, head size, queries, keys
    assert costs.weight_flops + costs.attention_flops == 4096 * (2 * 16 * WEIGHTS + attention)
    assert costs.seconds(CHIP) == pytest.approx(4096 * 2 * 16 * WEIGHTS / CHIP.peak_flops, rel=0.01)


def test_chips_share_the_work_and_wait_for_each_other():
    alone, shared = (forward_costs(MODEL, 64, 16, 100, chips) for chips in (1, 2))
    for name in ("weight_flops", "weight_bytes", "attention_flops", "cache_bytes"):
        assert getattr(shared, name) == getattr(alone, name) / 2
    assert not alone.network_bytes
    assert shared.network_bytes == (2 * 8 + 1) * 2 * (64 * 16 * 1024 * 2) / 2  # each value there and back


def point(settings: str, **counts: float) -> Scored:
    return scored(settings=settings, **{"tokens": 200, "prompt_tokens": 20.0} | counts)


def batches(*points: Scored) -> list[BatchEstimate]:
    """The estimates on a v5e:2x4, by batch size."""
    return tpu_estimates(list(points), problems=10)[0].batches


@pytest.mark.parametrize("name", ["forwards", "width", "prompt_tokens"])
def test_more_work_is_never_faster(name):
    found = [batches(point("", **{"forwards": 20, "width": 16, name: amount})) for amount in (1, 2, 16, 100, 1000)]
    for estimates in zip(*found, strict=True):
        speeds = [estimate.tokens_per_second for estimate in estimates]
        assert speeds == sorted(speeds, reverse=True)


def test_a_larger_batch_is_never_slower_and_the_advantage_of_few_forwards_ends():
    found = batches(point("four tokens per forward", forwards=50, width=16))
    for key in ("tokens_per_second", "one_token_per_forward"):
        speeds = [getattr(estimate, key) for estimate in found]
        assert all(before <= after * 1.001 for before, after in itertools.pairwise(speeds))
    assert found[0].speedup == pytest.approx((20 + 1) / (5 + 1), rel=0.05)  # the prefill counts as one
    assert found[-1].speedup < 1  # at four places per token


def test_the_fastest_setting_of_a_decoder_counts_at_every_batch_size():
    few, many = point("few forwards", forwards=20, width=64), point("few places", forwards=80, width=4)
    best = batches(few, many)
    for i, batch in enumerate(best):
        assert batch.tokens_per_second == max(batches(p)[i].tokens_per_second for p in (few, many))
    assert (best[0].settings, best[-1].settings) == ("few forwards", "few places")
    assert [batch.batch_size for batch in best] == list(BATCH_SIZES)
    assert best[0].tokens_per_forward == 10


def test_an_advantage_ends_where_it_is_first_lost():
    first, *_ = batches(point("", forwards=20, width=16))
    found = [replace(first, batch_size=2**i, speedup=x) for i, x in enumerate((3.0, 2.0, 1.0, 1.1))]
    whole = TpuEstimate(system="s", start="", decoder="d", model="8b", topology="v5e:2x4", batches=found)
    assert whole.faster_up_to == 2
    assert replace(whole, batches=found[2:]).faster_up_to == 0


def test_first_drafts_in_the_prefill_are_not_free():
    """20 tokens by one forward, their drafts made in the prefill: twice the weights are read, not once."""
    first, *_ = batches(point("drafts of the prefill", forwards=10, width=1))
    assert first.tokens_per_forward == 20
    assert first.speedup == pytest.approx((20 + 1) / 2, rel=0.05)


def results(output: Path) -> tuple[dict, list[dict]]:
    whole = json.loads((output / "results.json").read_text())
    return whole, whole["records"]


def test_what_does_not_fit_the_minutes_of_bench_gpu_is_skipped_and_told(tmp_path):
    run("bench", "gpu", "--rehearse", "--minutes=0", f"--output={tmp_path / 'out'}")
    whole, records = results(tmp_path / "out")
    assert whole["rehearsal"]
    assert [record["part"] for record in records] == ["logits", "attention", "training tiny", "decoding tiny, batch 2"]
    assert all("0.0 are left" in record["skipped"] for record in records)


def test_a_part_of_bench_gpu_that_fails_is_told_and_the_others_are_measured(tmp_path, monkeypatch, capsys):
    def breaks():
        raise RuntimeError("RESOURCE_EXHAUSTED: out of\nmemory")

    some = [("first", 0, breaks), ("logits", 0, lambda: [{"largest_error": 0.5}])]
    monkeypatch.setattr(gpu, "parts", lambda own: some)
    gpu.main(flags_of(gpu, "--rehearse", f"--output={tmp_path / 'out'}"))
    _, records = results(tmp_path / "out")
    assert records[0]["failed"] == "RuntimeError: RESOURCE_EXHAUSTED: out of\nmemory"
    assert json.loads(capsys.readouterr().out.splitlines()[1]) == records[1]
    assert records[1]["largest_error"] == 0.5


def test_a_checkpoint_is_decoded_by_the_decoders_of_its_system_and_lines_of_prompts_as_they_ask(tmp_path, monkeypatch):
    model = load_model(SHIPPED / "model")
    huggingface.save(model, tmp_path / "theirs", objective="dream")
    line = {"prompt_ids": [5, 6], "template": [[7], 4, [8]], "decode": {"seed": 3}}  # setups, not lines, say how
    (tmp_path / "prompts.jsonl").write_text(json.dumps(line))
    measured = []
    monkeypatch.setattr(decode, "measure", lambda model, *given: measured.append(given) or [])
    flags = [f"--checkpoint={tmp_path / 'theirs'}", "--batch_sizes=1", f"--prompts={tmp_path / 'prompts.jsonl'}"]
    decode.main(flags_of(decode, *flags))
    ((setups, (request,), *_),) = measured
    assert [*setups] == ["dream"]
    assert (request.prompt, request.template, request.settings) == ([5, 6], ([7], 4, [8]), None)


def test_a_decoder_may_be_named_as_for_generate_and_a_setting_that_no_setup_has_is_told(monkeypatch, caplog):
    measured = []
    monkeypatch.setattr(decode, "measure", lambda model, setups, *_: measured.append(setups) or [])
    flags = ["--decode.method=sequential", "--decode.slot_size=4", "--decode.steps=3"]
    decode.main(flags_of(decode, *flags, "--batch_sizes=1,8"))
    assert [(*setups, setups["sequential"].slot_size) for setups in measured] == 2 * [("sequential", 4)]
    assert caplog.messages == ["--decode.steps has no effect: no setup has it"]
    with pytest.raises(UserError, match="--decode.method=sequential: --setup names the decoders"):
        decode.main(flags_of(decode, *flags, "--setup=refusion"))


def test_a_drafter_is_measured_with_its_model_and_of_a_template_only_what_is_decoded(tmp_path, monkeypatch, capsys):
    model = load_model(SHIPPED / "model")
    for objective in ("ar", "idlm"):
        huggingface.save(model, tmp_path / objective, objective=objective)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt_ids": [5, 6], "template": [[7] * 9, 4, [8] * 9]}))

    def measured(checkpoint: Path, *flags: str) -> dict:
        flags = [*flags, "--batch_sizes=1", "--repeats=1", "--prompt_length=4", "--decode.max_new_tokens=4"]
        decode.main(flags_of(decode, f"--checkpoint={checkpoint}", *flags))
        return json.loads(capsys.readouterr().out.splitlines()[0])

    drafted = measured(tmp_path / "ar", f"--setup=pard drafter={tmp_path / 'idlm'} draft_length=2")
    assert drafted["bytes"] > 2 * model.weight_bytes
    filled = measured(SHIPPED / "model", "--setup=sequential slot_size=4", f"--prompts={tmp_path / 'prompts.jsonl'}")
    assert filled["tokens_per_forward"] * filled["forwards"] == pytest.approx(4)


def test_answers_that_the_prefill_writes_have_no_forward_that_could_be_measured(monkeypatch):
    flags = ["--setup=dense slot_size=4", "--batch_sizes=1", "--repeats=1", "--prompt_length=4"]
    with pytest.raises(UserError, match="--setup='dense slot_size=4': the prefill writes all .*max_new_tokens"):
        decode.main(flags_of(decode, *flags, "--decode.max_new_tokens=1"))


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
    assert [record["size"] for record in records if "size" in record] == ["tiny"] * 4  # training, three setups decode

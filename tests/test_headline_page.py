"""The page of `bench headline` follows from the figures."""

import json
import math
import re
from dataclasses import replace

import pytest
from helpers import load_config, scored

from refusion_jax import UserError
from refusion_jax.benchmarks.headline import comparison, report
from refusion_jax.benchmarks.headline.curves import curves, fastest_points, under_parallelism
from refusion_jax.benchmarks.headline.results import Logged, Results, Scored, Timed, Trained, from_json, to_json
from refusion_jax.benchmarks.headline.tpu_estimates import tpu_estimates
from refusion_jax.systems.interface import Claim

CONFIGS = load_config("headline")


def point(system: str, settings: str, accuracy: float, speed: float, seed: int = 0, start: str = "") -> Scored:
    about = {"system": system, "start": start, "decoder": system, "seed": seed, "settings": settings}
    about |= {"accuracy": accuracy, "families": {"sum": accuracy}}
    return scored(**about, tokens_per_second={"1": speed, "16": 2 * speed}, same_text=1.0, load=1.0, where="here")


def timed(points: list[Scored], drift: float = 0.5) -> list[Timed]:
    """The record of three repeats at all points; in the second one the machine is slower by this factor."""
    same = ("system", "start", "decoder", "seed", "settings", "commit", "where")
    return [
        Timed(
            **{name: getattr(p, name) for name in same},
            load=1.0,
            tokens_per_second={size: [speed, drift * speed, speed] for size, speed in p.tokens_per_second.items()},
        )
        for p in points
    ]


def test_accuracy_under_parallelism_is_the_weighted_area_of_the_paper():
    reached = {1.0: 0.8, 3.0: 0.76, 2.0: 0.8, 4.0: 0.74}  # the last one is too far below the first
    points = [replace(point("card", f"s={n}", y, 1.0), tokens_per_forward_with_prefill=n) for n, y in reached.items()]
    (curve,) = curves(Results({}, points=points))
    assert under_parallelism(curve, 0.8) == pytest.approx(80 + 80 + (80 + 76 * math.exp(-0.15)) / 2)
    assert under_parallelism(curve, 0.0) == 80


def test_what_was_adapted_is_compared_with_what_was_adapted():
    points = [
        point("refusion", "", 0.5, 100.0),
        point("refusion", "", 0.8, 100.0, start="ar"),
        point("llada", "", 0.4, 10.0),
        point("llada", "", 0.6, 5.0, start="ar"),
    ]
    names = [curve.name for curve in curves(results_of(points))]
    assert names == ["refusion", "refusion from ar", "llada", "llada from ar"]
    told = report.claims(curves(results_of(points)))
    assert "| refusion | llada | their own | 1.34x | 1.25x | 18.00x | 10.00x | no |" in told
    assert "| refusion from ar | llada from ar | their own | 1.34x | 1.33x | 18.00x | 20.00x | no |" in told


def results_of(points: list[Scored], **others: list[Timed]) -> Results:
    """Results with these points, all of them timed."""
    return Results({}, points=points, **{"timings": timed(points)} | others)


RESULTS = results_of(
    [
        point("refusion", "careful", 0.80, 100.0, 0),
        point("refusion", "careful", 0.84, 120.0, 1),
        point("refusion", "fast", 0.81, 300.0, 0),
        point("refusion", "fast", 0.82, 300.0, 1),
        point("refusion", "too_fast", 0.70, 900.0, 0),
        point("refusion", "too_fast", 0.70, 900.0, 1),
        point("llada", "", 0.50, 10.0),
        replace(point("ar", "", 0.80, 400.0), load=9.0),
        point("card", "", 0.50, 720.0),
        point("refusion", "", 0.88, 600.0, start="ar"),
    ]
)


def test_a_decoder_is_shown_at_its_fastest_within_a_percent_of_its_best():
    own, *_ = curves(RESULTS)
    shown = own.fastest("1")
    assert shown.settings == "fast"
    assert (shown.accuracy.least, shown.accuracy.most) == (0.81, 0.82)


def test_a_setting_is_chosen_by_some_problems_and_scored_on_others():
    tests = [point("refusion", "fast", accuracy, 1.0, seed) for seed, accuracy in enumerate((0.5, 0.6))]
    own, *_ = curves(replace(RESULTS, tests=tests))
    chosen = own.fastest("1")
    assert chosen.settings == "fast"
    assert chosen.accuracy == (0.5, 0.6)
    assert chosen.of_family("sum") == (0.5, 0.6)
    assert chosen.speed["1"] == (300.0, 300.0)  # the time is that of the problems that chose it
    told = report.claims(curves(replace(RESULTS, tests=tests)))
    assert "| refusion | llada | their own | 1.34x | 1.10x |" in told


def test_at_the_cost_of_larger_weights_a_claim_is_checked_at_what_is_fastest_there():
    speeds = {"careful": [50.0, 70.0], "fast": [40.0, 20.0], "": [2.0, 2.0]}
    slow = [
        replace(record, shape="640x12", parameters=58_700_000, tokens_per_second={"1": speeds[record.settings]})
        for record in timed(RESULTS.points[:7])
        if record.settings != "too_fast"
    ]
    tests = [point("refusion", settings, score, 1.0) for settings, score in (("fast", 0.5), ("careful", 0.8))]
    results = replace(RESULTS, proxy_timings=slow, tests=tests)
    told = report.claims(curves(results))
    assert "| refusion | llada | their own | 1.34x | 1.00x | 18.00x | 30.00x | no |" in told
    assert "| refusion | llada | of the speed proxy | 1.34x | 1.60x | 18.00x | 30.00x | yes |" in told
    assert "| refusion | ar | of the speed proxy |" not in told  # which was not timed there


@pytest.mark.parametrize(
    ("claim", "holds"),
    [
        (Claim("llada", accuracy=1.34, speed=18.0), True),
        (Claim("llada", accuracy=1.34, speed=31.0), False),
        (Claim("llada", accuracy=1.7, speed=18.0), False),
        (Claim("ar", accuracy=0.98, speed=0.7), True),
        (Claim("ar", accuracy=0.98, speed=2.33), False),
    ],
)
def test_a_claim_holds_if_both_of_its_parts_do(claim, holds):
    by_name = {curve.name: curve for curve in curves(RESULTS)}
    pair = by_name["refusion"], by_name[claim.rival]
    points = [curve.fastest("1") for curve in pair]
    assert report.verdict(claim, *points, pair[0].times_as_fast(pair[1], "1"))[0] is holds


@pytest.mark.parametrize(("own", "rival", "holds"), [(1.0, 0.995, True), (0.0, 0.0, False)])
def test_what_both_have_at_the_ceiling_needs_no_multiple_and_what_nobody_has_is_none(own, rival, holds):
    points = [point("refusion", "", own, 200.0), point("llada", "", rival, 10.0)]
    fastest = (curve.fastest("1") for curve in curves(results_of(points)))
    assert report.verdict(Claim("llada", accuracy=1.34, speed=18.0), *fastest, speed=20.0)[0] is holds


def test_a_machine_that_slows_down_changes_no_ratio_of_what_is_timed_timed():
    steady, drifting = (timed(RESULTS.points, drift) for drift in (1.0, 0.1))
    (ar,) = (record for record in drifting if record.system == "ar")
    ar.tokens_per_second["1"][2] *= 0.2  # something else ran in one repeat of one decoder
    for records in (steady, drifting):
        by_name = {curve.name: curve for curve in curves(replace(RESULTS, timings=records))}
        assert by_name["refusion"].times_as_fast(by_name["ar"], "1") == pytest.approx(300 / 400)
        assert by_name["refusion"].times_as_fast(by_name["llada"], "16") == pytest.approx(300 / 10)


def test_a_stored_record_is_read_with_the_fields_that_it_has_and_one_that_is_wrong_is_named():
    (record,) = timed(RESULTS.points[:1])
    for stored, kind in ((to_json(RESULTS.points[0]), Scored), (to_json(record), Timed)):
        assert to_json(from_json(stored | {"of_another_version": 1}, kind)) == stored
    assert "shape" not in to_json(record)
    content = json.loads(replace(RESULTS, about={"budget": "small"}).as_json())
    assert [from_json(stored, Scored) for stored in content["points"]] == RESULTS.points
    with pytest.raises(UserError, match="load: Input should be a valid number"):
        from_json(to_json(record) | {"load": "1"}, Timed)


def test_what_the_page_shows_is_timed_in_interleaved_repeats_once():
    some = [point("ar", "", 0.8, 400.0), point("card", "wide", 0.8, 300.0), point("card", "deep", 0.8, 200.0)]
    some[2].tokens_per_second["16"] = 900.0
    entries = fastest_points(curves(results_of(some)), ("1", "16"))
    assert [(curve.system, p.settings) for curve, p in entries] == [("ar", ""), ("card", "wide"), ("card", "deep")]
    assert len(fastest_points(curves(results_of(some)), ("1",))) == 2


def test_the_page_has_the_rates_that_were_tried():
    how = {"name": "ar_seed0", "command": "train", "learning_rate": 0.1, "seconds": 1.0, "tokens": 10, "commit": "abc"}
    losses = [Logged(step=i, tokens=1_000_000 * i, eval_bits_per_byte=0.5 / i) for i in (1, 2)]
    run_of = Trained(system="ar", start="", seed=0, losses=losses, **how)
    bound = [
        Logged(step=2, tokens=tokens, eval_bits_per_byte=bits, eval_bits_per_byte_is_bound=True)
        for tokens, bits in ((2_010_000, 0.5), (1_990_000, 0.7))
    ]
    begun = [run_of, *(replace(run_of, system="llada", losses=[own]) for own in bound)]
    begun += [
        replace(run_of, system=name, losses=[Logged(step=1, tokens=5, loss=1.0)]) for name in ("refusion", "card")
    ]
    adapted = [Logged(step=1, tokens=1_000_000, eval_bits_per_byte=0.3)]
    continued = replace(run_of, system="refusion", start="ar", losses=adapted)
    estimates = tpu_estimates([replace(point("card", "s=1", 0.5, 1.0), decoder="ar")], problems=4)
    about = {
        "budget": "small",
        "command": "the command",
        "machine": {"cores": 2, "processor": "P", "device": "cpu", "memory_gib": 4},
        "versions": {"jax": "0"},
        "config": json.loads(CONFIGS("small").to_json()),
        "problems": 4,
        "timed": 3,
        "new_tokens": 32,
    }
    whole = replace(
        RESULTS,
        about=about,
        runs=[*begun, comparison._continued(run_of, continued)],
        sweep=[replace(run_of, losses=[Logged(step=1, tokens=5, eval_loss=0.5)])],
        tpu_estimates=estimates,
    )
    assert "### Plots" not in report.report(whole)
    page = report.report(whole, ["plots/speed.svg"])
    assert '<img src="plots/speed.svg"' in page.partition("### Plots")[2]
    (estimate,) = re.findall(r"^\| card by ar \| s=1 \| 4\.00 \|.*\|$", page.partition("v5p:2x2x1")[0], re.M)
    assert [float(x) for x in re.findall(r"\(([\d.]+)x\)", estimate)] == [
        float(f"{b.speedup:.2f}") for b in estimates[0].batches if b.batch_size in (1, 4, 16, 64, 256)
    ]
    assert "| refusion | 2 | 81.5% (81.0% to 82.0%) | 2.00 (2.00 to 2.00) | 1.75 |" in page
    assert "| ar | 0.1 | 0.5000 |" in page
    assert "| system | 1.00 M tokens | 2.00 M tokens |" in page
    assert "* ar has reached the final 0.600 of llada after 1.00 M tokens, or before." in page
    assert "| llada |  | ≤ 0.600 |" in page
    assert "| refusion from ar |  | 0.300 |" in page
    conclusion = " ".join(page.split())
    assert (
        "1 prompt at a time, each decoder at its fastest setting within 1 percentage point of its own best, the "
        "Pareto front of exact match and tokens per second is refusion from ar (88.0%, 500 tokens/s), card (50.0%, 600 "
        "tokens/s)."
    ) in conclusion
    beaten = "* refusion, 1 at a time (81.5%): at least as accurate and as fast are refusion from ar (88.0%, 2.00x the"
    assert beaten in conclusion
    assert "Other work shared the machine" in page
    quiet = replace(whole, points=[replace(p, load=1.0) for p in whole.points])
    assert "Other work shared" not in report.report(quiet)
    moved = replace(whole, points=[replace(whole.points[0], where="there"), *whole.points[1:]])
    assert "Speeds were measured in several places and do not compare: here; there." in report.report(moved)

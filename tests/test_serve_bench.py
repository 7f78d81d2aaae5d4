"""`bench serve`: a real server under a small load."""

import json

from conftest import run


def test_every_client_gets_the_same_answers(trained_run):
    flags = ["--clients=1,3", "--requests=8", "--rows=4", "--setup=refusion slot_size=4"]
    out, _ = run("bench", "serve", f"--checkpoint={trained_run}", *flags)
    loads = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [(load["clients"], load["how"]) for load in loads] == [
        (n, how) for n in (1, 3) for how in ("whole", "stream")
    ]
    for load in loads:  # the same problems, and so the same answers
        assert (load["requests"], load["tokens"], load["accuracy"]) == (8, loads[0]["tokens"], loads[0]["accuracy"])
        assert 0 < load["first_ms"] <= load["whole_ms"] <= load["whole_ms_95"]
        assert load["of_decode"] > 0


def test_requests_arrive_at_random_and_goodput_is_the_share_in_time(trained_run):
    flags = ["--rate=50", "--requests=12", "--rows=4", "--setup=refusion slot_size=4"]
    out, _ = run("bench", "serve", f"--checkpoint={trained_run}", *flags, "--slo_first_ms=1e6", "--slo_between_ms=1e6")
    (load,) = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert (load["requests"], load["goodput"]) == (12, 1)
    assert 0 < load["first_ms"] <= load["whole_ms"]


def test_what_cannot_be_served_is_refused_before_anything_is_started(trained_run):
    for flag, said in (("--setup=ar", "--setup='ar': "), ("--clients=0", "--clients=0")):
        _, err = run("bench", "serve", f"--checkpoint={trained_run}", flag, code=2)
        assert said in err

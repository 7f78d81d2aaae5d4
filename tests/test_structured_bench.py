"""`bench structured`: answers under a grammar, with drafts and one token at a time."""

import json

import pytest
from conftest import run

pytest.importorskip("llguidance", reason="pip install llguidance for answers under a grammar")


@pytest.mark.slow  # what it states of answers, test_structured.py does
def test_drafts_change_no_answer_and_save_forwards(trained_run):
    flags = ["--setup=refusion slot_size=4", "--requests=4", "--rows=2", "--repeats=1"]
    out, _ = run("bench", "structured", f"--checkpoint={trained_run}", *flags)
    records = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    found = {(record["weights"], record["how"]): record for record in records}
    for weights in ("trained", "random"):
        drafts, plain = found[weights, "drafts"], found[weights, "one by one"]
        assert (drafts["valid"], plain["valid"]) == (1, 1)
        assert drafts["tokens"] == plain["tokens"]
        assert drafts["tokens_per_forward"] > plain["tokens_per_forward"] == 1
    assert found["random", "free"]["valid"] == 0

"""Malformed calls of every command: one line, exit code 2, nothing changed on disk.

REFUSION_FUZZ_CASES=10000 REFUSION_FUZZ_SEED=7 runs more of them, and others.
"""

import os
import shutil
from pathlib import Path

import pytest
from conftest import FORKS, run
from fuzz_commands import Calls

CASES = int(os.environ.get("REFUSION_FUZZ_CASES", "120"))
SEED = int(os.environ.get("REFUSION_FUZZ_SEED", "0"))
SECONDS = 20  # of processor time; on the clock a busy machine may take more


@pytest.fixture(scope="module")
def good(trained_run, tmp_path_factory) -> tuple[Path, Path, Path]:
    """A trained run, rows that `prepare` wrote, and a Hugging Face directory."""
    directory = tmp_path_factory.mktemp("good")
    (directory / "in.jsonl").write_text('{"query": "Sort 3 1 2.", "response": "1 2 3"}\n' * 20)
    tokenizer = f"--tokenizer={trained_run}/tokenizer.model"
    run(
        "prepare",
        f"--input={directory}/in.jsonl",
        f"--output={directory}/rows",
        tokenizer,
        "--row_length=64",
        "--workers=1",
    )
    run("convert", f"--from={trained_run}", f"--to={directory}/exported", "--format=huggingface")
    return trained_run, directory / "rows", directory / "exported"


def contents(directory: Path) -> dict[Path, tuple]:
    return {p: (p.lstat().st_mode, p.lstat().st_size, p.lstat().st_mtime_ns) for p in directory.rglob("*")}


def fault(answer: dict, changed: bool) -> str | None:
    lines = answer["err"].splitlines()
    if "Traceback" in answer["err"] + answer["out"]:
        return "a traceback"
    if answer["code"] not in (0, 2):
        return f"exit code {answer['code']}"
    if answer["cpu"] > SECONDS:
        return f"{answer['cpu']:.0f} s"
    if answer["code"] == 2 and (len(lines) != 1 or not lines[0].startswith("error: ")):
        return f"{len(lines)} lines"
    if answer["code"] == 2 and changed:
        return "something changed on disk"
    return None


@pytest.mark.thorough
def test_malformed_calls_end_in_one_line_and_change_nothing(good, tmp_path):
    calls, found, codes, cpu = Calls(*good, SEED), [], {}, 0.0
    for case in range(CASES):
        directory = tmp_path / f"{case:05}"
        command, flags = calls.make(directory)
        before = contents(directory)
        answer = FORKS.ask(command, flags, os.environ | {"JAX_PLATFORMS": "cpu"}, 10 * SECONDS)
        if why := fault(answer, contents(directory) != before):
            found.append(f"{case} {why}: {command} {' '.join(flags)!r}\n{answer['err'][-600:]}")
        else:
            shutil.rmtree(directory)
        codes[answer["code"]] = codes.get(answer["code"], 0) + 1
        cpu += answer["cpu"]
    print(f"{CASES} calls: {codes}, {cpu:.0f} s of processor time, {len(found)} faults")
    assert not found, "\n".join(found)
    assert codes[2] > CASES / 2

"""Malformed calls of every command: one line, exit code 2, nothing changed on disk.

REFUSION_FUZZ_CASES=10000 REFUSION_FUZZ_SEED=7 runs more of them, and others.
"""

import functools
import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
from conftest import FORKS, TINY_RUN, run
from fuzz_inputs import damaged, write_files

from refusion_jax.config.keys import keys as config_keys
from refusion_jax.systems.api import all_settings

CASES = int(os.environ.get("REFUSION_FUZZ_CASES", "120"))
SEED = int(os.environ.get("REFUSION_FUZZ_SEED", "0"))
SECONDS = 20  # of processor time; on the clock a busy machine may take more


@pytest.fixture(scope="module")
def good(trained_run, tmp_path_factory) -> tuple[Path, Path, Path]:
    """A trained run, rows that `prepare` wrote, and a Hugging Face directory."""
    directory = tmp_path_factory.mktemp("good")
    (directory / "in.jsonl").write_text('{"query": "Sort 3 1 2.", "response": "1 2 3"}\n' * 20)
    flags = [f"--input={directory}/in.jsonl", f"--output={directory}/rows", "--row_length=64", "--workers=1"]
    run("prepare", *flags, f"--tokenizer={trained_run}/tokenizer.model")
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


NASTY = [
    *("", " ", "-1", "0", "1", "2", "-0", "1.5", "1e-400", "1e999", "nan", "inf", "-inf", "9" * 20, "9" * 5000, "0x10"),
    *(*"None True x".split(), "x" * 300, "a/" * 3000, *"[ (1, (1,2) {}".split()),
    *("\n", "\t\x1b[31m", "\udcff", "ü\u2028", "%s"),
    *"/dev/null / . .. /proc/self/mem /nowhere/at/all gs: :// - -- = * [! ~root".split(),
    *"v5p:0x0x0 v5p: v5e:9999x9999 v5p:2x2x2x2 v9:2x2 1e9 4294967296 18446744073709551616".split(),
]


@functools.cache
def flags_of(command: str) -> list[str]:
    """The flags in the help of a command, with all decode settings and config keys, and some that are none."""
    part = ["decode"] if command == "bench" else []
    names = {*re.findall(r"^  --(\S+)$", run(command, *part, "--help")[0], re.MULTILINE), "promtp"} - {"traceback"}
    if "decode.method" in names:
        names |= {f"decode.{name}" for name in all_settings()}
    if "config" in names:
        names |= {f"config.{name}" for name in (*config_keys(), "x")}
    return sorted(names)


MADE = "from refusion_jax.config import default_config\ndef get_config():\n  c = default_config()\n  c.unlock()\n"
CONFIGS = [
    *("raise SystemExit(0)", "x = 1", "def get_config(:", "1 / 0", "\0", "def get_config():\n  return get_config()"),
    *("def get_config():\n  return None", "def get_config():\n  return {}", "import nothing_of_this_name"),
    *(
        f"{MADE}  {line}\n  return c"
        for line in (
            *("c.x = 1", "c.steps = 'x'", "c.mesh = 3", "del c.model", "c.seed = -1", "c.slots.sizes = (4, 10**400)"),
            *("c.model.hidden_size = None", "c.data.path = '\\udcff'", "c.learning_rate = float('nan')"),
        )
    ),
]
PROMPT = json.dumps({"prompt": "Sort 7 3 9.", "id": "x", "decode": {"seed": 1, "temperature": 0.5}}).encode()
SAMPLE = {"step": 60, "task": "sorting", "problem": 1, "asked": "a", "answered": "b", "right": "c"}
VALUES = [
    *(None, True, -1, 0, 1.5, 10**400, float("nan"), "", "x", "\0", "\ud800", "\u2028", "a" * 9999, "../x"),
    *([], [0], {}, [[]], {"x": 1}, {"max_new_tokens": -1}, {"temperature": 10**400}),
    *([1, -5, 10**20], ["Sort", 4], [4], ["a", 2**40]),
]
LITERAL = [
    *(b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"\xff", b"\x00", b"NaN", b"Infinity", b'"\\ud800"', b"{", b"[]", b""),
    *(b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "a"', b"\xef\xbb\xbf", b"\xff\xfe", b'{"\\u0000": 1}', b"1e999"),
]


def theirs(value: object) -> list[dict]:
    """What a config.json of somebody may say besides what it must, each with a value that may mean nothing."""
    keys = "is_causal layer_types sliding_window rope_scaling rope_parameters rope_local_base_freq rotary_dim head_dim"
    keys += " num_key_value_heads query_pre_attn_scalar quantization_config eos_token_id refusion_jax rope_theta"
    return [
        *({key: value} for key in keys.split()),
        *({"rope_scaling": {name: value, "factor": 2.0}} for name in ("type", "rope_type")),
        *({"rope_parameters": {name: value}} for name in ("full_attention", "sliding_attention", "rope_theta")),
        {"rope_scaling": {"type": "linear", "factor": value}},
        {"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "layer_types": value},
    ]


class Calls:
    """Makes calls out of good things: a trained run, rows that `prepare` wrote, a Hugging Face directory."""

    def __init__(self, run: Path, prepared: Path, exported: Path, seed: int):
        self.run, self.prepared, self.exported = run, prepared, exported
        self.tokenizer = f"--tokenizer={run}/tokenizer.model"
        self.rng = random.Random(seed)

    def make(self, directory: Path) -> tuple[str, list[str]]:
        """One call, (command, flags); the files that it is about are written to a new directory."""
        directory.mkdir()
        kinds = [self._flag] * 6 + [self._prompts] * 3 + [self._rows, self._data, self._foreign, self._run] * 2
        kinds += [self._checkpoint, self._log, self._config, self._flagfile]
        return self.rng.choice(kinds)(directory)

    def _flag(self, directory: Path) -> tuple[str, list[str]]:
        """A flag with a value that may mean nothing; what follows is never to begin."""
        rng = self.rng
        bases = {
            "generate": [f"--checkpoint={self.run}", f"--input={directory}/none.jsonl", f"--output={directory}/out"],
            "train": [*TINY_RUN, f"--workdir={directory}/new", f"--config.data.path={directory}/none.jsonl"],
            "prepare": [f"--input={directory}/none", f"--output={directory}/new", self.tokenizer],
            "inspect_data": [f"--data={self.prepared}", "--row=99999"],
            "goodput": [f"--workdir={directory}"],
            "train_tokenizer": [f"--input={directory}/none", f"--output={directory}/new"],
            "convert": [f"--from={directory}/none", f"--to={directory}/new", "--format=orbax"],
            "evaluate": [f"--checkpoint={self.run}", f"--data={directory}/none", f"--output={directory}/new"],
            "plan": ["--config=configs/quickstart.py", "--topology=v9:2x2"],
            "drill": [*TINY_RUN, f"--workdir={directory}/new", f"--config.data.path={directory}/none.jsonl"],
            "quickstart": [f"--workdir={directory}/none"],
            "bench": [rng.choice(["decode", "serve", "gpu", "none", ""]), f"--checkpoint={directory}/none"],
            "report": [f"--workdir={directory}/none", f"--output={directory}/new"],
            "chat": [f"--checkpoint={directory}/none"],
            "serve": [f"--checkpoint={directory}/none"],
        }
        command = rng.choice([*bases, "generate", "train"])
        return command, [*bases[command], f"--{rng.choice(flags_of(command))}={rng.choice(NASTY)}"]

    def _prompts(self, directory: Path) -> tuple[str, list[str]]:
        lines = [self._line() for _ in range(self.rng.randrange(1, 4))]
        lines.append(self.rng.choice(LITERAL[:4]))  # so that none is decoded
        (directory / "in.jsonl").write_bytes(self.rng.choice([b"\n", b"\r\n", b"\n\n"]).join(lines))
        flags = [f"--checkpoint={self.run}", f"--input={directory}/in.jsonl", f"--output={directory}/out.jsonl"]
        if self.rng.random() < 0.3:
            journal = self.rng.choice([*LITERAL, b'{"call": {}}\n', b'{"call": 3}\n', PROMPT + b"\n"])
            (directory / "out.jsonl.partial").write_bytes(journal)
        return "generate", flags

    def _line(self) -> bytes:
        rng = self.rng
        kind = rng.randrange(5)
        if kind == 0:
            return rng.choice(LITERAL)
        if kind == 1:
            return damaged(self.rng, PROMPT)
        names = ["prompt", "prompt_ids", "template", "decode", "id", "x"]
        item = json.loads(PROMPT) | {rng.choice(names): rng.choice(VALUES) for _ in range(rng.randrange(1, 3))}
        return json.dumps(item, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")

    def _run(self, directory: Path) -> tuple[str, list[str]]:
        """A run with one file of its directory damaged."""
        run = self._copy_run(directory, "checkpoints")
        (run / "checkpoints").symlink_to(self.run / "checkpoints")
        self._spoil(run / self.rng.choice(["model.json", "config.json", "tokenizer.model"]))
        return self._generate(directory)

    def _checkpoint(self, directory: Path) -> tuple[str, list[str]]:
        """A run with one file of a checkpoint damaged, or gone."""
        step = self.rng.choice(sorted((self._copy_run(directory) / "checkpoints").iterdir()))
        file = self.rng.choice([path for path in sorted(step.rglob("*")) if path.is_file()])
        if self.rng.random() < 0.2:
            file.unlink()
        else:
            file.write_bytes(damaged(self.rng, file.read_bytes()))
        return self._generate(directory, self.rng.choice(["", f"/checkpoints/{step.name}"]))

    def _log(self, directory: Path) -> tuple[str, list[str]]:
        """A run with one of its logs damaged."""
        run = self._copy_run(directory, "checkpoints")
        (run / "samples.jsonl").write_text(json.dumps(SAMPLE) + "\n")
        self._spoil(run / self.rng.choice(["metrics.jsonl", "events.jsonl", "samples.jsonl", "config.json"]))
        calls = [(command, [f"--workdir={run}"]) for command in ("goodput", "quickstart")]
        return self.rng.choice([*calls, ("report", [f"--workdir={run}", f"--output={directory}/new"])])

    def _config(self, directory: Path) -> tuple[str, list[str]]:
        """A config file that is a program of its own."""
        (directory / "c.py").write_text(self.rng.choice(CONFIGS))
        command = self.rng.choice(["train", "plan", "inspect_data", "drill"])
        needed = [f"--workdir={directory}/new"] if command != "plan" else ["--topology=v5e:2x2"]
        return command, [f"--config={directory}/c.py", *needed]

    def _flagfile(self, directory: Path) -> tuple[str, list[str]]:
        """A file of flags with something wrong with it."""
        rng, file = self.rng, directory / "f"
        value = f"--{rng.choice(flags_of('generate'))}={rng.choice(NASTY)}"
        last = rng.choice([value, *(f"--flagfile={path}" for path in ("/nowhere", ".", ""))])
        lines = [f"--checkpoint={self.run}", f"--input={directory}/none.jsonl", "# a comment", last]
        file.write_bytes("\n".join(lines).encode(errors="surrogateescape"))
        if rng.random() < 0.3:
            self._spoil(file)
        return "generate", [f"--flagfile={file}", *[f"--input={directory}/none.jsonl"] * rng.randrange(2)]

    def _copy_run(self, directory: Path, *without: str) -> Path:
        ignored = shutil.ignore_patterns(*without, "tensorboard", "*cache*")
        return shutil.copytree(self.run, directory / "run", ignore=ignored)

    def _generate(self, directory: Path, step: str = "") -> tuple[str, list[str]]:
        (directory / "in.jsonl").write_bytes(b'{"prompt_ids": [9999999]}')  # so that none is decoded
        checkpoint = f"--checkpoint={directory}/run{step}"
        return "generate", [checkpoint, f"--input={directory}/in.jsonl", f"--output={directory}/out"]

    def _rows(self, directory: Path) -> tuple[str, list[str]]:
        shutil.copytree(self.prepared, directory / "rows")
        self._spoil(self.rng.choice([p for p in sorted((directory / "rows").iterdir()) if p.is_file()]))
        return "inspect_data", [f"--data={directory}/rows", self.rng.choice(["--row=99999", "--verify"])]

    def _data(self, directory: Path) -> tuple[str, list[str]]:
        write_files(directory, 1, self.rng.randrange(2**32))
        flags = [f"--input={directory}/00", f"--output={directory}/new", self.tokenizer]
        if self.rng.random() < 0.3:
            lines = [PROMPT, b"x.com", b"*.x.com", b"x.com/y", self.rng.choice(LITERAL)]
            (directory / "list").write_bytes(b"\n".join(self.rng.sample(lines, 2)))
            flags.append(f"--{self.rng.choice(['decontaminate', 'blocked_urls'])}={directory}/list")
        return "prepare", [*flags, "--workers=1", "--row_length=64"]

    def _foreign(self, directory: Path) -> tuple[str, list[str]]:
        """A Hugging Face directory with one file damaged, or another chat template."""
        shutil.copytree(self.exported, directory / "theirs")
        files = sorted(path.name for path in (directory / "theirs").iterdir() if path.is_file())
        name = self.rng.choice([*files, "template", "key", "key"])
        if name == "key":
            config = directory / "theirs" / "config.json"
            changes = self.rng.choice(theirs(self.rng.choice([*VALUES, "linear", ["full_attention"], 2.0])))
            config.write_text(json.dumps(json.loads(config.read_text()) | changes))
        elif name == "template":
            bad = ["{% for", "{{ 'a' * 10**11 }}", "{{ x.y }}", "{{ messages * 10**9 }}", "\udcff", "{{ 1 // 0 }}"]
            content = self.rng.choice(bad).encode(errors="surrogateescape")
            (directory / "theirs" / "chat_template.jinja").write_bytes(content)
        else:
            self._spoil(directory / "theirs" / name)
        (directory / "in.jsonl").write_bytes(b'{"prompt": "x"}\n{"prompt_ids": [9999999]}')
        return "generate", [f"--checkpoint={directory}/theirs", f"--input={directory}/in.jsonl"]

    def _spoil(self, path: Path) -> None:
        content = path.read_bytes()
        if self.rng.random() < 0.1:  # it is no file any more
            path.unlink()
            make = [Path.mkdir, *(lambda p, to=to: p.symlink_to(to) for to in (path, "/none"))]
            self.rng.choice(make)(path)
            return
        if path.suffix == ".json" and self.rng.random() < 0.7:
            item = json.loads(content)
            inner = self.rng.choice([item, *(x for x in item.values() if isinstance(x, dict) and x)])
            key = self.rng.choice(sorted(inner))
            if self.rng.random() < 0.2:
                del inner[key]
            else:
                inner[key] = self.rng.choice(VALUES)
            path.write_text(json.dumps(item))
        else:
            path.write_bytes(self.rng.choice([damaged(self.rng, content), self.rng.choice(LITERAL)]))

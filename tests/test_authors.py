"""`bench authors`: its protocol with the process that runs the authors' code, which stubs stand in for here."""

import json

import pytest
from conftest import run
from helpers import SHIPPED

from refusion_jax import DecodeSettings, decode
from refusion_jax.checkpoints.load import load_model

MODEL = SHIPPED / "model"
SETTINGS = {"max_new_tokens": 32, "slot_size": 4, "serial_blocks": 2}

TORCH = """
import contextlib
import numpy
float32 = "float32"
class cuda: is_available = staticmethod(lambda: False)
def set_num_threads(count): assert count > 0
def tensor(values, device): return numpy.array(values)
"""
MODELING = """
import json, pathlib
class Qwen3ForCausalLM:
    @classmethod
    def from_pretrained(cls, path, torch_dtype):
        assert json.loads((pathlib.Path(path) / "config.json").read_text())["model_type"] == "qwen3"
        assert torch_dtype == "float32"
        return cls()
    def to(self, device): return self
    def eval(self): return self
"""
GENERATE = """
import json, pathlib, numpy
HERE = pathlib.Path(__file__).parent
def generate_refusion(model, tokenizer, prompt, **settings):
    print("progress")
    asked = {"eos_id": tokenizer.eos_token_id, **settings}
    (HERE / "asked.json").write_text(json.dumps(asked))
    answer = json.loads((HERE / "answers.json").read_text())[str(prompt[0].tolist())]
    return numpy.concatenate([prompt, [answer]], axis=1), 1.0
"""


@pytest.fixture
def checkout(tmp_path):
    """A clone whose code answers what answers.json says, and a torch that is imported from next to it."""
    (tmp_path / "qwen3").mkdir()
    for name, code in {
        "torch.py": TORCH,
        "generate.py": GENERATE,
        "qwen3/__init__.py": "",
        "qwen3/modeling_qwen3_refusion.py": MODELING,
    }.items():
        (tmp_path / name).write_text(code)
    return tmp_path


@pytest.mark.thorough
def test_answers_are_compared_through_their_first_end_and_speeds_in_turns(checkout):
    prompts = [json.loads(line)["prompt_ids"] for line in (SHIPPED / "decode.jsonl").read_text().splitlines()[:3]]
    settings = DecodeSettings("refusion", infill="threshold", **SETTINGS)
    answers = decode(load_model(MODEL), prompts, settings).tokens
    longer = {str(prompt): [*answer, 70] for prompt, answer in zip(prompts, answers, strict=True)}
    longer[str(prompts[2])] = [71, 2]
    (checkout / "answers.json").write_text(json.dumps(longer))
    (checkout / "prompts.jsonl").write_text("".join(json.dumps({"prompt_ids": prompt}) + "\n" for prompt in prompts))
    flags = [f"--decode.{name}={value}" for name, value in SETTINGS.items()]
    flags += [f"--checkout={checkout}", f"--checkpoint={MODEL}", f"--prompts={checkout / 'prompts.jsonl'}"]
    out, _ = run("bench", "authors", *flags, "--batch_sizes=1", "--repeats=2")
    records = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    setups = [(record["setup"], record["batch_size"]) for record in records]
    assert setups == [("refusion infill=threshold", 1), ("refusion infill=exact", 1)]
    ended = [answer[-1] == 2 for answer in answers[:2]]  # what does not end is not cut
    assert any(ended)
    assert records[0]["same"] == sum(ended) / 3
    for record in records:
        least, middle, most = record["ratio"]
        assert 0 < least <= middle <= most
        assert record["prompts"] == 3
    asked = json.loads((checkout / "asked.json").read_text())
    assert asked == {
        "gen_length": 32,
        "slot_size": 4,
        "serial_num_blocks": 2,
        "slot_threshold": 0.9,
        "token_threshold": 0.9,
        "temperature": 0.0,
        "eos_id": 2,
        "mask_id": 511,
    }


def test_code_that_does_not_run_is_one_line(checkout):
    (checkout / "generate.py").write_text("import no_such_module")
    _, err = run("bench", "authors", f"--checkout={checkout}", f"--checkpoint={MODEL}", "--count=1", code=2)
    assert "the authors' code ended with: ModuleNotFoundError: No module named 'no_such_module'" in err
    _, err = run("bench", "authors", f"--checkout={checkout}", "--python=/no/python", code=2)
    assert "--python=/no/python: cannot be run: No such file" in err


def test_a_folder_that_is_no_clone_is_refused(tmp_path):
    _, err = run("bench", "authors", f"--checkout={tmp_path}", code=2)
    assert f"--checkout={tmp_path}: must be a clone of" in err

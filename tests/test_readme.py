"""Every command of the README is run as it is written, made small by flags behind it."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, TINY_RUN, tiny_model
from test_adaptation import write_tokenizer

from refusion_jax.model import huggingface

README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]
OURS = [command for command in COMMANDS if re.search(r"python -m refusion_jax\.|launch/(local_hosts|tpu_vm)", command)]
WRITES = [command for command in COMMANDS if command.startswith("echo ")]  # input for the others
SMALLER = [flag for flag in TINY_RUN if not flag.startswith("--config=")]
SMALLER += ["--config.steps=6", "--config.checkpoint.every=3", "--config.row_length=128", "--config.decay_steps=1"]


@pytest.fixture(scope="module")
def user(tmp_path_factory, trained_run):
    """A directory as a user's who has run the quickstart and has text of their own."""
    home = tmp_path_factory.mktemp("user")
    (home / "configs").symlink_to(ROOT / "configs")
    (home / "launch").symlink_to(ROOT / "launch")
    (home / "runs").mkdir()
    (home / "runs" / "quickstart").symlink_to(trained_run)
    (home / "prompts.jsonl").write_text('{"prompt": "Sort 3 1."}\n{"prompt_ids": [1, 7, 9]}\n')
    for command in WRITES:
        shell(command, home)
    (home / "my").mkdir()
    tiny_qwen3(home / "Qwen3-0.6B")
    lines = "".join(f'{{"query": "What is {i}?", "response": "It is the number {i}."}}\n' for i in range(300))
    (home / "my" / "a.jsonl").write_text(lines)
    return home


def tiny_qwen3(path) -> None:
    """What a download of Qwen3 looks like, in the sizes of TINY_RUN."""
    write_tokenizer(path)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    sizes |= {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 512, "num_tokens": 512}
    huggingface.save(tiny_model(**sizes, rope_theta=1e6, tie_word_embeddings=True), path)


def shell(command: str, home) -> str:
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    done = subprocess.run(["bash", "-c", command], cwd=home, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_two_commands_are_the_ones_that_ci_and_the_quickstart_test_run():
    others = [c for c in COMMANDS if c not in OURS and not c.startswith("echo ")]
    assert others == ["bash launch/quickstart.sh", "bash launch/test.sh"]
    assert "bash launch/test.sh" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("command", OURS)
def test_a_command_works_as_written(command, user):
    if ".plan " in command and importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs the TPU compiler: pip install libtpu (Linux)")
    small = command.replace("python -m", f"{sys.executable} -m")
    if ".train " in command or "local_hosts" in command:
        own = {flag.split("=")[0] for flag in command.split()}
        small += " " + " ".join(flag for flag in SMALLER if flag.split("=")[0] not in own)
        small += " --config.model.num_attention_heads=4" if "tensor=2" in command else ""
        small += " --config.model.vocab_size=512 --config.data.on_error=skip"
    if ".bench decode" in command:
        small += " --max_new_tokens=16 --serial_blocks=2 --slot_size=4 --prompts_per_row=1 --repeats=1"
    small = small.replace("--vocab_size=8192", "--vocab_size=400")
    assert shell(small, user).strip()


def test_the_python_example_works(user):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (user / "example.py").write_text(example)
    assert shell(f"{sys.executable} example.py", user).strip()


def test_every_file_that_documents_link_to_is_there():
    for document in ("README.md", "BENCHMARKS.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / document).read_text()):
            assert (ROOT / target).exists(), f"{document} links to {target}"

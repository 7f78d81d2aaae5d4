"""What several test files need, besides the fixtures and tiny models of conftest.py."""

import contextlib
import http.server
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from absl import flags
from conftest import EOS, QUICK_COMPILE, ROOT, tiny_model

from refusion_jax.batch.batch import Batch, weigh
from refusion_jax.batch.rows import Rows
from refusion_jax.benchmarks.headline.results import Scored
from refusion_jax.model import huggingface
from refusion_jax.training.metrics import read_metrics

CONFIGS = {path.stem: path for path in sorted((ROOT / "configs").glob("*.py"))}
SHIPPED = ROOT / "tests" / "golden"  # a model, and a few cases of the authors

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CONFIG = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}, "chat_template": TEMPLATE}


def load_config(name: str) -> Callable:
    """The get_config of a file in configs/."""
    spec = importlib.util.spec_from_file_location(name, CONFIGS[name])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config


def config_of_mine(system: str) -> str:
    """A config file that registers `mine`, a system like one of ours, but without decoders."""
    return f"""import dataclasses
from refusion_jax.config import default_config as get_config
from refusion_jax.systems import registry
own = {{"name": "mine", "section": "mine", "decoders": {{}}, "references": {{}}}}
registry.register(dataclasses.replace(registry.find_system("{system}"), **own))
"""


def flags_of(part: ModuleType, *given: str) -> flags.FlagValues:
    """The flags of a part of a command, as of `bench gpu`, where these are given."""
    own = flags.FlagValues()
    part.define_flags(own)
    own(["", *given])
    return own


def python(*arguments: object, **variables: str) -> subprocess.CompletedProcess:
    """A new process of Python, once it has ended."""
    line = [sys.executable, *map(str, arguments)]
    return subprocess.run(line, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=400)


def start_hosts(hosts: int, *flags: str, devices: int = 2, **variables: str) -> subprocess.Popen:
    """launch/local_hosts.sh, in a process group of its own."""
    env = os.environ | {"DEVICES": str(devices), "PYTHON": sys.executable, "XLA_FLAGS": QUICK_COMPILE} | variables
    line = ["bash", "launch/local_hosts.sh", str(hosts), *flags]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen(line, cwd=ROOT, env=env, **how)


def workers(launcher: subprocess.Popen) -> list[int]:
    """The processes that local_hosts.sh has started, in order."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return [int(pid) for pid in children if "refusion_jax." in Path(f"/proc/{pid}/cmdline").read_text()]


def ended(process: subprocess.Popen) -> tuple[str, str]:
    """What a run has printed, once it has ended; where it hangs, nothing of it is left to disturb other tests."""
    try:
        return process.communicate(timeout=400)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def evaluate_on_two(*flags: str) -> None:
    """Runs `evaluate` with two processes, to its end."""
    process = start_hosts(2, *flags, devices=1, COMMAND="evaluate")
    out, err = ended(process)
    assert process.returncode == 0, out + err


def wait_until(happened: Callable[[], object], process: subprocess.Popen | None = None, seconds: float = 300) -> None:
    """Waits for something to happen, while a process runs."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.005)


def wait_for_steps(process: subprocess.Popen, workdir: Path, steps: int) -> None:
    """Waits until a training has logged as many steps."""
    wait_until(lambda: len(read_metrics(workdir)) >= steps, process)


def computed(workdir: Path) -> list[tuple]:
    """What a run computed at each step, clocks left out."""
    names = ("step", "loss", "loss_ar", "loss_mdm", "grad_norm", "learning_rate", "tokens")
    return [tuple(record[name] for name in names) for record in read_metrics(workdir)]


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def http_server(answer: Callable[..., tuple[int, bytes]]) -> Iterator[str]:
    """The address of a server on this machine that answers (path, headers, body) by (status, content)."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def handle_all(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, content = answer(self.path, self.headers, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = handle_all  # noqa: N815

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("localhost", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}"
        server.shutdown()


def write_lines(path: Path, lines: list) -> Path:
    """Writes objects as JSON, one a line."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def loss_terms(logits: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    """The definition of the loss: all terms, from the logits [B, T, V] of a batch."""
    label_logits = jnp.take_along_axis(logits, batch.labels[..., None], axis=-1)[..., 0]
    return weigh(jax.nn.logsumexp(logits, axis=-1) - label_logits, batch)


def packed(documents: list[tuple[int, int]], row_length: int) -> Rows:
    """One row of documents given as (prompt length, response length); every token's id is its index, from 100."""
    segments, response = np.zeros((1, row_length), np.int32), np.zeros((1, row_length), bool)
    start = 0
    for segment, (p, r) in enumerate(documents, 1):
        segments[0, start : start + p + r] = segment
        response[0, start + p : start + p + r] = True
        start += p + r
    return Rows(jnp.arange(100, 100 + row_length)[None], jnp.array(segments), jnp.array(response))


def rows_of(*rows: list[tuple[int, int]], row_length: int = 24) -> Rows:
    """`packed` rows with tokens that a tiny model knows, in a row of 24 each another."""
    stacked = jax.tree.map(lambda *x: jnp.concatenate(x), *(packed(row, row_length) for row in rows))
    return stacked.replace(tokens=(stacked.tokens - 100) % 24 + 5)


def places_of_documents(segment_ids: jax.Array) -> list[tuple[int, np.ndarray]]:
    """(row, places in it) of each document of packed rows."""
    found = []
    for row, own in enumerate(np.asarray(segment_ids)):
        found += [(row, np.flatnonzero(own == segment)) for segment in np.unique(own[own > 0])]
    return found


def with_eos(rows: Rows) -> Rows:
    """The rows with EOS in place of the last token of each document."""
    after = jnp.pad(rows.segment_ids[:, 1:], ((0, 0), (0, 1)))
    return rows.replace(tokens=jnp.where(after != rows.segment_ids, EOS, rows.tokens))


def drawn_matrix(text: str, columns: int) -> list[list[bool]]:
    """The matrix of 1 and . that a docstring draws at the ends of its lines."""
    drawn = re.findall(rf" ((?:[1.] ?){{{columns}}})$", text, re.MULTILINE)
    return [[cell == "1" for cell in line.split()] for line in drawn]


def check_page(text: str, directory: Path) -> None:
    """A page loads nothing, makes no markup of text, takes keys, and its script is one, if node is here to say so."""
    for loads in ("http:", "https:", '"//', "src=", "href=", "url(", "@import", "innerHTML", "outerHTML", ".write("):
        assert loads not in text.replace('href="data:,"', ""), loads
    assert not re.search(r"onkey\w+ = [^\n]*=> [^{\n]", text), "an expression may be false, which cancels the key"
    if not shutil.which("node"):
        pytest.skip("needs node to check the script")
    (directory / "page.js").write_text(re.search("<script>(.*)</script>", text, re.DOTALL)[1])
    checked = subprocess.run(["node", "--check", directory / "page.js"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


class Letters:
    """A tokenizer of letters: token 65 is A."""

    mask_id = 4

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def write_tokenizer(path: Path, also=(), **changes) -> Path:
    """A byte-level BPE tokenizer of Qwen3's kind, as transformers saves it; `also` are further special tokens."""
    path.mkdir(exist_ok=True)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=[], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["What is the number? It is the number."] * 9, trainer)
    tokenizer.add_special_tokens([*_SPECIAL, *also])
    config = {key: value for key, value in (_CONFIG | changes).items() if value is not None}
    if (bos := changes.get("bos_token")) and "add_bos_token" not in changes:  # it begins texts, as Llama's does
        bos = bos["content"] if isinstance(bos, dict) else bos
        special = [(bos, tokenizer.token_to_id(bos))]
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=f"{bos} $A", special_tokens=special)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path / "tokenizer.json"


def tiny_qwen3(path: Path, **changes) -> None:
    """What a download of Qwen3 looks like, in the sizes of TINY_RUN."""
    write_tokenizer(path)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    sizes |= {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 512, "num_tokens": 512}
    huggingface.save(tiny_model(**sizes | changes, rope_theta=1e6, tie_word_embeddings=True), path)


def scored(**fields) -> Scored:
    """A decoder at an operating point, with these fields and some for the others."""
    own = {"system": "s", "start": "", "decoder": "d", "seed": 0, "accuracy": 1.0, "families": {}, "commit": "abc"}
    own |= {"tokens_per_forward": 2.0, "tokens_per_forward_without_eos": 1.75, "tokens_per_forward_with_prefill": 1.5}
    own |= {"tokens": 32, "forwards": 8, "prompt_tokens": 16.0, "width": 16, "has_cache": True}
    return Scored(**own | fields)

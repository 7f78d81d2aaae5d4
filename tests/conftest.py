"""Strict settings for every test: eight virtual CPU devices, no implicit rank promotion, warnings are errors."""

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib.util
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from quick_compile import QUICK_COMPILE, compile_few_shapes

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{QUICK_COMPILE} --xla_force_host_platform_device_count=8"
# Virtual devices share XLA's thread pool, and a collective blocks its thread until all devices have come: with too few
# threads they wait for each other for ever (seen once, with two devices on two cores).
os.environ["NPROC"] = "32"
os.environ["HF_HUB_OFFLINE"] = "1"  # before datasets is imported: nothing is asked of the network

# The user's own cache is left alone. Workers of pytest-xdist inherit that of the process that starts them.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="refusion-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
# Programs that one command compiles are there for the next one, and so is its bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["XDG_CACHE_HOME"] + "/programs"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

import hypothesis
import jax
import jax.numpy as jnp
import ml_collections
import pytest
import shapes  # noqa: F401  from here on shapes are checked in what is imported of ours
from flax import nnx
from fork_server import ForkServer
from object_store import ObjectStore

from refusion_jax import DecodeSettings
from refusion_jax.batch.visibility import CAUSAL, Visibility
from refusion_jax.config import default_config
from refusion_jax.decoding.auxiliary import with_auxiliaries
from refusion_jax.decoding.settings import Settings
from refusion_jax.model.key_values import KeyValues
from refusion_jax.model.shape import ModelConfig
from refusion_jax.model.transformer import Transformer
from refusion_jax.planning.compiler import prepare_environment
from refusion_jax.systems import masked
from refusion_jax.systems.refusion import budget
from refusion_jax.systems.registry import find_decoder

# No other process asks for what a test compiles in this one: to write it would take a tenth of the time that it took.
jax.config.update("jax_enable_compilation_cache", False)
ALL_SHAPES = budget._SHAPES, masked._WIDTHS
compile_few_shapes()
jax.devices()  # XLA reads its flags now: what plans for TPUs takes those away that make it compile quickly

hypothesis.settings.register_profile(  # the same examples each time, and no fault of theirs where the machine is busy
    "refusion", derandomize=True, deadline=None, database=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("refusion")

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_threefry_partitionable", True)

# Commands inherit ignored signals, and tests send them some: a shell ignores INT and QUIT for what it runs in the
# background, nohup ignores HUP, and so does libtpu once it is loaded, unless somebody listens. What is handled here has
# its default again in a command.
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.default_int_handler)


ROOT = Path(__file__).parent.parent
SHARED = Path(os.environ.get("REFUSION_SHARED", ROOT.parent / "shared"))

# Flags that make configs/quickstart.py a run of seconds.
TINY_RUN = [
    "--config=configs/quickstart.py",
    *("--config.model.hidden_size=32", "--config.model.num_hidden_layers=1", "--config.model.num_attention_heads=2"),
    *("--config.model.num_key_value_heads=1", "--config.model.head_dim=16", "--config.model.intermediate_size=64"),
    *("--config.batch_size=8", "--config.steps=60", "--config.warmup_steps=5", "--config.log_every=1"),
    *("--config.checkpoint.every=10", "--config.data.examples=500"),
]

PAD, BOS, EOS, MASK = 0, 1, 2, 4

# Files that take half a minute and more.
LONGEST = "systems readme experts storage golden tpu speculation structured distributed adaptation batching".split()
LONGEST += "exact_infilling releases checkpoints generate decoding serve train heldout huggingface".split()


def all_but(quick, values, mark=pytest.mark.thorough) -> list:
    """Values of a parametrized test, marked but for those that always run."""
    return [v if v in quick else pytest.param(*v if isinstance(v, tuple) else (v,), marks=mark) for v in values]


def pytest_collection_modifyitems(items):
    """The longest files first: where files run side by side, none of them is left for the end."""
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_collection():
    """What is imported stays: no collector of garbage needs to look at it."""
    gc.disable()


def pytest_collection_finish():
    """Tracing makes so many objects that the collector of garbage would take a tenth of the time."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _free_compiled_programs():
    """Each takes memory mappings, of which Linux grants a process 65,530: all of the tests' together are too many.

    Those that are kept serve the later files: many decode with the same sizes.
    """
    yield
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()


FORKS = ForkServer()
atexit.register(FORKS.close)


def environment(devices: int) -> dict[str, str]:
    """That of a command of ours, as a user's on the CPU."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICK_COMPILE}",
    }


def start(
    command: str, *flags: str, devices: int = 1, stdout: int = subprocess.PIPE, directory: Path = ROOT
) -> subprocess.Popen:
    """Starts a command of ours on the CPU, in a session of its own."""
    how = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True}
    return FORKS.start(command, [*map(str, flags)], environment(devices), directory, **how)


@contextlib.contextmanager
def serving(*flags: str, directory: Path = ROOT) -> Iterator[str]:
    """The address of a server, http://HOST:PORT, which must end well."""
    process = start("serve", "--port=0", *flags, directory=directory)
    try:
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield re.fullmatch(r"serving .* at (http://\S+)/v1\n", line)[1]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 130
        assert re.fullmatch("loading .*\nerror: interrupted\n", err), err
    finally:
        process.kill()


def run(command: str, *flags: str, devices: int = 1, code: int = 0) -> tuple[str, str]:
    """Runs a command to its end, which must be this exit code: (stdout, stderr)."""
    ended = FORKS.ask(command, [*map(str, flags)], environment(devices))
    assert ended["code"] == code, f"{command} {' '.join(map(str, flags))}\n{ended['out']}\n{ended['err']}"
    return ended["out"], ended["err"]


def refused(command: str, *flags: str) -> str:
    """What a command that is asked for the impossible says on stderr: one line, and nothing on stdout."""
    out, err = run(command, *flags, code=2)
    assert re.fullmatch("error: .+\n", err), err
    assert out == ""
    return err


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Root may read what nobody else may."""
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)


@contextlib.contextmanager
def compiled() -> Iterator[list[str]]:
    """The programs that JAX compiles in the block, as it logs them."""
    programs = []
    handler = logging.Handler()
    handler.emit = lambda record: programs.extend(re.findall(r"^Compiling (\S+)", record.getMessage()))
    logger = logging.getLogger("jax")
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            yield programs
    finally:
        logger.removeHandler(handler)


@pytest.fixture(scope="session")
def trained_run() -> Path:
    """The directory of a finished tiny run, which no test changes: all workers share it."""
    workdir = Path(os.environ["XDG_CACHE_HOME"]) / "trained"
    with open(f"{workdir}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (workdir / "checkpoints" / "60").exists():
            run("train", *TINY_RUN, f"--workdir={workdir}")
    return workdir


@pytest.fixture
def tasks(tmp_path, monkeypatch) -> Callable[..., Path]:
    """Writes a task of our own for lm_eval into a directory that it returns."""
    from local_task import task_writer

    return task_writer(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def client(address: str) -> Iterator:
    """OpenAI's own client of the server at a file's `address`."""
    import openai

    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="class")  # which hypothesis takes; for a function it is the same
def two_shapes() -> Iterator[None]:
    """Forwards of decoders are compiled for two numbers of tokens: which one runs changes no answer."""
    compile_few_shapes(2)
    yield
    compile_few_shapes()


@pytest.fixture
def all_shapes() -> Iterator[None]:
    """Decoders are compiled as for a user."""
    budget._SHAPES, masked._WIDTHS = ALL_SHAPES
    yield
    compile_few_shapes()


@pytest.fixture
def tpu_compiler() -> None:
    """That this process compiles for TPUs that are not here; without the compiler the test is skipped."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs the TPU compiler: pip install libtpu (Linux)")
    prepare_environment()


@pytest.fixture
def store(monkeypatch) -> Iterator[ObjectStore]:
    """An object store of this machine's, which gcsfs, tensorstore and array_record take for Google's."""
    pytest.importorskip("gcsfs", reason="pip install gcsfs to keep runs in gs://")
    store = ObjectStore()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.url)
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", store.url)
    monkeypatch.setenv("CLOUD_STORAGE_EMULATOR_ENDPOINT", store.url)  # for array_record
    monkeypatch.setenv("GCE_METADATA_HOST", "localhost:1")  # nobody is there: no one asks for credentials for long
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    yield store
    store.shutdown()
    store.server_close()


@pytest.fixture
def full_disk() -> Iterator[Callable[[int], None]]:
    """A function after which no file can grow beyond so many bytes, as on a full disk; -1 makes room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def config_with(**keys) -> ml_collections.ConfigDict:
    """The default config with dotted keys changed."""
    config = default_config()
    config.update_from_flattened_dict(keys)
    return config


def tiny_config(**changes) -> ModelConfig:
    """A model that compiles in a second; grouped heads, a vocabulary with padding rows."""
    shape = {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 32,
        "rope_theta": 100.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 256,
        "num_tokens": 30,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "mask_token_id": MASK,
    }
    return ModelConfig(**shape | changes)


@jax.jit
def forward(model: Transformer, *inputs: jax.Array) -> jax.Array:
    """model(*inputs), compiled once for all models and inputs of the same shapes."""
    return model(*inputs)


@jax.jit
def extend(model: Transformer, *inputs: jax.Array | KeyValues) -> tuple[jax.Array, KeyValues]:
    """model.extend(*inputs), compiled."""
    return model.extend(*inputs)


def tiny_model(seed: int = 0, **changes) -> Transformer:
    """A random tiny model."""
    return Transformer(tiny_config(**changes), nnx.Rngs(seed))


def causal(segment_ids: jax.Array) -> Visibility:
    """Packed rows in which every token sees its own document up to itself."""
    return Visibility.of(CAUSAL, segment_ids)


def logits_of(model: Transformer, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
    """[B, T, V] of rows of tokens that see those before them; without positions they are texts from the beginning."""
    tokens = jnp.asarray(tokens, jnp.int32)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return forward(model, tokens, positions, causal(jnp.ones_like(tokens)))


PROMPTS = [
    [BOS, 5, 9, 13],
    [BOS, 22],
    [BOS, 7, 7, 7, 8, 19, 25, 11],
    [BOS, 6, 28, 3],
    [BOS, 14, 15, 16, 17, 18],
    [BOS, 29, 27, 9],
]


def sharp_model(seed: int = 0, **changes):
    """A random model sure enough of itself that thresholds decide."""
    model = tiny_model(seed, **changes)
    model.layers.o_proj[...] *= 8.0
    model.layers.down_proj[...] *= 4.0
    model.lm_head[...] *= 3.0
    model.lm_head[...] = model.lm_head[...].at[EOS].multiply(1.5)  # so that some answers end
    return model


@functools.cache
def sharp_models():
    return [sharp_model(seed) for seed in range(5)]


def equipped(model: Transformer, method: str) -> Transformer:
    """The model with the auxiliary models that a decoder needs."""
    needed = find_decoder(method).settings.auxiliary_models
    return with_auxiliaries(model, **{name: sharp_model(7) for name in needed})


def settings(method="refusion", new=16, size=4, blocks=1, slot=0.6, token=0.4, **changes) -> Settings:
    """Decode settings, of which each decoder takes its own.

    Nothing is fed ahead of time unless a test says so: how much fits depends on the other rows, and forwards with it.
    """
    slots = {
        "speculate": "0",
        "fed_tokens": 2 * size,
        "slot_size": size,
        "serial_blocks": blocks,
        "slot_threshold": slot,
        "token_threshold": token,
    }
    return DecodeSettings(method, max_new_tokens=new, **slots | changes)

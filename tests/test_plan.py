"""`plan` as a command, where nothing is compiled: names of slices, programs of other frameworks, and estimates."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from conftest import ROOT, config_with, refused, run
from flax import nnx
from helpers import config_of_mine, load_config, wait_until
from test_costs import LOOP

from refusion_jax import UserError
from refusion_jax.checkpoints.run_directory import write_model_config
from refusion_jax.checkpoints.weights import save_params
from refusion_jax.config import check_mesh, make_objective
from refusion_jax.config.model import model_config
from refusion_jax.distributed.chips import NAMES, find_chip, topology_of
from refusion_jax.distributed.sharding import make_mesh
from refusion_jax.distributed.xla_options import LIBTPU, version_mismatch
from refusion_jax.model.transformer import Transformer
from refusion_jax.planning import hlo
from refusion_jax.planning.compiler import Compiled, libtpu_version, prepare_environment, tpu_devices
from refusion_jax.planning.fastest import faster_settings
from refusion_jax.planning.programs import lower_decode
from refusion_jax.planning.report import plan_train, to_table
from refusion_jax.planning.search import search
from refusion_jax.systems.api import DecodeSettings
from refusion_jax.systems.interface import train_flops_per_row

needs_topologies = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler: pip install libtpu (Linux)"
)
CONFIG = "--config=configs/quickstart.py"
ASSIGNMENT = """
BufferAssignment:
allocation 0: size 1024, parameter 0, shape |f32[16,16]| at ShapeIndex {}:
allocation 1: size 2048, preallocated-temp:
allocation 2: size 4096, maybe-live-out:
"""


@pytest.fixture
def dump(tmp_path):
    """What a compiler leaves of a small program."""
    path = tmp_path / "module_0001.jit_step.after_optimizations.txt"
    path.write_text(LOOP)
    path.with_name("module_0001.jit_step.after_optimizations-buffer-assignment.txt").write_text(ASSIGNMENT)
    return path


def test_without_the_compiler_the_extra_is_named_that_has_the_version_that_plans_rest_on(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: importlib.metadata.distribution(f"no-{name}"))
    with pytest.raises(UserError, match=re.escape("libtpu is not installed: pip install -e '.[plan]'")):
        libtpu_version()


@needs_topologies
def test_the_program_of_another_framework_is_read_from_its_dump(dump):
    record = json.loads(run("plan", f"--hlo={dump}", "--topology=v5e:2x2", "--json")[0])
    assert record["flops_per_chip"] == 5 * 2 * 4 * 8 * 8
    assert record["peak_hbm_gib"] == pytest.approx(7168 / 2**30)
    assert record["chips"] == 4
    assert record["step_seconds_range"][0] < record["step_seconds"] < record["step_seconds_range"][1]
    table = [cell for column in to_table(record).columns for cell in column.cells]
    assert "{:.3g} to {:.3g} s".format(*record["step_seconds_range"]) in table
    large = "  %w.2 = f32[999,999]{1,0} parameter(2)\n  %sum = f32[999,999]{1,0} all-reduce(%w.2), to_apply=%add\n"
    dump.write_text(LOOP.replace("  ROOT %loop", f"{large}  ROOT %loop"))
    out, err = run("plan", f"--hlo={dump}", "--topology=tpu7x-8")
    assert "tpu7x-8 is tpu7x:2x2x1" in err
    assert "program on tpu7x:2x2x1: 4 chips" in out
    assert "one device, half a chip" in out
    *_, rests_on, blocks = out.splitlines()
    assert rests_on.startswith("The estimate rests on 3 published runs of dense models on tpu7x")
    assert blocks == "1 all-reduces of 1 MB and more stop the chip."


# As Google's documentation and its xpk (default_topologies) have them.
ACCELERATORS = """
v4-8 v4:2x2x1           v4-64 v4:2x4x4          v4-384 v4:4x4x12        v4-4096 v4:8x16x16
v5litepod-1 v5e:1x1     v5litepod-8 v5e:2x4     v5litepod-64 v5e:8x8    v5e-256 v5e:16x16
v6e-4 v6e:2x2           v6e-32 v6e:4x8          v6e-128 v6e:8x16        v5p:4x8x4 v5p:4x8x4
v5p-16 v5p:2x2x2        v5p-32 v5p:2x2x4        v5p-128 v5p:4x4x4       v5p-256 v5p:4x4x8
v5p-640 v5p:4x4x20      v5p-3072 v5p:8x12x16    v5p-12288 v5p:16x16x24  tpu7x-10368 tpu7x:12x12x36
""".split()


@pytest.mark.parametrize(("name", "topology"), [*zip(ACCELERATORS[::2], ACCELERATORS[1::2], strict=True)])
def test_an_accelerator_type_of_google_cloud_is_its_default_topology(name, topology):
    assert topology_of(name) == topology
    assert find_chip(topology).device_kind.startswith("TPU")


@pytest.mark.parametrize("name", ["v5p-62", "v5litepod-12", "v6e-512", "v4-0", "v5p-100000", "h100-8"])
def test_what_is_no_accelerator_type_is_told_those_that_there_are(name):
    with pytest.raises(UserError, match=re.escape(f"--topology={name}: unknown; known are GENERATION:SHAPE")) as error:
        find_chip(topology_of(name))
    assert NAMES in str(error.value)


def test_a_run_that_could_be_faster_is_told_how():
    def told(variant, kind="TPU v6 lite", chips=64, **keys):
        c = load_config("refusion_8b")(variant)
        c.update(keys)
        return faster_settings(c, [SimpleNamespace(device_kind=kind)] * chips)

    assert told("8b") == "--config.remat=products --config.mesh.data=2"
    assert told("8b", remat="products") == "--config.mesh.data=2"
    assert told("8b", kind="TPU v5", chips=32) == "--config.remat=products"
    assert told("8b", kind="TPU7x", chips=128) == "--config.remat=products"  # two devices are a chip
    not_searched = [told("8b", chips=65), told("8b", kind="cpu"), told("8b", batch_size=256), told("4b")]
    not_searched += [
        told("8b", objective="block_diffusion"),
        told("8b", quantization="int8"),
        told("8b", lora={"rank": 8}),
    ]
    assert [told("8b,v6e-64"), told("8b", row_length=8192), *not_searched] == [""] * 9


@needs_topologies
@pytest.mark.parametrize(
    ("text", "assigned", "said"),
    [
        ("nothing", ASSIGNMENT, "the text holds no HLO program"),
        (None, ASSIGNMENT, "No such file"),
        (LOOP.replace("ROOT ", ""), ASSIGNMENT, ""),
        (LOOP, "", "the buffer assignment lists no allocation"),
    ],
)
def test_a_dump_that_is_none_or_lacks_a_part_is_one_clear_line(dump, text, assigned, said):
    dump.write_text(text) if text else dump.unlink()
    dump.with_name(dump.name.removesuffix(".txt") + "-buffer-assignment.txt").write_text(assigned)
    err = refused("plan", f"--hlo={dump}", "--topology=v5e:2x2")
    assert err.startswith(f"error: --hlo={dump} cannot be read: ")
    assert said in err


def test_the_compiler_ends_with_the_command_that_is_killed(tmp_path):
    compiles = "from refusion_jax.planning.compiler import compile_program; compile_program(sleep, (600,), False)"
    line = [sys.executable, "-c", f"from time import sleep; {compiles}"]
    command = subprocess.Popen(line, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)})
    wait_until(lambda: list(tmp_path.glob("plan-*/stderr.txt")), command)  # the child's
    command.kill()
    command.wait()
    wait_until(lambda: not list(tmp_path.glob("plan-*")), seconds=60)  # the last that the child does


@needs_topologies
def test_of_a_model_that_is_read_the_forward_pass_counts(tmp_path, monkeypatch):
    """A third of what training counts for one of the same shape, without the output head, which is not used."""
    config = config_with(objective="dflash", batch_size=8, **{"dflash.reads": str(tmp_path)})
    shape = model_config(config)
    write_model_config(tmp_path, shape)
    save_params(tmp_path, {"nothing": jnp.zeros(1)})
    compiled = Compiled(1, 1, 1, 0, hlo.parse(LOOP), seconds=0, cpu_seconds=None, overrun="")
    monkeypatch.setattr("refusion_jax.planning.report.compile_program", lambda *_: compiled)
    prepare_environment()
    record = plan_train(config, "v5e:2x2", 1, memory_only=True)
    trained = train_flops_per_row(make_objective(config, 0), shape, config.row_length)
    head = 2 * config.row_length * 2 * shape.hidden_size * shape.vocab_size  # blocks and text
    assert record["model_flops_per_chip"] == pytest.approx(8 / 4 * (trained * 4 / 3 - head))


@needs_topologies
def test_a_decoder_with_a_drafter_is_planned_with_the_weights_of_both(tmp_path):
    """The drafter's tokenizer may not fill the vocabulary, as that of a config is taken to do."""
    config = config_with(objective="ar")
    shape = model_config(config)
    drafter = dataclasses.replace(shape, num_hidden_layers=1, num_tokens=shape.num_tokens - 9)
    write_model_config(tmp_path, drafter)
    save_params(tmp_path, {"nothing": jnp.zeros(1)})
    prepare_environment()
    settings = DecodeSettings("pard", drafter=str(tmp_path), max_new_tokens=8, draft_length=3)
    planned = lower_decode(config.to_json(), "v5e:2x2", 1, settings).args_info
    models = [nnx.eval_shape(lambda c=c: Transformer(c, nnx.Rngs(0))) for c in (shape, drafter)]
    weights = [x.size for x in jax.tree.leaves(nnx.state(models))]
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(planned) if x.dtype == jnp.float32) >= sum(weights)
    with pytest.raises(UserError, match="the decoder 'pard' needs a model here"):
        lower_decode(config.to_json(), "v5e:2x2", 1, DecodeSettings("pard", max_new_tokens=8))


@needs_topologies
def test_a_system_that_the_compiler_does_not_find_is_named(tmp_path):
    (tmp_path / "mine.py").write_text(config_of_mine("llada"))
    err = refused("plan", f"--config={tmp_path}/mine.py", "--topology=v5e:2x2", "--memory_only")
    assert err.startswith("error: system 'mine': --config registers it")


@needs_topologies
def test_a_setting_that_only_the_compiled_program_refuses_is_named_as_its_flag():
    flags = [CONFIG, "--topology=v5e:2x2", "--what=decode", "--decode.batch_size=6"]
    _, err = run("plan", *flags, code=2)
    assert err.startswith("error: --decode.batch_size=6: does not divide into 4 parts")


@needs_topologies
@pytest.mark.parametrize(
    ("rows_per_chip", "own", "tried"),
    [(1, 1, [1]), (3, 1, [3, 1]), (3, 3, [3, 1]), (6, 2, [6, 3, 2, 1]), (8, 1, [8, 4, 2, 1])],
)
def test_a_search_tries_the_whole_batch_at_once_and_what_the_config_does(rows_per_chip, own, tried, monkeypatch):
    def plan(config, *_, **__):
        return {"accumulation": config.accumulation, "fits": True, "step_seconds": 1.0}

    monkeypatch.setattr("refusion_jax.planning.search.plan_train", plan)
    prepare_environment()
    told = list(search(config_with(batch_size=4 * rows_per_chip, accumulation=own), "v5e:2x2", 1))
    counts = [record["accumulation"] for record in told if "--config.mesh.tensor=1" in record["flags"].split()]
    assert counts == tried * (len(counts) // len(tried))
    shared = [record["accumulation"] for record in told if "--config.mesh.tensor=4" in record["flags"].split()]
    assert (max(shared), min(shared)) == (4 * rows_per_chip, 1)  # one row at a time, of four chips


@needs_topologies
def test_a_search_that_no_mesh_can_run_says_why_and_not_that_chips_are_missing(monkeypatch):
    def plan(config, topology, *_, **__):
        check_mesh(config, make_mesh(config.mesh, tpu_devices(topology, 1)))

    monkeypatch.setattr("refusion_jax.planning.search.plan_train", plan)
    prepare_environment()
    with pytest.raises(UserError, match="batch_size=32: does not divide into 256 parts"):
        list(search(config_with(batch_size=32), "v5e:16x16", 1))


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({}, ""),
        ({"libtpu": "0.0.42.1"}, f"libtpu 0.0.42.1 in place of {LIBTPU}, with which memory and speed are planned"),
        ({"jax": "0.12", "jaxlib": "0.12"}, "jax 0.12 in place of 0.10.2, jaxlib 0.12 in place of 0.10.2, with"),
    ],
)
def test_another_compiler_than_the_tested_one_is_told(others, told, monkeypatch):
    planned = {"libtpu": LIBTPU, "jax": "0.10.2", "jaxlib": "0.10.2"}
    monkeypatch.setattr("importlib.metadata.version", lambda name: (planned | others)[name])
    assert version_mismatch().startswith(told)
    assert bool(version_mismatch()) == bool(told)


def test_what_is_installed_for_tpus_is_what_programs_are_tested_with():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("tpu", "plan", "test"):
        assert [each.split(";")[0] for each in extras[name] if "libtpu" in each] == [f"libtpu=={LIBTPU}"], name
        assert "jax[tpu]" not in extras[name]  # which asks for another one

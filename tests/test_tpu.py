"""TPU programs, compiled for chips that are not here: they fit, they scale, and their counts are right.

Bounds on memory hold for one version of the compiler, the one that `pip install -e '.[test]'` installs.
"""

import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import pytest
from conftest import causal, refused, run
from helpers import CONFIGS, load_config

from refusion_jax import UserError
from refusion_jax.distributed import sharding
from refusion_jax.distributed.chips import find_chip
from refusion_jax.model.splash import splash_attention
from refusion_jax.planning.compiler import tpu_devices
from refusion_jax.planning.report import plan_train
from refusion_jax.planning.search import fix_for

pytestmark = [pytest.mark.tpu_compile, pytest.mark.usefixtures("tpu_compiler")]


def shipped() -> list:
    """(config, variant, topology) of every config that names topologies; the large ones are slow."""
    found = []
    for name in CONFIGS:
        for variant, topologies in load_config(name).__globals__.get("TOPOLOGIES", {}).items():
            marks = [] if name == "quickstart" else [pytest.mark.thorough if variant == "0.6b" else pytest.mark.slow]
            found += [pytest.param(name, variant, topology, marks=marks) for topology in topologies]
    return found


def config_of(name: str, variant: str = "", **keys):
    config = load_config(name)(*[variant] if variant else [])
    config.update_from_flattened_dict(keys)
    return config


@functools.cache
def plan_of(name: str, variant: str, topology: str, memory_only: bool = True) -> dict:
    """The plan of a config as it is shipped."""
    return plan_train(config_of(name, variant), topology, 1, memory_only)


@functools.cache
def plan_8b(
    topology: str, rows: float, memory_only: bool = True, slices: int = 1, size: str = "8b", row_length=4096, **keys
) -> dict:
    """The plan of configs/refusion_8b.py at some rows per chip."""
    chips = slices
    for side in topology.split(":")[1].split("x"):
        chips *= int(side)
    keys = {key.replace("_", ".", 1): value for key, value in keys.items()}
    config = config_of("refusion_8b", size, batch_size=int(rows * chips), row_length=row_length, **keys)
    return plan_train(config, topology, slices, memory_only)


@pytest.mark.parametrize(("name", "variant", "topology"), shipped())
def test_every_shipped_config_fits_its_topologies_and_hardly_waits_for_others(name, variant, topology):
    """Gradients are scattered and summed during the arithmetic on v6e, and scattered so on v5p; other sums block."""
    record = plan_of(name, variant, topology)
    assert record["fits"], record
    assert record["gathers_by_all_reduce"] == 0, record
    is_v6e, scatters = topology.startswith("v6e"), topology.startswith(("v5p", "v6e"))
    if is_v6e or (scatters and config_of(name, variant).mesh.data == 1):
        assert record["blocking_all_reduces"] == 0, record
    sums = sum(c["bytes"] for c in record["collectives"] if c["kind"] == "all-reduce" and not c["overlapped"])
    seconds = sums / find_chip(topology).ici_bandwidth
    most = (0.01 if scatters else 0.08) * record["roofline_seconds"]
    assert seconds <= most or name == "quickstart", record  # a step of which takes 40 us


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slice", "faster"),
    [
        *[("v5p:2x2x4", 1.15), ("v5p:2x4x4", 1.13), ("v5p:4x4x4", 1.14), ("v5e:16x16", 1.14)],
        *[("v6e:4x8", 1.06), ("v6e:8x8", 1.18), ("v6e:16x16", 1.29), ("v4:2x4x4", 1.07)],
        ("tpu7x:4x4x4", 1.11),
    ],
)
def test_a_variant_for_a_slice_is_faster_than_the_size_as_shipped(slice, faster):
    own = config_of("refusion_8b", f"8b,{slice}")
    shipped, variant = (
        plan_train(c, slice, 1, memory_only=True)
        for c in (config_of("refusion_8b", "8b", batch_size=own.batch_size), own)
    )
    assert variant["fits"]
    assert shipped["step_seconds"] / variant["step_seconds"] >= faster


@pytest.mark.slow
@pytest.mark.parametrize(("slice", "seconds"), [("v6e:8x8", 1.0), ("v5p:4x4x4", 1.26), ("v5e:16x16", 1.59)])
def test_the_estimated_step_of_8b_takes_no_longer_than(slice, seconds):
    assert plan_of("refusion_8b", f"8b,{slice}", slice)["step_seconds"] <= seconds


# MaxText's step, without clipping and corruption, needs 8.15 (with its vocabulary tiling), 18.58 and 13.36.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "rows", "bound"), [("v5p:2x4x4", 2, 7.95), ("v5p:2x4x4", 4, 12.5), ("v5e:8x8", 4, 10)]
)
def test_the_8b_step_stays_within_its_memory(topology, rows, bound):
    assert plan_8b(topology, rows)["peak_hbm_gib"] <= bound


LARGE = pytest.param(functools.partial(plan_8b, "v5p:2x4x4", 2), marks=pytest.mark.slow)


@pytest.mark.parametrize("plan", [functools.partial(plan_of, "quickstart", "", "v5e:2x2"), LARGE])
@pytest.mark.thorough
def test_the_verdict_on_memory_is_that_of_a_full_compile_which_is_quick(plan):
    full, verdict = plan(memory_only=False), plan()
    assert 0 < full["compile_cpu_seconds"] <= 100
    assert verdict["compile_cpu_seconds"] is None
    assert full["calibrated"]
    fastest, slowest = full["step_seconds_range"]
    assert full["roofline_seconds"] <= fastest < full["step_seconds"] < slowest
    for key in ("state_gib", "peak_hbm_gib", "flops_per_chip", "hbm_bytes_per_chip", "collectives"):
        assert full[key] == verdict[key], key


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5p:4x8x8", "v5p:16x16x16"])
def test_more_copies_cost_a_chip_nothing(topology):
    """Weak scaling from 32 chips to 256 and 4,096: weights split over 32 chips, and copies of that.

    Sums over copies add 7 to 10 % to the bytes that are sent, in 0.4 % of the time.
    """
    few, many = (plan_8b(t, 2, mesh_fsdp=32, mesh_data=-1) for t in ("v5p:2x4x4", topology))
    for key in ("flops_per_chip", "peak_hbm_gib", "step_seconds"):
        assert many[key] <= 1.02 * few[key], key


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "slices"), [("v5p:4x8x8", 1), ("v5p:8x8x16", 1), ("v5p:4x4x8", 2)])
def test_more_copies_of_32b_cost_a_chip_nothing(topology, slices):
    """Weak scaling from 128 chips to 256 and 1,024, and to two slices that exchange gradients over the network."""
    few = plan_8b("v5p:4x4x8", 1, size="32b", mesh_fsdp=64, mesh_data=-1)
    many = plan_8b(topology, 1, slices=slices, size="32b", mesh_fsdp=64, mesh_data=-1, mesh_replica=slices)
    assert many["fits"]
    between = sum(c["bytes"] for c in many["collectives"] if c["over"] == "dcn")
    gradients = 32_762_123_264 / 64 * 4  # bytes of float32 a chip
    assert (slices > 1) == (between > 0)
    assert between < 2.1 * gradients
    for key in ("flops_per_chip", "peak_hbm_gib"):
        assert many[key] <= 1.05 * few[key], key
    assert many["collective_bytes_per_chip"] - between <= 1.05 * few["collective_bytes_per_chip"]
    if slices == 1:
        assert many["step_seconds"] <= 1.05 * few["step_seconds"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "rows", "parts", "bound"), [(32_768, 1, 1, 17.5), (32_768, 0.5, 2, 12), (131_072, 0.25, 4, 23)]
)
def test_long_rows_fit(length, rows, parts, bound):
    record = plan_8b("v5p:4x4x4", rows, row_length=length, mesh_sequence=parts)
    assert record["fits"]
    assert record["gathers_by_all_reduce"] == 0
    assert record["peak_hbm_gib"] <= bound
    # Of the chip with most to do: 1.69 at 131,072 tokens (one more forward, whole tiles), and 2.67 in row order.
    assert record["flops_per_chip"] <= 1.8 * record["model_flops_per_chip"]


@pytest.mark.slow
def test_a_chip_of_tpu7x_is_two_devices_and_its_collectives_are_counted():
    record = small_plan("tpu7x:2x2x1")
    assert (record["chips"], record["devices"], record["rows_per_chip"]) == (4, 8, 4)
    assert record["hbm_limit_gib"] < 96
    weights = 2 * 15.7e6 + 32_768 * 1024  # of a layer, and the embedding, which is the head
    assert record["collective_bytes_per_chip"] > weights * 2 * 7 / 8  # gathered once at least, in bfloat16


@functools.cache
def small_plan(topology="v5e:2x4", **keys) -> dict:
    """Qwen3's smallest, with rows of 512 tokens and two layers."""
    small = {"batch_size": 16, "row_length": 512, "model.num_hidden_layers": 2, "model.vocab_size": 32_768}
    config = config_of("refusion_8b", "0.6b", **small | {k.replace("_", ".", 1): v for k, v in keys.items()})
    return plan_train(config, topology, 1, memory_only=True)


@pytest.mark.thorough
def test_counted_flops_are_those_of_the_model():
    """Forward and backward are 3 x; the head's logits are made twice, and kernels multiply 2 + 5 times whole tiles,
    here the whole row, where 3 x 2 times its causal half counts."""
    record = small_plan(remat="none")
    tokens, layers, heads, width, row = 2 * 512, 2, 16 * 128, 1024, 512
    again = tokens * (2 * width * 32_768 + layers * 2 * heads * (7 * row - 6 * (row + 1) / 2))
    assert record["flops_per_chip"] == pytest.approx(record["model_flops_per_chip"] + again, rel=0.01)


POLICIES = ("none", "products", "outputs", "attention", "full")


@pytest.mark.parametrize("policies", [("none", "full"), pytest.param(POLICIES, marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_a_remat_policy_trades_more_flops_for_memory_than_the_one_before(policies):
    for a, b in itertools.pairwise(small_plan(remat=policy) for policy in policies):
        assert a["flops_per_chip"] < b["flops_per_chip"]
        assert a["peak_hbm_gib"] > b["peak_hbm_gib"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("quantization", "topology", "sent"),
    [("int8", "v5e:2x4", 7 / 8), ("fp8", "tpu7x:2x2x1", 9 / 8)],  # there each part goes on from chip to chip
)
def test_narrow_products_take_half_the_time_and_their_weights_half_the_bytes(quantization, topology, sent):
    """Two of three products with weights of layers, but not gradients of weights; attention and the output head stay as
    they are."""
    wide, narrow = (small_plan(topology, remat="none", quantization=name) for name in ("none", quantization))
    weights = 2 * 15.7e6  # of a layer; each does 6 FLOPs for a token, of which 4 take half the time
    saved = 2 * 512 * weights * 4 / 2 / find_chip(topology).peak_flops
    assert wide["compute_seconds"] - narrow["compute_seconds"] == pytest.approx(saved, rel=0.02)
    less = wide["collective_bytes_per_chip"] - narrow["collective_bytes_per_chip"]
    assert less == pytest.approx(2 * weights * (2 * 7 / 8 - sent), rel=0.1)  # a byte of each, forward and backward


@pytest.mark.thorough
def test_a_tensor_and_a_sequence_axis_compile_with_the_kernel():
    assert small_plan(mesh_tensor=2, mesh_sequence=2, mesh_fsdp=2)["fits"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "tile"),
    [("v4:2x2x1", 512), ("v5e:2x2", 512), ("v5p:2x2x1", 512), ("v6e:2x2", 1024), ("tpu7x:2x2x1", 512)],
)
def test_the_attention_kernel_and_its_gradient_fit_the_vector_memory(topology, tile):
    """Compiled to machine code: the verdict on HBM comes before vector memory is given out."""
    mesh = sharding.make_mesh({"fsdp": -1}, tpu_devices(topology, 1))

    def array(dtype, *shape):
        axes = ("batch", "length", "heads", "head_dim")[: len(shape)]
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.sharding(mesh, *axes))

    def gradients(q, k, v, segments):
        out, pull = jax.vjp(lambda q, k, v: splash_attention(q, k, v, causal(segments)), q, k, v)
        return pull(out)

    q, k, v = (array(jnp.bfloat16, 8, 4096, heads, 128) for heads in (8, 2, 2))
    with jax.set_mesh(mesh):
        compiled = jax.jit(gradients).lower(q, k, v, array(jnp.int32, 8, 4096)).compile()
    assert set(re.findall(r'block_\w+\\*": (\d+)', compiled.as_text())) == {str(tile)}


@pytest.mark.thorough
def test_a_run_that_does_not_fit_is_told_what_does():
    flags = ["--config=configs/refusion_8b.py:0.6b", "--topology=v5e:2x2", "--config.model.num_hidden_layers=4"]
    flags += ["--config.remat=none", "--config.batch_size=64", "--memory_only", "--json"]
    out, err = run("plan", *flags, code=2)
    record = json.loads(out)
    assert not record["fits"]
    promised = "topology chips rows_per_chip state_gib peak_hbm_gib hbm_limit_gib fits flops_per_chip"
    promised += " collective_bytes_per_chip compile_seconds libtpu"
    assert set(promised.split()) <= set(record)
    *_, line = err.strip().splitlines()  # after a warning, with other versions than those that are planned with
    assert line.startswith("error: needs ")
    assert line.endswith(" makes it fit")
    assert "--config." in line


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--topology=v9:2x2"], "--topology=v9:2x2: unknown; known are GENERATION:SHAPE such as v4:2x4x4, v5e:8x8"),
        (["--topology=v5e:3x3"], "--topology=v5e:3x3: Topology layout"),
        (["--topology=v6e:4x4x4"], "--topology=v6e:4x4x4: the shape must have two sides and at most 256 chips"),
        (["--topology=v5e:32x16"], "--topology=v5e:32x16: the shape must have two sides and at most 256 chips"),
        (["--topology=v5e:2x2", "--config.batch_size=6"], "batch_size=6: does not divide into 4 parts"),
        (["--topology=v5e:2x2", "--rows_per_chip=0.3"], "--rows_per_chip=0.3: not a whole number of rows on 4 chips"),
        ([], "--config=configs/NAME.py and --topology=GENERATION:SHAPE are needed"),
    ],
)
def test_what_cannot_be_planned_is_one_clear_line(flags, said):
    assert said in refused("plan", "--config=configs/quickstart.py", *flags)


@pytest.mark.parametrize(
    ("least", "said"), [(1, "--config.remat=full"), (300, "--config.remat=full --config.accumulation=512"), (10**7, "")]
)
def test_a_fix_is_found_by_halving_and_what_no_chip_can_hold_is_never_compiled(least, said, monkeypatch):
    tried = []

    def plan(config, *_, memory_only):
        tried.append(config.accumulation)
        return {"fits": config.accumulation >= least and config.remat != "none"}

    monkeypatch.setattr("refusion_jax.planning.search.plan_train", plan)
    config = config_of("quickstart", batch_size=4 * 2**20, remat="none")
    assert fix_for(config, "v5e:2x2", 1) == said
    assert len(tried) <= 9  # of 21 numbers of rows per forward, and three more changes
    tried.clear()
    assert fix_for(config_of("refusion_8b", "8b"), "v5e:2x2", 1) == ""
    assert tried == []


def test_a_fix_runs_one_row_at_a_time_where_chips_share_each_row(monkeypatch):
    monkeypatch.setattr("refusion_jax.planning.search.plan_train", lambda c, *_, **__: {"fits": c.accumulation == 8})
    config = config_of("quickstart", batch_size=8, **{"mesh.data": 1, "mesh.sequence": 4})
    assert fix_for(config, "v5e:2x2", 1) == "--config.remat=full --config.accumulation=8"


@pytest.mark.slow
def test_a_search_prints_what_it_tries_and_names_the_fastest():
    flags = ["--config=configs/quickstart.py", "--topology=v5e:2x2", "--rows_per_chip=1", "--search"]
    tried = [json.loads(line) for line in run("plan", *flags, "--json")[0].splitlines()]
    assert len(tried) > 4
    fitting = [record for record in tried if record["fits"]]
    fastest = min(fitting, key=lambda record: record["step_seconds"])
    out, _ = run("plan", *flags)
    assert out.splitlines()[-1] == f"fastest by the estimate: {fastest['flags']}"
    assert all(record["flags"] in out for record in tried)


def test_hybrid_meshes_put_only_copies_between_slices():
    ones, devices = dict.fromkeys(sharding.MESH_AXES, 1), tpu_devices("v5e:2x2", 2)
    mesh = sharding.make_mesh(ones | {"replica": 2, "fsdp": -1}, devices)
    assert dict(mesh.shape) == ones | {"replica": 2, "fsdp": 4}
    for replica in range(2):
        assert {device.slice_index for device in mesh.devices[replica].flat} == {replica}
    with pytest.raises(UserError, match="mesh.replica=1: the network between the 2 slices"):
        sharding.make_mesh(ones | {"fsdp": -1}, devices)

"""Recorded feeds: what forwards feed is counted as it is, kept in a file, and priced by arithmetic one can check."""

import collections
import dataclasses
import importlib.util
import itertools
import json

import pytest
from conftest import BOS, PROMPTS, run, settings, sharp_model, tiny_config

from refusion_jax import UserError
from refusion_jax.decoding.recording import Answers, Feeds, Forwards, Prefills, Recorder, Recording, read_recording
from refusion_jax.decoding.requests import prepare
from refusion_jax.distributed.chips import find_chip
from refusion_jax.distributed.sharding import MESH_AXES
from refusion_jax.planning.feeds import BATCH_SIZES, Target, Workload, forward_costs, price
from refusion_jax.planning.feeds_report import price_all
from refusion_jax.systems.api import stream
from refusion_jax.systems.registry import decoders, find_decoder

NEW = 16
ALL_AT_ONCE = {"slot": 0.0, "token": 0.0}  # every slot is chosen, and every draft accepted


def recorded(method: str, batch_size: int, **changes) -> tuple[Recording, dict]:
    """(the recording of the prompts, the answers by number)."""
    s = settings(method, new=NEW, batch_size=batch_size, **changes)
    model, recorder = sharp_model(), Recorder(s)
    answers = dict(stream(model, prepare(PROMPTS, s, model.config), recorder=recorder))
    return recorder.recording(), answers


def fed(recording: Recording) -> collections.Counter:
    """How often a row fed so many tokens on so many cached ones."""
    return collections.Counter({(one.tokens, one.cached): one.times for one in recording.feeds})


def check(recording: Recording, answers: dict) -> None:
    """What holds for every decoder."""
    forwards = sum(answer.forwards for answer in answers.values())
    assert recording.row_forwards == forwards
    assert sum(one.live_rows * one.times for one in recording.forwards) == forwards
    assert max(one.live_rows for one in recording.forwards) <= recording.rows
    assert recording.filler >= 1
    assert recording.tokens == sum(len(answer.tokens) for answer in answers.values())
    assert sum(one.times for one in recording.answers) == len(answers)
    given = sum(map(len, PROMPTS))
    assert sum(one.tokens * one.times for one in recording.prefills) in (0, given)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_left_to_right_feeds_one_token_on_all_before_it(batch_size):
    recording, answers = recorded("ar", batch_size)
    check(recording, answers)
    expected = collections.Counter(
        (1, len(PROMPTS[i]) - 1 + k) for i, answer in answers.items() for k in range(len(answer.tokens))
    )
    assert fed(recording) == expected
    assert all((one.width, one.tile, one.tiles) == (1, 1, batch_size) for one in recording.forwards)


def test_a_plan_and_its_drafts_are_fed_in_the_least_shape_that_holds_them():
    recording, answers = recorded("refusion", 1, **ALL_AT_ONCE)
    check(recording, answers)
    assert fed(recording) == collections.Counter((NEW, len(prompt)) for prompt in PROMPTS for _ in range(2))
    assert {(one.tile, one.tiles) for one in recording.forwards} == {(NEW, 1)}
    assert recording.filler == 1


def test_no_plan_is_fed_behind_a_draft_that_ends_the_answer():
    model = sharp_model()

    def decoded(**changes):
        s = settings(new=NEW, batch_size=1, serial_blocks=2, **ALL_AT_ONCE)
        recorder = Recorder(s := dataclasses.replace(s, **changes))
        (answer,) = dict(stream(model, prepare(PROMPTS[:1], s, model.config), recorder=recorder)).values()
        return answer.tokens, recorder.recording().feeds

    tokens, _ = decoded(speculate="0")
    assert len(tokens) > NEW // 2
    assert decoded(speculate="0") != decoded(
        speculate="100000"
    )  # the second block is planned beside the first's drafts
    of_first_block = tokens[2]  # which is EOS from now on
    assert decoded(speculate="0", eos_id=of_first_block) == decoded(speculate="100000", eos_id=of_first_block)


def test_rows_of_a_batch_share_forwards_and_say_what_they_would_have_said():
    recording, answers = recorded("refusion", 4)
    check(recording, answers)
    s, model = settings(new=NEW, batch_size=4), sharp_model()
    assert answers == dict(stream(model, prepare(PROMPTS, s, model.config)))
    assert sum(one.times for one in recording.forwards) < recording.row_forwards


def test_a_decoder_of_whole_texts_feeds_each_texts_own_length():
    recording, answers = recorded("conv", 1)
    check(recording, answers)
    expected = collections.Counter()
    for i, answer in answers.items():
        expected[len(PROMPTS[i]) + NEW, 0] += answer.forwards
    assert len(expected) > 1
    assert fed(recording) == expected


@pytest.mark.parametrize("method", ["conv", "llada", "dream", "fast_dllm"])
def test_a_short_text_takes_a_narrow_forward_whatever_waits_in_the_queue(method):
    long, model, s = [BOS, *[5, 6, 7] * 18], sharp_model(), settings(method, new=NEW, batch_size=1)
    recorder = Recorder(s)
    answers = dict(stream(model, prepare([*PROMPTS, long], s, model.config), recorder=recorder))
    recording = recorder.recording()
    alone = dict(stream(model, prepare(PROMPTS, s, model.config)))
    assert {i: answers[i] for i in alone} == alone
    capacity = 96  # of 55 and NEW tokens, in multiples of 32
    for one in recording.forwards:
        assert one.width in {NEW, capacity // 4, capacity // 2, 3 * capacity // 4}
    assert {capacity // 4, 3 * capacity // 4} <= {one.width for one in recording.forwards}


def test_where_masks_are_merged_one_of_each_group_is_fed_in_the_least_width():
    recording, answers = recorded("llada", 1, block_length=4, steps=NEW, merge=4)
    check(recording, answers)
    expected = collections.Counter()
    for i, answer in answers.items():
        for forward in range(answer.forwards):  # one a mask
            block_end = 4 * (forward // 4 + 1)
            expected[len(PROMPTS[i]) + block_end + -(-(NEW - block_end) // 4), 0] += 1
    assert fed(recording) == expected
    assert len({one.width for one in recording.forwards}) > 1


def test_a_decoder_that_feeds_whole_texts_and_then_blocks_says_which():
    recording, answers = recorded("fast_dllm", 1, threshold=1.0)
    check(recording, answers)
    expected = collections.Counter()
    for i, answer in answers.items():
        expected[len(PROMPTS[i]) + NEW, 0] += 1
        expected[NEW, len(PROMPTS[i])] += answer.forwards - 1
    assert fed(recording) == +expected


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in decoders() if not find_decoder(name).settings.companions])
def test_every_decoder_can_be_recorded(method):
    check(*recorded(method, 2))


@pytest.mark.parametrize("method", [name for name in decoders() if not find_decoder(name).settings.companions])
def test_rows_of_a_batch_run_side_by_side_or_the_recording_says_that_they_wait(method):
    """All prompts at once: as many forwards as the longest answer takes, unless rows wait for each other."""
    changes = {"refusion": {"speculate": "0"}, "fast_dllm": {"block_length": 4, "threshold": 0.3}}.get(method, {})
    recording, answers = recorded(method, len(PROMPTS), **changes)
    together, longest = sum(one.times for one in recording.forwards), max(a.forwards for a in answers.values())
    assert (together > longest) == recording.rows_wait


def test_a_decoder_of_two_models_is_refused():
    with pytest.raises(UserError, match="'apd' cannot be recorded: a forward of it feeds 2 models"):
        Recorder(settings("apd"))


# By hand: four answers of 8 tokens behind 16 given ones, each in two forwards of 16 places on 16 and on 24 tokens.
RECORDING = Recording(
    decoder="some",
    settings="",
    rows=1,
    shards=1,
    cache_length=48,
    forwards=(Forwards(width=16, tile=16, tiles=1, live_rows=1, times=8),),
    feeds=(Feeds(tokens=16, cached=16, times=4), Feeds(tokens=16, cached=24, times=4)),
    prefills=(Prefills(rows=1, width=32, forwards=1, tokens=16, times=4),),
    answers=(Answers(given=16, tokens=8, times=4),),
)


def test_what_is_written_is_read_again(tmp_path):
    (tmp_path / "feeds.json").write_text(RECORDING.as_json())
    assert read_recording(tmp_path / "feeds.json", "feeds") == RECORDING


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"feeds": []}, "it holds no token"),
        ({"answers": [{"given": 1, "tokens": 0, "times": 1}]}, "it holds no token"),
        ({"rows": 0}, "'rows' must be 1 to"),
        ({"feeds": [{"tokens": -1, "cached": 1, "times": 1}]}, "'tokens' must be 0 to"),
        ({"feeds": [{"tokens": 1, "cached": 1, "times": 2**41}]}, "'times' must be 1 to"),
        ({"feeds": [{"tokens": 1, "times": 1}]}, "'cached' is missing"),
        ({"other": 1}, "'other' is no key that we know"),
    ],
)
def test_a_file_that_is_no_recording_is_one_clear_line(tmp_path, change, said):
    path = tmp_path / "feeds.json"
    path.write_text(json.dumps(dataclasses.asdict(RECORDING) | change))
    with pytest.raises(UserError, match=f"--feeds={path}: is no recording of feeds: {said}"):
        read_recording(path, "feeds")


MODEL = tiny_config(hidden_size=1024, intermediate_size=4096, vocab_size=32_768, num_hidden_layers=8)
CHIP = find_chip("v5e:2x4")


LAYERS = 8 * 1024 * (32 + 32 + 32) + 8 * 3 * 1024 * 4096  # weights: queries, keys and values, outputs; the mlp
HEAD = 32_768 * 1024


def target(**mesh) -> Target:
    return Target(MODEL, "bfloat16", CHIP, dict.fromkeys(MESH_AXES, 1) | mesh)


def test_one_row_waits_for_the_weights_and_so_counts_its_forwards():
    here = price(Workload.recorded(dataclasses.replace(RECORDING, prefills=())), 1, target())
    weights = 2 * (LAYERS + HEAD)  # bytes, of bfloat16
    cache = 8 * 2 * 2 * 8 * 2 * (20 + 16)  # layers, keys and values, heads, head size, bytes; read and written
    assert here.forward_seconds == pytest.approx((weights + cache) / CHIP.hbm_bandwidth, rel=1e-6)
    assert here.bound == "memory"
    assert here.tokens_per_second == pytest.approx(8 / (2 * here.forward_seconds))


def test_what_was_recorded_in_int8_is_priced_in_int8():
    outputs = 8 * (64 + 1024 + 2 * 4096 + 1024) + 32_768  # of all layers and the head; each has a scale of 4 bytes
    weights = {"same": 2 * (LAYERS + HEAD), "int8": LAYERS + HEAD + 4 * outputs}
    cache = {"same": 8 * 2 * 2 * 8 * 2 * (20 + 16), "int8": 8 * 2 * 2 * (8 + 4) * (20 + 16)}
    for kept, stored in itertools.product(weights, cache):
        changed = dataclasses.replace(RECORDING, settings=f"batch_size=1 weights={kept} cache={stored}")
        here = price_all(changed, target())[0]
        assert here["forward_seconds"] * CHIP.hbm_bandwidth == pytest.approx(weights[kept] + cache[stored], rel=1e-6)
        assert here["one_token_memory_seconds"] * CHIP.hbm_bandwidth == pytest.approx(weights[kept], rel=1e-2)


def test_many_rows_wait_for_their_arithmetic():
    way = Workload.recorded(RECORDING)
    here = price(way, 4096, target())
    attention = 8 * 4 * 4 * 8 * 16 * (20 + 16)  # layers, products and FLOPs of one, heads, head size, queries, keys
    flops = 2 * 16 * (LAYERS + HEAD) + attention
    assert forward_costs(way.load, target()).flops == flops
    assert here.bound == "arithmetic"
    assert here.arithmetic_seconds == pytest.approx(4096 * flops / CHIP.peak_flops, rel=0.01)


def test_a_prompt_is_read_once_and_makes_no_logits():
    alone, eight, many = (price(Workload.recorded(RECORDING), rows, target()) for rows in (1, 8, 16))
    weights = 2 * (LAYERS + HEAD) / CHIP.hbm_bandwidth  # seconds
    assert alone.prefill_share == pytest.approx(LAYERS / (LAYERS + 2 * (LAYERS + HEAD)), rel=0.01)
    seconds = [rows * 8 / one.tokens_per_second for rows, one in ((8, eight), (16, many))]
    assert seconds[0] - 2 * eight.forward_seconds > 7 * weights * LAYERS / (LAYERS + HEAD)  # eight, one by one
    assert (seconds[1] - 2 * many.forward_seconds) < 1.3 * (seconds[0] - 2 * eight.forward_seconds)  # two by two


def test_filler_is_fed_too():
    fuller = dataclasses.replace(RECORDING, forwards=(Forwards(width=32, tile=32, tiles=1, live_rows=1, times=8),))
    ways = [Workload.recorded(r) for r in (RECORDING, fuller)]
    speeds = [price(way, 4096, target()).forward_seconds for way in ways]
    assert speeds[1] == pytest.approx(2 * speeds[0], rel=0.01)


def test_one_token_a_forward_is_priced_as_its_own_recording_is():
    lone = dataclasses.replace(
        RECORDING,
        cache_length=24,
        forwards=(Forwards(width=1, tile=1, tiles=1, live_rows=1, times=32),),
        feeds=tuple(Feeds(tokens=1, cached=15 + k, times=4) for k in range(8)),
    )
    assert [record["speedup"] for record in price_all(lone, target())] == pytest.approx([1.0] * len(BATCH_SIZES))


def test_speed_rises_with_the_batch_and_the_advantage_ends():
    records = price_all(RECORDING, target())
    for name in ("tokens_per_second", "one_token_a_forward"):
        speeds = [record[name] for record in records]
        assert speeds == sorted(speeds)
    assert records[0]["speedup"] > 2  # 4 tokens a forward, and the same prefill
    assert records[-1]["speedup"] < 1  # 4 places a token
    assert [record["bound"] for record in (records[0], records[-1])] == ["memory", "arithmetic"]


def test_chips_that_share_the_heads_share_the_work_and_talk():
    alone, shared = (price(Workload.recorded(RECORDING), 64, target(tensor=n)) for n in (1, 2))
    assert not alone.network_seconds
    of_arithmetic = [p.memory_seconds + p.arithmetic_seconds for p in (alone, shared)]
    assert of_arithmetic[1] == pytest.approx(of_arithmetic[0] / 2, rel=0.02)
    reduced = (2 * 8 + 1) * 2 * (64 * 16 * 1024 * 2) / 2  # two a layer and the embedding's; each once there and back
    assert shared.network_seconds == pytest.approx(reduced / CHIP.ici_bandwidth)


def test_copies_split_the_rows_and_gathered_weights_cost_their_way():
    way = Workload.recorded(dataclasses.replace(RECORDING, prefills=()))
    meshes = (16, {}), (64, {"data": 4}), (64, {"fsdp": 4})
    one, four, gathered = (price(way, rows, target(**mesh)) for rows, mesh in meshes)
    assert four.tokens_per_second == pytest.approx(4 * one.tokens_per_second)
    assert gathered.forward_seconds > four.forward_seconds
    assert gathered.bound == "network"


def test_of_rows_that_wait_for_each_other_only_one_is_priced():
    for rows_wait, sizes in ((False, BATCH_SIZES), (True, BATCH_SIZES[:1])):
        priced = price_all(dataclasses.replace(RECORDING, rows_wait=rows_wait), target())
        assert tuple(record["batch_size"] for record in priced) == sizes


def test_what_does_not_fit_is_said():
    assert price(Workload.recorded(RECORDING), 1, target()).fits
    assert not price(Workload.recorded(dataclasses.replace(RECORDING, cache_length=10**6)), 256, target()).fits


def test_generate_records_and_a_recording_excludes_what_it_cannot_have(trained_run, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "Sort 7 3."}\n{"prompt": "Sort 9 1."}\n')
    flags = [f"--checkpoint={trained_run}", f"--input={tmp_path}/in.jsonl", "--decode.max_new_tokens=8"]
    flags += ["--decode.batch_size=1", f"--output={tmp_path}/out.jsonl", f"--record_feeds={tmp_path}/new/feeds.json"]
    run("generate", *flags)
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    recording = read_recording(tmp_path / "new" / "feeds.json", "feeds")
    assert recording.row_forwards == sum(answer["forwards"] for answer in answers)
    assert recording.settings == "max_new_tokens=8 batch_size=1"

    for other, said in (
        ([f"--record_feeds={tmp_path}/out.jsonl"], f"--output={tmp_path}/out.jsonl is the same file"),
        ([f"--record_feeds={tmp_path}"], "is a directory"),
    ):
        _, err = run("generate", *flags, *other, code=2)
        assert said in err
        assert len(err.splitlines()) == 1


needs_topologies = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler: pip install libtpu (Linux)"
)
PLAN = ["--config=configs/quickstart.py", "--topology=v5e:2x2", "--config.mesh.tensor=2", "--config.mesh.fsdp=2"]


@needs_topologies
def test_plan_prices_recordings_side_by_side(tmp_path):
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    for path in paths:
        path.write_text(RECORDING.as_json())
    out, _ = run("plan", *PLAN, "--what=decode", *(f"--feeds={path}" for path in paths), "--json")
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["batch_size"] for record in records[: len(BATCH_SIZES)]] == list(BATCH_SIZES)
    assert [record["feeds"] for record in records] == [str(path) for path in paths for _ in BATCH_SIZES]
    one, two = ([{**record, "feeds": ""} for record in records if record["feeds"] == str(path)] for path in paths)
    assert one == two
    assert not any(record["calibrated"] for record in records)
    for record in records:
        parts = sum(record[f"{name}_seconds"] for name in ("memory", "arithmetic", "network"))
        assert parts == pytest.approx(record["forward_seconds"], rel=1e-4)  # six digits of each
    out, _ = run("plan", *PLAN, "--what=decode", f"--feeds={paths[0]}")
    assert "Estimate, not calibrated, for v5e:2x2: 4 chips (fsdp=2, tensor=2)" in out


@needs_topologies
@pytest.mark.parametrize(
    ("flags", "rows", "said"),
    [
        ([], 1, "--feeds: is for --what=decode"),
        (["--what=decode", "--decode.slot_size=4"], 1, "--decode.slot_size: is of no use with --feeds"),
        (["--what=decode", "--memory_only"], 1, "--memory_only: is of no use with --feeds"),
        (["--what=decode"], 2, "was recorded with 2 rows at once; record with --decode.batch_size=1"),
        (["--what=decode", "--config.mesh.sequence=2", "--config.mesh.fsdp=1"], 1, "mesh.sequence=2: decoding does"),
        (["--what=decode", "--config.model.num_key_value_heads=1"], 1, "does not divide into 2 parts"),
    ],
)
def test_what_cannot_be_priced_is_one_clear_line(tmp_path, flags, rows, said):
    path = tmp_path / "feeds.json"
    path.write_text(dataclasses.replace(RECORDING, rows=rows).as_json())
    _, err = run("plan", *PLAN, f"--feeds={path}", *flags, code=2)
    assert said in err
    assert len(err.splitlines()) == 1

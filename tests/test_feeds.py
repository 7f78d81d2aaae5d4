"""Recorded feeds: what forwards feed is counted as it is, kept in a file."""

import collections
import dataclasses
import json

import pytest
from conftest import BOS, PROMPTS, run, settings, sharp_model

from refusion_jax import UserError
from refusion_jax.decoding.recording import Answers, Feeds, Forwards, Prefills, Recorder, Recording, read_recording
from refusion_jax.decoding.requests import prepare
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

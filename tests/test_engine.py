"""What serves requests, without HTTP: rows shared by callers."""

import dataclasses
import gc
import math
import threading
import weakref

import jax
import pytest
from conftest import BOS, PROMPTS, compiled, equipped, settings, sharp_model
from helpers import wait_until

from refusion_jax import Request, decode
from refusion_jax.cli.errors import Failure
from refusion_jax.decoding import queue
from refusion_jax.decoding.requests import prepare
from refusion_jax.decoding.trajectory import forwards_of
from refusion_jax.serving import engine as serving_engine
from refusion_jax.serving.engine import MOST_WAITING, BusyError, Engine, Job
from refusion_jax.systems.api import decoder_for
from refusion_jax.systems.registry import find_system


class Told:
    """Collects what the engine reports, in order, for several jobs."""

    def __init__(self):
        self.finished, self.done, self.all_asked = [], threading.Semaphore(0), threading.Event()

    def hold(self, answer):
        """Has the engine stand still until all is asked, however quick it is."""
        return self.all_asked.wait(300)

    def job(self, name, request, watch=lambda answer: True, is_watched=False):
        def report(answer, is_finished):
            goes_on = watch(answer)
            if is_finished or not goes_on:
                self.finished.append((name, answer))
                self.done.release()
            return goes_on

        return Job(request, report, self.fail, is_watched)

    def fail(self, error):
        self.finished.append(("failed", error))
        self.done.release()

    def wait(self, count):
        self.all_asked.set()
        for _ in range(count):
            assert self.done.acquire(timeout=300)
        return [name for name, _ in self.finished]


@pytest.fixture
def engine():
    model, own = sharp_model(), settings("ar", new=96, eos_id=29, cache_length=128)
    engine = Engine(model, own, rows=2)
    engine.start()
    yield engine, model, own
    engine.close()


def request_of(engine, prompt, new):
    return engine.check(Request(prompt, settings=settings("ar", new=new, eos_id=29)))


@pytest.mark.parametrize("method", ["refusion", "dense_plan"])
def test_a_request_may_ask_for_no_speculation_where_a_server_speculates_by_itself(method):
    own = settings(method, speculate="auto", cache_length=64)
    asked = Request([BOS, 5], settings=dataclasses.replace(own, speculate="0"))
    assert Engine(sharp_model(), own, rows=2).check(asked).settings.speculate == "0"


def test_short_answers_do_not_wait_for_a_long_one(engine):
    engine, model, own = engine
    told = Told()
    long = next(p for p in ([BOS, 5 + i] for i in range(20)) if len(decode(model, [p], own).tokens[0]) == 96)
    engine.submit([told.job("long", request_of(engine, long, 96), told.hold, is_watched=True)])
    engine.submit([told.job(i, request_of(engine, [BOS, 7 + i], 4)) for i in range(12)])
    assert told.wait(13) == [*range(12), "long"]
    answers = dict(told.finished)
    assert answers["long"].tokens == decode(model, [long], own).tokens[0]


def test_callers_with_many_requests_have_their_turns():
    """In the only row, whoever came first: an answer of one, then one of the other."""
    told, engine = Told(), Engine(sharp_model(), settings("ar", new=24, eos_id=29, cache_length=32), rows=1)
    engine.start()
    for caller in "abc":
        request = request_of(engine, [BOS, 5], 24)
        engine.submit([told.job(f"{caller}{i}", request, told.hold, is_watched=True) for i in range(3)])
        wait_until(lambda: engine.load["decoding"])
    names = told.wait(9)
    engine.close()
    assert names == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]


@pytest.mark.parametrize(("often", "is_few"), [(0.0, False), (math.inf, True)])
def test_an_answer_is_shown_as_soon_as_it_begins_and_then_as_often_as_people_can_read(
    often, is_few, engine, monkeypatch
):
    engine, *_ = engine
    told, shown = Told(), []
    monkeypatch.setattr("refusion_jax.serving.engine.OFTEN", often)
    request, watch = request_of(engine, [BOS, 5], 96), lambda answer: shown.append(len(answer.tokens)) or True
    engine.submit([told.job("shown", request, watch, is_watched=True)])
    told.wait(1)
    assert shown[0] < shown[-1]
    assert (len(shown) == 2) == is_few


@pytest.mark.thorough
def test_a_lossless_decoder_is_served_and_so_are_the_gaps_that_it_fills():
    """Three times as many requests as rows; drafts are counted of these alone, and not of what compiles."""
    model, own = sharp_model(), settings("dense", new=12, cache_length=64)
    gaps = Request([BOS, 9], (5, [7, 8], 4)), Request([BOS, 6], (3, [11]))
    asked = [*(Request([BOS, 7 + i]) for i in range(4)), *gaps]
    engine, told = Engine(model, own, rows=2), Told()
    engine.start()
    try:
        assert engine.verified == [0, 0]
        requests = [engine.check(dataclasses.replace(request, settings=own)) for request in asked]
        engine.submit([told.job(i, request) for i, request in enumerate(requests)])
        told.wait(len(requests))
    finally:
        engine.close()
    for i, answer in told.finished:
        assert answer.tokens == find_system("dense").references["dense"](model, requests[i])["tokens"]


def test_what_a_prompt_begins_with_is_known_after_its_row_has_had_others(engine):
    """The same answers as without, nothing compiled, and no more memory than at first."""
    engine, model, own = engine
    header = [BOS, *(5 + i * i % 23 for i in range(63))]
    prompts = [[*header, 7], *([BOS, 5 + i] * 20 for i in range(6)), [*header, 8], [*header, 7]]
    told, size = Told(), [x.nbytes for x in jax.tree.leaves(engine._batch._store)]
    jobs = [told.job(i, request_of(engine, prompt, 8)) for i, prompt in enumerate(prompts)]
    with compiled() as programs:
        for job in jobs:
            engine.submit([job])
            told.wait(1)
    assert not programs
    assert [job.cached for job in jobs] == [0] * 7 + [64] * 2
    assert [x.nbytes for x in jax.tree.leaves(engine._batch._store)] == size
    for i, answer in told.finished:
        assert answer.tokens == decode(model, [prompts[i]], settings("ar", new=8, eos_id=29)).tokens[0]


@pytest.mark.parametrize("method", ["ar", "refusion"])
def test_others_decode_while_a_long_prompt_is_prefilled(method, monkeypatch):
    """In parts of 32 tokens, each followed by forward passes of those who came before; the same answer as at once."""
    changes = (queue, "PREFILL_CHUNK", 32), (queue, "MOST_PARTS", 64), (serving_engine, "MOST_PARTS", 64)
    for change in (*changes, (serving_engine, "OFTEN", 0.0)):
        monkeypatch.setattr(*change)
    model, own = sharp_model(), settings(method, new=192, eos_id=29, cache_length=448)
    told, reports, asked, long = Told(), [], {}, [BOS, *(5 + i * i % 23 for i in range(200))]
    engine = Engine(model, own, rows=2)

    def jobs(name, prompt):
        new = asked[name] = dataclasses.replace(own, max_new_tokens=192 if name == "first" else 8)
        request = engine.check(Request(prompt, settings=new))
        return [told.job(name, request, lambda answer: reports.append(name) or told.hold(answer), is_watched=True)]

    engine.start()
    try:
        engine.submit(jobs("first", [BOS, 7]))
        wait_until(lambda: reports)
        engine.submit(second := jobs("long", long))
        told.all_asked.set()
        wait_until(lambda: "long" in reports)
        seen = reports.index("long") - 1
        engine.submit(third := jobs("again", long))
        told.wait(3)
    finally:
        engine.close()
    assert seen >= 5
    assert (second[0].cached, third[0].cached) == (0, 192)
    for name, answer in told.finished:
        assert answer.tokens == decode(model, [[BOS, 7] if name == "first" else long], asked[name]).tokens[0]


def test_a_caller_who_has_enough_frees_the_row_and_one_who_fails_harms_nobody(engine):
    engine, model, own = engine
    told = Told()
    prompts = [[BOS, 5 + i] for i in range(6)]

    def breaks(answer):
        raise ValueError("a bug of the caller")

    jobs = [told.job(i, request_of(engine, p, 96), lambda answer: False, True) for i, p in enumerate(prompts)]
    jobs += [told.job("bug", request_of(engine, prompts[0], 96), breaks, True)]
    jobs += [told.job("whole", request_of(engine, p, 32)) for p in prompts]
    engine.submit(jobs)
    assert sorted(map(str, told.wait(13))) == [*map(str, range(6)), "failed", *["whole"] * 6]
    whole = [answer.tokens for name, answer in told.finished if name == "whole"]
    assert sorted(whole) == sorted(decode(model, [p], settings("ar", new=32, eos_id=29)).tokens[0] for p in prompts)
    wait_until(lambda: engine.load == {"rows": 2, "decoding": 0, "waiting": 0})


def test_who_leaves_while_an_answer_is_reported_frees_the_row(engine):
    """As the thread that hears of it does, in the midst of a report by the engine's."""
    engine, model, own = engine
    told, lengths = Told(), []

    def leave(answer):
        lengths.append(len(answer.tokens))
        job.is_over = True
        return True

    long = next(p for p in ([BOS, 5 + i] for i in range(20)) if len(decode(model, [p], own).tokens[0]) == 96)
    job = told.job("gone", request_of(engine, long, 96), leave, is_watched=True)
    engine.submit([job])
    wait_until(lambda: lengths and engine.load["decoding"] == 0)
    assert len(lengths) == 1
    assert lengths[0] < 96


def test_those_who_have_gone_keep_nobody_out(engine):
    """While both rows are busy."""
    engine, *_ = engine
    told, request = Told(), request_of(engine, [BOS, 5], 96)
    both = threading.Event()

    def hold(answer):
        both.wait(300)
        return engine.load["decoding"] < 2 or not told.hold(answer)

    for i in range(2):
        engine.submit([told.job(i, request, hold, is_watched=True)])
    both.set()
    try:
        wait_until(lambda: engine.load["decoding"] == 2)
        gone = [Told().job(i, request) for i in range(MOST_WAITING)]
        engine.submit(gone)
        with pytest.raises(BusyError, match=f"{MOST_WAITING} answers are waiting"):
            engine.submit([told.job("late", request)])
        for job in gone:
            job.is_over = True
        assert engine.load["waiting"] == 0
        engine.submit([told.job("late", request)])
        assert engine.load["waiting"] == 1
    finally:
        told.all_asked.set()
    assert told.wait(3) == [0, 1, "late"]


def test_a_newcomer_starts_within_two_forwards_while_one_has_many_long_answers(engine, monkeypatch):
    """From any run of forwards in which it comes, however many rows and tokens the other has asked for."""
    engine, *_ = engine
    told, run, admit, forwards = Told(), engine._batch.run, engine._batch.admit, []
    short = told.job("short", request_of(engine, [BOS, 9], 8))

    def count(finished, most):
        forwards.append(most)
        run(finished, most)
        if len(forwards) == 5:
            engine.submit([short])

    def admitted(requests):
        if short.request in requests:
            forwards.append("admitted")
        return admit(requests)

    monkeypatch.setattr(engine._batch, "run", count)
    monkeypatch.setattr(engine._batch, "admit", admitted)
    engine.submit([told.job(("long", i), request_of(engine, [BOS, 7], 96)) for i in range(32)])
    told.wait(33)
    assert sum(forwards[4 : forwards.index("admitted")]) <= 2


def test_a_forward_that_fails_takes_only_the_answers_in_it(engine, monkeypatch, capsys):
    engine, model, own = engine
    told, prompts = Told(), [[BOS, 5 + i] for i in range(5)]
    with monkeypatch.context() as patched:
        patched.setattr(engine._batch, "look", lambda: 1 / 0)
        engine.submit([told.job(i, request_of(engine, prompt, 8)) for i, prompt in enumerate(prompts)])
        told.wait(5)
    names = [name for name, _ in told.finished]
    assert names == ["failed", 1, 2, 3, 4]  # a row is kept for others
    assert "decoding has failed: ZeroDivisionError: division by zero" in str(told.finished[0][1])
    assert capsys.readouterr().out.endswith("; answers that are lost: 1\n")
    expected = decode(model, prompts, settings("ar", new=8, eos_id=29)).tokens
    assert [answer.tokens for _, answer in told.finished[1:]] == expected[1:]


def test_an_admission_that_fails_takes_only_the_requests_in_it(engine, monkeypatch):
    """With the arrays that it was given, as a device does that has no memory left."""
    engine, model, own = engine
    told, admit, results = Told(), queue._admit, []

    def breaks(*args):
        results.append(admit(*args))
        return results[-1] if len(results) > 1 else 1 / 0

    long = next(p for p in ([BOS, 5 + i] for i in range(20)) if len(decode(model, [p], own).tokens[0]) == 96)
    engine.submit([told.job("long", request_of(engine, long, 96), told.hold, is_watched=True)])
    wait_until(lambda: engine.load["decoding"])
    monkeypatch.setattr(queue, "_admit", breaks)
    engine.submit([told.job(i, request_of(engine, [BOS, 9 + i], 8)) for i in range(2)])
    names = told.wait(3)
    assert (names[0], sorted(names[1:], key=str)) == ("failed", [1, "long"])
    answers = dict(told.finished)
    assert isinstance(answers["failed"], Failure)
    assert answers["long"].tokens == decode(model, [long], own).tokens[0]
    assert answers[1].tokens == decode(model, [[BOS, 10]], settings("ar", new=8, eos_id=29)).tokens[0]


def test_a_forward_that_fails_takes_no_long_prompt_that_only_waits(monkeypatch):
    """But the one of two whose first part was prefilled before it."""
    told, reports, own = Told(), [], settings("ar", new=64, eos_id=29, cache_length=640)
    engine = Engine(sharp_model(), own, rows=4)
    engine.start()
    first = request_of(engine, [BOS, 7], 64)
    engine.submit([told.job("first", first, lambda answer: reports.append(1) or told.hold(answer), True)])
    wait_until(lambda: reports)
    jobs, look = [told.job(i, request_of(engine, [BOS, 5 + i] * 300, 4)) for i in range(2)], engine._batch.look
    monkeypatch.setattr(engine._batch, "look", lambda: 1 / 0 if jobs[0].parts else look())
    engine.submit(jobs)
    assert {*map(str, told.wait(3))} == {"1", "failed", "first"}
    engine.close()


def test_a_device_that_goes_on_failing_ends_the_engine_and_tells_everybody(engine, monkeypatch):
    engine, *_ = engine
    told = Told()
    caches = weakref.WeakSet()
    monkeypatch.setattr(queue.RunningBatch, "look", lambda batch: caches.add(batch) or 1 / 0)
    engine.submit([told.job(i, request_of(engine, [BOS, 5], 8)) for i in range(5)])
    assert told.wait(5) == ["failed"] * 5
    wait_until(lambda: engine.failure)
    with pytest.raises(BusyError, match="about to end"):
        engine.submit([told.job(9, request_of(engine, [BOS, 5], 8))])
    engine._thread.join()
    gc.collect()
    assert not caches


def test_structured_answers_that_cannot_be_decoded_are_the_servers_fault(engine, monkeypatch):
    engine, *_ = engine
    monkeypatch.setattr(Engine, "_compile", lambda engine: 1 / 0)
    with pytest.raises(Failure, match="structured answers cannot be decoded: division by zero"):
        engine.constrained(None)
    assert engine.load["rows"] == 2


def test_the_prefixes_of_a_model_and_of_a_drafter_in_its_cache_keep_within_their_bytes():
    own = settings("dflash", cache_length=64)
    engine = Engine(equipped(sharp_model(), "dflash"), own, rows=1, prefix_cache=1 << 16)
    kept = sum(x.nbytes for x in jax.tree.leaves(engine._batch._store))
    assert 1 << 15 < kept <= 1 << 16


def test_drafts_are_counted_as_the_forwards_tell_them():
    """Those that a forward pass fed, and those of them that it committed."""
    model = sharp_model()
    requests = prepare(PROMPTS[:2], settings("prompt_lookup", new=16), model.config)
    decoder = decoder_for(requests, model.config)
    batch = queue.RunningBatch(model, decoder, requests[0], 2, counts_drafts=True)
    batch.recorded = 64
    rows = batch.admit(requests)
    batch.run(2)
    progress = batch.look()
    for row in rows:
        record, *_ = progress.of(row)
        commits = list(zip(record.positions.tolist(), record.tokens.tolist(), strict=True))
        told = forwards_of([jax.tree.map(lambda x, row=row: x[:, row], progress.trajectory)])
        forwards = [told[number] for number in sorted(told)]
        ends = [*(one.committed for one in forwards[1:]), int(record.count)]
        kept = [
            set(commits[one.committed : end]) & {*one.drafts.items()} for one, end in zip(forwards, ends, strict=True)
        ]
        assert progress.drafts[row].tolist() == [sum(len(one.drafts) for one in forwards), sum(map(len, kept))]
    assert progress.drafts.all()

"""The held-out loss is exact, the same on any devices, in any run and by `evaluate --data`, and changes no training."""

import functools
import json
import re

import jax
import numpy as np
import pytest
from conftest import MASK, TINY_RUN, config_with, refused, run, tiny_config, tiny_model
from flax import nnx
from helpers import Letters, evaluate_on_two
from local_task import CHOICES, GENERATE
from test_tokenizers import write_sentencepiece

from refusion_jax import UserError, load_model, load_tokenizer
from refusion_jax.batch.batch import is_labelled, weigh
from refusion_jax.batch.rows import Rows, noise_keys, row_index
from refusion_jax.config import make_objective
from refusion_jax.config.run_config import read_config
from refusion_jax.data.examples import Example
from refusion_jax.data.fast_tokenizer import load_tokenizer_file
from refusion_jax.data.packing import PackedRows, tokenize
from refusion_jax.data.tokenizer import SentencePieceTokenizer
from refusion_jax.distributed import sharding
from refusion_jax.distributed.sharding import make_mesh
from refusion_jax.evaluation import benchmark, heldout
from refusion_jax.evaluation.harness import EvaluatedModel
from refusion_jax.evaluation.heldout import evaluate_model, find_held_out, make_held_out, make_loss, pick, place
from refusion_jax.evaluation.likelihood import held_out_bits
from refusion_jax.model import huggingface
from refusion_jax.model.transformer import Transformer
from refusion_jax.systems.registry import default_decoder, find_system
from refusion_jax.training.metrics import read_metrics

SIZES = {"row_length": 32, "batch_size": 8, "slots.sizes": (2, 4), "eval.every": 1}


def some_rows(count: int, seed: int = 0) -> PackedRows:
    """Rows of two documents with a prompt each, and some padding."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(5, 30, size=(count, 32)).astype(np.int32)
    segment_ids = np.repeat([[1, 2, 0]], count, axis=0).repeat([14, 15, 3], axis=1).astype(np.int32)
    place_in_row = np.arange(32)[None]
    is_response = ((place_in_row >= 3) & (place_in_row < 14)) | ((place_in_row >= 18) & (segment_ids > 0))
    return PackedRows(np.where(segment_ids > 0, tokens, 0), segment_ids, is_response)


def evaluate(sets, devices: int = 1, **changes) -> dict[str, float]:
    config = config_with(**SIZES | changes)
    mesh = make_mesh({"fsdp": devices}, jax.devices()[:devices])
    model = Transformer(tiny_config(), nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    params = nnx.to_pure_dict(params)
    with jax.set_mesh(mesh):
        params = jax.device_put(params, sharding.sharding(mesh))
        loss = make_loss(config, place(config, pick(config, sets), mesh), graphdef, make_objective(config, 4))
        return {name: float(value) for name, value in loss(params).items()}


def terms(config, model: Transformer, rows: PackedRows) -> dict[str, float]:
    """The terms of the loss of all rows as one batch, in one forward."""
    arrays = Rows(*map(jax.numpy.asarray, vars(rows).values()))
    batch = make_objective(config, MASK).corrupt(arrays, noise_keys(0, 0, len(arrays.tokens)))
    found = weigh(jax.jit(model.cross_entropy)(batch)[0], batch)
    return {name: float(value) for name, value in found.items()}


@functools.cache
def by_hand(objective: str = "refusion") -> dict[str, float]:
    config = config_with(**SIZES, objective=objective)
    return terms(config, Transformer(tiny_config(), nnx.Rngs(0)), some_rows(21))


@functools.cache
def of_the_rows(objective: str, devices: int) -> dict[str, float]:
    """The same rows in parts of a row per device and more, the last of which is not full."""
    return evaluate([some_rows(21)], devices, objective=objective, batch_size=max(8, 2 * devices))


@pytest.mark.parametrize("objective", ["refusion", "ar"])
@pytest.mark.thorough
def test_the_loss_of_a_set_is_that_of_one_batch_of_all_its_rows_on_any_devices(objective):
    expected = by_hand(objective)
    one, eight = of_the_rows(objective, 1), of_the_rows(objective, 8)
    for got in (one, eight):
        for name, value in expected.items():
            assert got[f"eval_loss_{name}"] == pytest.approx(value, abs=1e-6, rel=1e-6)
        assert got["eval_loss"] == pytest.approx(sum(expected.values()), abs=1e-6, rel=1e-6)
    assert one.keys() == eight.keys()
    for name, value in one.items():
        assert eight[name] == pytest.approx(value, abs=1e-6, rel=1e-6)


def test_the_loss_of_a_model_that_reads_hidden_states_of_another_is_that_with_the_other(tmp_path):
    model, other, rows = tiny_model(num_hidden_layers=1), tiny_model(1), some_rows(8)
    huggingface.save(other, tmp_path)
    config = config_with(**SIZES, objective="dflash", **{"dflash.reads": str(tmp_path)})
    found = evaluate_model(config, model, [rows])["eval_loss"]
    model.target_model = other
    assert found == pytest.approx(terms(config, model, rows)["mdm"], rel=1e-6)


def test_documents_are_told_apart_by_slot_size_and_mask_ratio():
    got = of_the_rows("refusion", 1)
    groups = {name.removeprefix("eval_loss_mdm_") for name in got if name.startswith("eval_loss_mdm_")}
    assert groups == {"slot_size_2", "slot_size_4", *(f"mask_ratio_{25 * i}" for i in range(1, 5))}
    low, high = (min(got[f"eval_loss_mdm_{g}"] for g in groups), max(got[f"eval_loss_mdm_{g}"] for g in groups))
    assert 2.5 < low < high < 5  # around log 30, each a mean
    assert "eval_loss_ar_slot_size_4" in got


def test_counts_that_no_labelled_token_has_take_no_room_among_those_that_are_told(monkeypatch):
    objective = find_system("ar").objective
    corrupt = objective.corrupt

    def counted(self, rows, keys):
        batch = corrupt(self, rows, keys)
        return batch.replace(diagnostics={"place": jax.numpy.where(is_labelled(batch), 99, row_index(batch.inputs))})

    monkeypatch.setattr(objective, "corrupt", counted)
    assert {name for name in evaluate([some_rows(8)], objective="ar") if "place" in name} == {"eval_loss_ar_place_99"}


def test_noise_is_that_of_the_row_alone():
    """And rows are taken evenly from a set: the first ones hold its longest documents."""
    some, others = some_rows(8), some_rows(8, seed=1)
    both = PackedRows(*(np.stack([getattr(r, n) for r in (some, others)], 1).reshape(16, 32) for n in vars(some)))
    assert evaluate([some]) == evaluate([both], seed=3, **{"eval.rows": 8})
    config = config_with(**SIZES, **{"eval.rows": 2})
    one_of_each = place(config, pick(config, [some, others]), make_mesh({}, jax.devices()[:1])).tokens[:2]
    np.testing.assert_array_equal(one_of_each, [some.tokens[0], others.tokens[0]])


@pytest.mark.thorough
def test_a_run_evaluates_and_trains_as_if_it_did_not(tmp_path):
    lines = [{"query": f"Add {i} and 3.", "response": f"{i + 3} it is, and more of it."} for i in range(30)]
    (tmp_path / "held_out.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = [*TINY_RUN, "--config.steps=12", "--config.checkpoint.every=6", "--config.schedule=constant"]
    evaluating = [f"--config.eval.path={tmp_path}/held_out.jsonl", "--config.eval.every=4"]
    run("train", *flags, f"--workdir={tmp_path}/plain")
    out, _ = run("train", *flags, *evaluating, f"--workdir={tmp_path}/parts", "--config.steps=6")
    assert "held-out loss" in out
    run("train", *flags, *evaluating, f"--workdir={tmp_path}/parts", devices=4)
    plain, parts = (read_metrics(tmp_path / name) for name in ("plain", "parts"))
    assert [record["loss"] for record in plain][:6] == [record["loss"] for record in parts][:6]
    assert [record["loss"] for record in plain] == pytest.approx([record["loss"] for record in parts], abs=1e-4)
    evaluated = [record for record in parts if "eval_loss" in record]
    assert [record["step"] for record in evaluated] == [4, 6, 8, 12]
    assert evaluated[-1]["eval_loss"] < evaluated[0]["eval_loss"]
    assert {"eval_loss_ar", "eval_loss_mdm", "eval_loss_mdm_mask_ratio_100"} <= set(evaluated[0])

    config, model = read_config(tmp_path / "parts"), load_model(tmp_path / "parts")
    tokenizer = load_tokenizer(tmp_path / "parts")
    sets = find_held_out(config, tokenizer)
    bits = held_out_bits(model, tokenizer, sets[0], method="refusion")["eval_bits_per_byte"]
    assert evaluated[-1]["eval_bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert evaluated[-1]["eval_bits_per_byte"] < evaluated[0]["eval_bits_per_byte"]
    for name, value in evaluate_model(config, model, sets).items():
        assert evaluated[-1][name] == pytest.approx(value, abs=1e-6, rel=1e-6)


@pytest.mark.thorough
def test_a_run_with_products_in_fp8_measures_the_model_that_it_saves(tmp_path):
    (tmp_path / "held_out.jsonl").write_text('{"query": "Add 5 and 3.", "response": "8 it is, and more of it."}\n')
    flags = [*TINY_RUN, "--config.steps=5", "--config.quantization=fp8", "--config.eval.every=5"]
    run("train", *flags, f"--config.eval.path={tmp_path}/held_out.jsonl", f"--workdir={tmp_path}/run")
    config, model = read_config(tmp_path / "run"), load_model(tmp_path / "run")
    found = evaluate_model(config, model, find_held_out(config, load_tokenizer(tmp_path / "run")))
    assert read_metrics(tmp_path / "run")[-1]["eval_loss"] == pytest.approx(found["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("objective", ["refusion", "ar", "llada", "dream", "r2ft"])
@pytest.mark.thorough
def test_bits_per_byte_in_training_are_those_of_the_likelihood_on_any_devices(objective, monkeypatch):
    """And where the likelihood is not known there are none."""
    rows, model = some_rows(21), tiny_model()
    monkeypatch.setattr(heldout, "find_held_out", lambda config, tokenizer: [rows])
    graphdef, params = nnx.split(model)
    for devices in {"refusion": (1, 4), "dream": (1,)}.get(objective, (4,)):
        config = config_with(**SIZES, objective=objective)
        mesh = make_mesh({"fsdp": devices}, jax.devices()[:devices])
        with jax.set_mesh(mesh):
            placed = jax.device_put(nnx.to_pure_dict(params), sharding.sharding(mesh))
            evaluate = make_held_out(config, Letters(), graphdef, make_objective(config, MASK), mesh)
            found = evaluate(placed)
        if objective == "dream":
            assert "eval_bits_per_byte" not in found
            continue
        expected = held_out_bits(model, Letters(), rows, method=default_decoder(objective), draws=1)
        assert found["eval_bits_per_byte"] == pytest.approx(expected["eval_bits_per_byte"], rel=1e-6)
        is_bound = expected["eval_bits_per_byte_is_bound"]
        assert ("eval_bits_per_byte_is_bound" in found) == (objective in ("llada", "r2ft")) == is_bound
        # The preference of r2ft is no mean over tokens, of which groups could be told apart.
        assert any("mask_ratio" in name for name in found) == (objective in ("refusion", "llada"))


@pytest.mark.parametrize(("data", "changes"), [(3, {"batch_size": 32}), (1, {"batch_size": 4096, "accumulation": 64})])
@pytest.mark.thorough
def test_a_trained_model_is_evaluated_in_batches_for_the_devices_here(data, changes):
    """Those of its run are for other devices: 32 rows cannot be split over three."""
    mesh = make_mesh({"data": data}, jax.devices()[:data])
    graphdef, params = nnx.split(tiny_model())
    model = nnx.merge(graphdef, jax.device_put(params, sharding.sharding(mesh)))
    config = config_with(**SIZES | changes)
    found = evaluate_model(config, model, [some_rows(21)])
    assert config.batch_size == changes["batch_size"]
    for name, value in by_hand().items():
        assert found[f"eval_loss_{name}"] == pytest.approx(value, abs=1e-6, rel=1e-6)


@pytest.mark.parametrize(
    ("how", "used"),
    [
        ({"method": "refusion"}, {"slot_size": 8, "order": "left_to_right"}),
        ({"method": "refusion", "slot_size": 4, "draws": 9}, {"slot_size": 4, "order": "left_to_right"}),
        ({"method": "refusion", "order": "random"}, {"slot_size": 8, "order": "random", "draws": 1, "seed": 0}),
        ({"method": "ar", "order": "random", "draws": 3, "slot_size": 4, "seed": 5}, {}),
        ({"method": "llada", "order": "random", "seed": 5}, {"draws": 64, "seed": 5}),
        ({"method": "llada", "draws": 2, "slot_size": 4}, {"draws": 2, "seed": 0}),
    ],
)
def test_settings_are_reported_that_made_a_difference(how, used):
    found = held_out_bits(tiny_model(), Letters(), some_rows(1), **how)
    named = {name: found[name] for name in ("slot_size", "order", "draws", "seed") if name in found}
    assert named == used
    assert found["method"] == how["method"]


def test_a_text_that_is_cut_between_the_bytes_of_a_character_has_no_more_bytes_than_before():
    tokenizer, text = SentencePieceTokenizer.train(["It is a number."] * 9, 280), "日本語 é " * 16
    tokens = np.array(tokenizer.encode([text]), np.int32).reshape(-1, 16)  # one for each byte
    rows = PackedRows(tokens, np.ones_like(tokens), np.ones_like(tokens, bool))
    model = tiny_model(vocab_size=288, num_tokens=280)
    found = held_out_bits(model, tokenizer, rows, method="refusion")
    assert found["bytes"] == len(text.encode())
    assert found["segments"] == len(rows) > 1  # of one document
    assert "documents" not in found


@pytest.mark.parametrize("method", ["refusion", "ar"])
def test_a_text_has_its_own_bytes_where_a_tokenizer_begins_every_text_with_a_space(method, tmp_path):
    """Of its own, which `decode` strips, as it does with those at the beginning of a row in the middle of a text."""
    tokenizer, texts = load_tokenizer_file(write_sentencepiece(tmp_path), "<mask>"), ["a b  a b", "b a b"]
    examples = [Example(None, texts[0], "one"), Example("a", texts[1], "two")]
    whole, answer = tokenize(examples, tokenizer, 64)
    assert tokenizer.name_of(whole.tokens[2]) == "\u2581b"
    rows = np.zeros((3, 16), np.int32)
    for row, part in zip(rows, (whole.tokens[:2], whole.tokens[2:], answer.tokens), strict=True):
        row[: len(part)] = part
    starts = np.array([[1], [0], [answer.prompt_length]])
    is_response = (rows > 0) & (np.arange(16)[None] >= starts)
    packed = PackedRows(rows, (rows > 0).astype(np.int32), is_response)
    found = held_out_bits(tiny_model(vocab_size=288, num_tokens=280), tokenizer, packed, method=method)
    first = 2 if method == "ar" else 0  # " b", which only follows another row, is not predicted
    assert found["bytes"] == len("".join(texts)) - first


def test_data_that_cannot_be_evaluated_is_named(tmp_path):
    with pytest.raises(UserError, match="--config.eval.path: /none.jsonl does not exist"):
        find_held_out(config_with(**{"eval.path": "/none.jsonl"}), tokenizer=None)
    assert find_held_out(config_with(**{"data.path": "tasks"}), tokenizer=None) == []


@pytest.fixture
def prepared(trained_run, tmp_path):
    """Rows of the tokenizer of all runs on the same problems."""
    lines = [{"query": f"Add {i} and 3.", "response": f"{i + 3} it is, and more of it."} for i in range(90)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = [f"--input={tmp_path}/data.jsonl", f"--tokenizer={trained_run}/tokenizer.model", "--row_length=32"]
    run("prepare", *flags, f"--output={tmp_path}/prepared")
    return tmp_path / "prepared"


def held_out(checkpoint, prepared, output, *flags, devices=1) -> dict:
    run("evaluate", f"--checkpoint={checkpoint}", f"--data={prepared}", f"--output={output}", *flags, devices=devices)
    return json.loads((output / "results.json").read_text())["held_out"]


@pytest.mark.thorough
def test_the_loss_is_measured_where_the_likelihood_is_not_known_on_any_number_of_devices(prepared, tmp_path):
    unknown = tmp_path / "run"
    run("train", *TINY_RUN, "--config.objective=dream", "--config.steps=6", f"--workdir={unknown}")
    one = held_out(unknown, prepared, tmp_path / "one")
    assert one["eval_loss"] > 0
    assert "eval_bits_per_byte" not in one
    three = held_out(unknown, prepared, tmp_path / "three", "--mesh.data=3", devices=3)
    assert three["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)


@pytest.mark.slow
def test_two_hosts_score_as_one(trained_run, prepared, tmp_path):
    """The texts in random orders of slots, each drawn by the text's own number."""
    flags = ["--decode.slot_size=4", "--order=random", "--draws=2"]
    one = held_out(trained_run, prepared, tmp_path / "one", *flags)
    where = [f"--checkpoint={trained_run}", f"--data={prepared}", f"--output={tmp_path}/two"]
    evaluate_on_two(*where, *flags)
    two = json.loads((tmp_path / "two" / "results.json").read_text())["held_out"]
    assert two == {name: pytest.approx(x, rel=1e-6) if isinstance(x, float) else x for name, x in one.items()}


def test_settings_that_scoring_has_no_use_for_are_refused(trained_run, prepared, tmp_path):
    flags = [f"--checkpoint={trained_run}", f"--data={prepared}", f"--output={tmp_path}/out"]
    for setting in ("--decode.temperature=0.5", "--decode.max_new_tokens=9", "--num_fewshot=3", "--chat"):
        said = f"{setting.split('=')[0]}: cannot be used with --data, whose text is scored, not decoded"
        assert refused("evaluate", *flags, setting) == f"error: {said}\n"
    assert not (tmp_path / "out").exists()
    found = held_out(trained_run, prepared, tmp_path / "out", "--decode.slot_size=4", "--limit=3", "--decode.seed=1")
    assert found["slot_size"] == 4
    assert found["eval_bits_per_byte_is_bound"] is False
    settings = json.loads((tmp_path / "out" / "results.json").read_text())["settings"]
    assert settings["command"] == [*flags, "--decode.slot_size=4", "--limit=3", "--decode.seed=1"]


def test_scores_are_printed_even_if_they_cannot_be_written(trained_run, prepared, tmp_path):
    (tmp_path / "out" / "results.json").mkdir(parents=True)
    flags = [f"--checkpoint={trained_run}", f"--data={prepared}", "--limit=1"]
    out, err = run("evaluate", *flags, f"--output={tmp_path}/out", code=2)
    assert re.search(r"eval_bits_per_byte  \d", out)
    assert "results.json" in err


def test_texts_longer_than_the_model_reads_are_refused_before_anything_else_is_looked_at(trained_run, tmp_path):
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "It is so. " * 200}))
    tokenizer, data = f"--tokenizer={trained_run}/tokenizer.model", f"{tmp_path}/rows"
    run("prepare", f"--input={tmp_path}/data.jsonl", tokenizer, "--row_length=128", f"--output={data}")
    flags = [f"--checkpoint={trained_run}", f"--data={data}", f"--output={tmp_path}/out", "--mesh.data=99"]
    said = (
        f"--data={data}: row 0 holds a text of 128 tokens, and {trained_run}/checkpoints/60 reads 64: prepare it with"
    )
    assert f"error: {said} --row_length=64\n" == refused("evaluate", *flags)


@pytest.mark.parametrize("kind", ["loglikelihood_rolling", "multiple_choice"])
def test_a_task_that_needs_an_unknown_likelihood_is_refused_before_anything_is_decoded(trained_run, tasks, kind):
    text = GENERATE.split("generation_kwargs")[0].replace("generate_until", kind)
    if kind == "multiple_choice":
        text = text[: text.index("doc_to_target")] + 'doc_to_choice: ["1", "2"]\ndoc_to_target: 1\n'
    plan = benchmark.Plan(["sums"], include_path=tasks(text))
    lm = EvaluatedModel(load_model(trained_run), load_tokenizer(trained_run), name="tiny", method="dream", flags={})
    with pytest.raises(UserError, match="--tasks=sums: needs the likelihood of texts, which is not known for dream"):
        benchmark.check_requests(lm, plan, benchmark.load_tasks(plan))


def test_prompts_that_lose_their_beginning_are_told(trained_run, tasks, caplog):
    """Before anything is decoded, or with the scores of given answers, of which each problem here has three."""
    model, tokenizer = load_model(trained_run), load_tokenizer(trained_run)
    longer = ("{{{{question}}}}", "{{{{question if question[5] == '3' else question * 40}}}}")
    for name, text, told in (
        ("sums", GENERATE, ""),
        ("sums", GENERATE.replace(*longer), "29 of 40 prompts lose their beginning"),
        ("choices", CHOICES, ""),
        ("choices", CHOICES.replace(*longer), "87 of 120 prompts lose their beginning"),
    ):
        plan = benchmark.Plan([name], include_path=tasks(text))
        lm = EvaluatedModel(model, tokenizer, name="tiny", method="refusion", flags={})
        caplog.clear()
        loaded = benchmark.load_tasks(plan)
        benchmark.check_requests(lm, plan, loaded)
        if name == "choices":
            benchmark.run_tasks(lm, plan, loaded)
        assert (told in caplog.text, bool(caplog.text)) == (True, bool(told))

"""Lossless decoders: drafts change no text, greedy or drawn; drafters, and the mask and labels of `dense`."""

import collections
import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    BOS,
    MASK,
    PROMPTS,
    config_with,
    equipped,
    logits_of,
    run,
    settings,
    sharp_models,
    tiny_config,
    tiny_model,
)
from etils import epath
from flax import nnx
from helpers import config_of_mine, drawn_matrix, packed, tiny_qwen3

from refusion_jax import UserError, decode, load_model
from refusion_jax.batch.rows import Rows
from refusion_jax.checkpoints.contents import choose_method, find_tokenizer
from refusion_jax.checkpoints.load import load_for
from refusion_jax.checkpoints.run_directory import write_model_config
from refusion_jax.checkpoints.weights import save_params
from refusion_jax.config.model import check_fits
from refusion_jax.decoding.auxiliary import with_auxiliaries
from refusion_jax.decoding.cache import bytes_per_token, visible_to_masks
from refusion_jax.decoding.memory import bytes_needed
from refusion_jax.decoding.requests import prepare
from refusion_jax.distributed.sharding import make_mesh
from refusion_jax.model.shape import READ_ALIKE
from refusion_jax.systems import dflash, prompt_lookup
from refusion_jax.systems.api import decoder_for
from refusion_jax.systems.dense import drafting, objective
from refusion_jax.systems.dense.objective import DenseSlots, Noise, dense_batch, draw_noise
from refusion_jax.systems.registry import decoders_for
from refusion_jax.training.program import train_program


@pytest.mark.thorough
def test_a_forward_feeds_as_much_as_pays_and_writes_what_one_token_after_the_other_is():
    """Greedy or drawn. Of other numbers, and other decoders, tests/test_systems.py says so."""
    saved = 0
    for model, temperature in itertools.product(sharp_models()[:3], (0.0, 1.0)):
        how = {"fed_tokens": 0, "temperature": temperature}
        out, ar = (decode(model, PROMPTS, settings(m, **how)) for m in ("dense", "ar"))
        assert (out.tokens, out.commit_order) == (ar.tokens, ar.commit_order)
        assert all(a <= b for a, b in zip(out.forwards, ar.forwards, strict=True))
        saved += sum(ar.forwards) - sum(out.forwards)
    assert saved > 0


@pytest.mark.parametrize(
    ("method", "changes", "prompt"),
    [
        ("prompt_lookup", {"draft_length": 3}, [BOS, 9, 22, 9]),
        pytest.param("pard", {"draft_length": 3}, [BOS, 9, 13], marks=pytest.mark.thorough),
        pytest.param("dflash", {"draft_length": 3}, [BOS, 9, 13], marks=pytest.mark.slow),
        pytest.param("idlm", {"stride": 3}, [BOS, 9, 13], marks=pytest.mark.thorough),
        pytest.param("dense", {"fed_tokens": 8}, [BOS, 9, 13], marks=pytest.mark.slow),
        pytest.param("dense", {"fed_tokens": 24}, [BOS, 9, 13], marks=pytest.mark.thorough),
    ],
)
def test_drawn_texts_are_distributed_as_next_token_predictions(method, changes, prompt):
    """Three tokens at temperature 1, within top_k: the joint distribution of 512 draws, by a chi-square test.

    What drafts and next tokens have in common is about half of their probability: some are accepted, some refused.
    """
    model, k = tiny_model(3), 2

    def p(text):
        logits = np.array(logits_of(model, [text])[0, -1])
        logits[[MASK, 0, 30, 31]] = -np.inf
        logits[np.argsort(logits)[:-k]] = -np.inf
        return {token: share for token, share in enumerate(np.array(jax.nn.softmax(logits))) if share > 0}

    expected = {
        (a, b, c): pa * pb * pc
        for a, pa in p(prompt).items()
        for b, pb in p([*prompt, a]).items()
        for c, pc in p([*prompt, a, b]).items()
    }
    runs, unseen = 512, min(set(range(5, 30)).difference(*expected))
    s = settings(method, new=4, temperature=1.0, top_k=k, batch_size=runs, eos_id=unseen, **changes)
    seen = collections.Counter(tuple(t[:3]) for t in decode(equipped(model, method), [prompt] * runs, s).tokens)
    assert seen.keys() <= expected.keys()
    statistic = sum((seen[text] - runs * share) ** 2 / (runs * share) for text, share in expected.items())
    assert len(expected) == 8
    assert statistic < 24.4  # the 99.9 % quantile with 7 degrees of freedom


@pytest.mark.parametrize(
    ("method", "changes", "forwards"),
    [
        ("idlm", {"stride": 4}, 1 + 4),  # one token, then four per forward
        ("idlm", {"stride": 1}, 17),
        pytest.param("dense", {"fed_tokens": 24}, 2, marks=pytest.mark.thorough),
    ],
)
def test_a_model_that_ignores_its_place_accepts_every_draft(method, changes, forwards):
    """Attention and mlp silenced, every token followed by one token: each forward yields as many as it may."""
    model = tiny_model()
    model.layers.o_proj[...] *= 0
    model.layers.down_proj[...] *= 0
    embedding, head = jnp.ones_like(model.embed_tokens[...]), jnp.zeros_like(model.lm_head[...])
    model.embed_tokens[...], model.lm_head[...] = embedding, head.at[9].set(1.0)
    out = decode(model, PROMPTS, settings(method, new=17, **changes))
    assert out.tokens == [[9] * 17] * len(PROMPTS)
    assert out.forwards == [forwards] * len(PROMPTS)


@pytest.mark.thorough
def test_a_drafter_learns_what_the_model_writes_and_the_model_stays_as_it_is(tmp_path):
    model, shape = sharp_models()[0], tiny_config()
    weights = nnx.to_pure_dict(nnx.state(model))
    save_params(tmp_path, weights)
    write_model_config(tmp_path, model.config)
    ar = decode(model, PROMPTS, settings("ar"))
    rows = Rows(*np.zeros((2, len(PROMPTS), 24), np.int32), np.zeros((len(PROMPTS), 24), bool))
    for row, (prompt, answer) in enumerate(zip(PROMPTS, ar.tokens, strict=True)):
        size = len(prompt) + len(answer)
        rows.tokens[row, :size], rows.segment_ids[row, :size] = prompt + answer, 1
        rows.is_response[row, len(prompt) : size] = True

    own = {"dflash.reads": str(tmp_path), "dflash.draft_length": 4, "batch_size": len(PROMPTS), "row_length": 24}
    config = config_with(objective="dflash", schedule="constant", learning_rate=0.01, **own)
    with jax.set_mesh(mesh := make_mesh({}, jax.devices()[:1])):
        program = train_program(config, shape, mesh)
        state = program.initial_state(program.given_weights(None))
        for _ in range(200):
            state, metrics = program.step(state, rows)
    assert metrics["loss"] < 0.1
    jax.tree.map(np.testing.assert_array_equal, state.frozen["target_model"], weights)
    drafter = nnx.merge(nnx.split(tiny_model())[0], state.params)  # which are all that a checkpoint holds
    out = decode(with_auxiliaries(model, drafter=drafter), PROMPTS, settings("dflash", draft_length=4))
    assert out.tokens == ar.tokens
    assert sum(out.forwards) < 0.4 * sum(ar.forwards)


@pytest.mark.thorough
def test_drafts_are_what_followed_the_longest_match_and_of_equal_ones_the_latest():
    names, (example,) = "pabcx", re.findall(r"^    text +((?:\w )+)", prompt_lookup.__doc__, re.MULTILINE)
    (drafts,) = re.findall(r"^    drafts +((?:\w ?)+)$", prompt_lookup.__doc__, re.MULTILINE)
    cases = [
        (example, 3, drafts),
        ("p a b x a b c b", 3, "c b c"),  # `b` stood last before `c b`, which then repeats
        ("p a b c a b x a b", 1, "x a b"),
        ("a b c b a", 2, "b c b"),
        ("p a b c", 3, ""),
        ("p", 3, ""),
    ]
    for text, ngram, expected in cases:
        ids = [names.index(name) for name in text.split()]
        padded = jnp.array([ids + [ids[-1]] * 4])  # what comes after the text is never seen
        found, drafted = prompt_lookup.look_up(padded, jnp.array([len(ids)]), 3, ngram)
        assert [names[t] for t in found[0, : int(drafted[0])]] == expected.split(), text


@pytest.mark.thorough
def test_a_drafter_may_have_been_adapted_and_must_have_the_same_text_for_each_token(tmp_path):
    """Its tokenizer then has the mask token that the model's has not, and its ids are the tokenizer's."""
    plain, adapted = tmp_path / "plain", tmp_path / "adapted"
    for path, ids in (
        (plain, {"bos_token_id": 272, "eos_token_id": 274}),
        (adapted, {"pad_token_id": 272, "eos_token_id": 274}),
    ):
        tiny_qwen3(path)
        config = json.loads((path / "config.json").read_text())
        config = {key: value for key, value in config.items() if not key.endswith("_token_id")}
        (path / "config.json").write_text(json.dumps(config | ids))
    tokenizer = find_tokenizer(epath.Path(adapted))
    (adapted / "tokenizer.json").write_bytes(tokenizer.files["tokenizer.json"])
    assert (adapted / "tokenizer.json").read_bytes() != (plain / "tokenizer.json").read_bytes()
    s = settings("pard", drafter=str(adapted), draft_length=3)
    prompts = tokenizer.encode(["What is the number?", "It"])
    assert decode(load_for(plain, s), prompts, s).tokens == decode(load_model(plain), prompts, settings("ar")).tokens
    swapped = json.loads((adapted / "tokenizer.json").read_text())
    vocab = swapped["model"]["vocab"]
    vocab["!"], vocab["?"] = vocab["?"], vocab["!"]
    (adapted / "tokenizer.json").write_text(json.dumps(swapped))
    with pytest.raises(UserError, match="has another tokenizer than .*: token [0-9]+ is other text"):
        load_for(plain, s)


def test_the_row_of_the_docstring_of_dflash_is_fed_seen_and_labelled_as_drawn():
    rows = Rows(jnp.array([[7, 8, 9, 10]]), jnp.ones((1, 4), jnp.int32), jnp.array([[0, 1, 1, 1]]) > 0)
    batch = jax.jit(dflash.DraftBlocks(MASK, draft_length=2).corrupt)(rows, jax.random.split(jax.random.key(0), 1))
    np.testing.assert_array_equal(batch.visibility.mask()[0], drawn_matrix(dflash.__doc__, 8))
    assert batch.inputs[0].tolist() == [7, MASK, 9, MASK, 7, 8, 9, 10]
    assert batch.labels[0, :3].tolist() == [8, 9, 10]
    np.testing.assert_allclose(batch.weights["mdm"][0], [1 / 3] * 3 + [0] * 5)


def test_the_memory_of_a_drafters_cache_and_of_a_short_list_of_the_head_counts():
    model, mesh = tiny_model().with_head_rows(8), make_mesh({}, jax.devices()[:1])
    decoder = decoder_for(prepare([[BOS]], settings("pard"), model.config), model.config)
    both = model, with_auxiliaries(model, drafter=tiny_model(num_hidden_layers=1))
    alone, drafted = (bytes_needed(m, mesh, 4, decoder) for m in both)
    tokens = 5 * decoder.cache_length  # of four rows and one that is being prefilled
    assert drafted == alone + tokens * bytes_per_token(both[1].drafter.config, "float32")
    assert alone > bytes_needed(tiny_model(), mesh, 4, decoder)


def test_what_dflash_cannot_read_is_refused(tmp_path):
    with pytest.raises(UserError, match="dflash.reads=: name the run or model that is read"):
        train_program(config_with(objective="dflash"), tiny_config(), make_mesh({}, jax.devices()[:1]))
    with pytest.raises(UserError, match="--decode.drafter reads another model, whose hidden_size is 32, not 16"):
        decode(with_auxiliaries(tiny_model(), drafter=tiny_model(hidden_size=32)), PROMPTS, settings("dflash"))
    save_params(tmp_path, nnx.to_pure_dict(nnx.state(tiny_model())))
    write_model_config(tmp_path, tiny_config())
    with pytest.raises(UserError, match="--config.model.head_dim=4: .* has 8"):
        check_fits(tmp_path, tiny_config(head_dim=4), None, "config.dflash.reads", READ_ALIKE)
    write_model_config(tmp_path, tiny_config(vocab_size=31))
    own = config_with(objective="dflash", **{"dflash.reads": str(tmp_path), "mesh.tensor": 2, "mesh.fsdp": 1})
    with pytest.raises(UserError, match="^tensor=2: does not divide the model's 31 vocab"):
        train_program(own, tiny_config(), make_mesh({"tensor": 2}, jax.devices()[:2]))
    (tmp_path / "config.json").write_text('{"objective": "dflash"}')
    with pytest.raises(UserError, match="objective=dflash: its models do not decode by themselves"):
        choose_method(tmp_path, None)
    assert "dflash" in decoders_for("ar")
    (tmp_path / "config.json").write_text('{"objective": "llada"}')
    config = config_with(objective="dflash", **{"dflash.reads": str(tmp_path)})
    with pytest.raises(UserError, match="^--config.dflash.reads: method=dflash: "):  # as `plan` is
        train_program(config, tiny_config(), make_mesh({}, jax.devices()[:1]))
    flags = ["--config.objective=dflash", f"--config.dflash.reads={tmp_path}", f"--workdir={tmp_path / 'drafter'}"]
    _, err = run("train", "--config=configs/quickstart.py", *flags, code=2)
    assert re.search("^error: --config.dflash.reads: method=dflash: .* was trained with objective=llada, which", err)


def test_a_system_that_reads_another_model_and_has_no_decoder_trains(tmp_path):
    """Its `decodes` then asks for nothing; what is refused is the shape of the model that is read."""
    save_params(tmp_path, nnx.to_pure_dict(nnx.state(tiny_model())))
    write_model_config(tmp_path, tiny_config())
    (tmp_path / "config.json").write_text('{"objective": "llada"}')
    (tmp_path / "mine.py").write_text(config_of_mine("dflash"))
    flags = [f"--config={tmp_path / 'mine.py'}", "--config.objective=mine", f"--config.mine.reads={tmp_path}"]
    _, err = run("train", *flags, "--config.data.examples=500", f"--workdir={tmp_path / 'drafter'}", code=2)
    assert re.search("^error: --config.model.", err)


DOCS = [(2, 9), (0, 5), (3, 4)]
ROWS = jax.tree.map(lambda x: jnp.repeat(x, 300, axis=0), packed(DOCS, 26))


@functools.cache
def batch_of(text_order: float, copies: float = 0.5, sizes=(2, 3, 4)):
    keys = jax.random.split(jax.random.key(0), len(ROWS.tokens))
    made = DenseSlots(MASK, sizes, text_order, copies, 1.0)
    drawn = jax.jit(draw_noise, static_argnums=(2, 3))(keys, ROWS, sizes, text_order)
    return jax.device_get((drawn, jax.jit(made.corrupt)(ROWS, keys)))


def test_the_matrix_of_the_docstring_is_the_mask_and_its_labels_those_of_the_example():
    rows = packed([(1, 4)], 5)  # p a b c d
    start = jnp.array([[0, 1, 1, 3, 3]])
    noise = Noise(jnp.full((1, 5), 2), start, jnp.array([[0, 9, 9, 2, 2]], jnp.uint32), start.astype(jnp.uint32))
    batch = dense_batch(rows, noise, copies=4, stride=3, mask_id=MASK)
    assert batch.visibility.mask()[0].tolist() == drawn_matrix(objective.__doc__, 9)

    names = dict(zip("pabcd", range(100, 105), strict=True))
    header = re.search(r"^ +((?:\w ){8}\w)$", objective.__doc__, re.MULTILINE)[1].split()
    inputs = [names.get(name, MASK) for name in header]
    assert batch.inputs[0].tolist() == inputs
    labels = re.search(r"labels +(.*)", objective.__doc__)[1].split()
    weights = sum(batch.weights.values())[0]
    assert [names[n] if n != "." else 0 for n in labels] == np.where(weights > 0, batch.labels[0], 0).tolist()
    assert batch.weights["ar"][0].tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3, 0] + [0] * 4)
    assert batch.weights["mdm"][0].tolist() == pytest.approx([0] * 5 + [1 / 4] * 4)


@pytest.mark.parametrize("text_order", [0.0, 0.5, 1.0])
def test_slots_are_whole_and_in_an_order_and_in_text_order_begin_anywhere(text_order):
    noise, batch = batch_of(text_order)
    firsts, at = set(), 0
    for prompt, answer in DOCS:
        span = slice(at, at + prompt + answer)
        positions, start = batch.positions[:, span], noise.start[:, at + prompt : at + prompt + answer] - at - prompt
        assert (positions[:, :prompt] == np.arange(prompt)).all()
        assert (np.sort(positions, axis=1) == np.arange(prompt + answer)).all()
        in_order = (positions == np.arange(prompt + answer)).all(axis=1)
        assert in_order.all() if text_order == 1 else not in_order.all()
        for row in range(len(positions)):
            size, begins = noise.slot_size[row, at], sorted(set(start[row].tolist()))
            firsts.add((size, begins[1] if len(begins) > 1 else answer))
            assert set(np.diff(begins[1:])) <= {size}
            assert text_order or set(np.diff(begins)) <= {size}
            of_place = start[row][positions[row, prompt:] - prompt].tolist()  # the slot at each place
            runs = [slot for i, slot in enumerate(of_place) if i == 0 or slot != of_place[i - 1]]
            assert sorted(runs) == begins  # no slot is torn apart
        at += prompt + answer
    if text_order:
        assert {first for size, first in firsts if size == 4} >= {1, 2, 3, 4}


@pytest.mark.parametrize("copies", [0.25, 0.5, 1.0])
def test_every_mask_predicts_its_own_token_and_sees_what_stands_before_its_slot(copies):
    noise, batch = batch_of(0.5, copies)
    T = ROWS.tokens.shape[1]
    mask, M = np.asarray(jax.tree.map(jnp.asarray, batch.visibility).mask()), batch.inputs.shape[1] - T
    labelled = batch.weights["mdm"][:, T:] > 0
    segments, is_response = np.asarray(ROWS.segment_ids[0]), np.asarray(ROWS.is_response[0])
    assert labelled.sum(axis=1).tolist() == [min(M, is_response.sum())] * len(labelled)
    for row in range(50):
        place = {int(token) - 100: c for c, token in enumerate(batch.inputs[row, :T])}  # ids tell the index in the row
        index = batch.labels[row, T:][labelled[row]] - 100
        first = noise.start[row][index]
        assert (batch.inputs[row, T:] == MASK).all()
        for m, (i, b) in enumerate(zip(index, first, strict=True)):
            assert index[mask[row, T + m, T:][labelled[row]]].tolist() == list(range(b, i + 1))
            before = [c for c in range(place[b]) if segments[c] == segments[i]]
            assert mask[row, T + m, :T].nonzero()[0].tolist() == before
        sizes = {b: np.sum(noise.start[row][is_response] == b) for b in first}
        assert sum(np.sum(first == b) < size for b, size in sizes.items()) <= 1  # one slot is cut short, at most


def test_a_clean_token_predicts_the_next_one_unless_it_is_seen():
    noise, batch = batch_of(0.5)
    T = ROWS.tokens.shape[1]
    labelled = batch.weights["ar"][:, :T] > 0
    assert not batch.weights["ar"][:, T:].any()
    segments, response = np.asarray(ROWS.segment_ids[0]), np.asarray(ROWS.is_response[0])
    crossed = 0
    for row in range(len(labelled)):
        places = {int(token) - 100: c for c, token in enumerate(batch.inputs[row, :T])}
        for index in range(T - 1):
            has = segments[index] == segments[index + 1] and response[index + 1]
            has = has and places[index + 1] > places[index]
            assert labelled[row, places[index]] == has
            assert not has or batch.labels[row, places[index]] == 100 + index + 1
            crossed += has and noise.start[row, index] != noise.start[row, index + 1]
    assert crossed > 1000  # slot borders have labels, too


def test_slots_that_do_not_fit_are_left_out_evenly():
    """No place of the row is copied more often than another, but for those that end a torn slot."""
    _, batch = batch_of(1.0, copies=0.35, sizes=(2,))
    labels = batch.labels[:, 26:][batch.weights["mdm"][:, 26:] > 0] - 100
    share = np.bincount(labels, minlength=26)[np.asarray(ROWS.is_response[0])] / 300
    assert share.mean() == pytest.approx(10 / 18)
    assert share.min() > 10 / 18 - 0.15
    assert share.max() < 10 / 18 + 0.15


def test_the_matrix_of_dense_drafting_is_what_its_forward_shows():
    drawn = re.findall(r"^    [xdM]        ([1.] .*?)(?:  +[A-Za-z].*)?$", drafting.__doc__, re.MULTILINE)
    expected = [[cell == "1" for cell in re.sub(r"[^1.]", "", line)] for line in drawn]
    assert visible_to_masks(4, jnp.array([[1, 3]]), 4, 4)[0].tolist() == expected
    two_slots = np.array(visible_to_masks(4, jnp.array([[1, 3]]), 4, 2)[0])
    assert not two_slots[6:8, 4:6].any()
    assert not two_slots[10:, 8:10].any()
    two_slots[6:8, 4:6] = two_slots[10:, 8:10] = True
    assert two_slots.tolist() == expected


def test_how_much_is_fed_is_chosen_by_the_rows_and_the_device():
    model = tiny_model()
    requests = prepare(PROMPTS, settings("dense", fed_tokens=0, size=8), model.config)
    decoder = decoder_for(requests, model.config)
    assert decoder.width == 48
    reach = [decoder.best_pass(model, rows)[0] for rows in (1, 8, 64)]
    assert reach == sorted(reach, reverse=True)
    assert reach[0] > reach[-1] == 1  # the arithmetic of many rows is not free
    # One token and no draft have one prefix, whatever else may be fed.
    out, ar = (decode(model, PROMPTS[:2], settings(m, fed_tokens=3, size=1, new=3)) for m in ("dense", "ar"))
    assert out.tokens == ar.tokens


def test_a_prompt_that_the_last_forward_of_the_prefill_does_not_hold_has_the_same_text():
    prompts = [[BOS, *(5 + at % 20 for at in range(length))] for length in (2, 19, 23, 24, 30)]  # a CPU's holds 24
    out, ar = (decode(tiny_model(), prompts, settings(m, size=8, new=12)) for m in ("dense", "ar"))
    assert out.tokens == ar.tokens

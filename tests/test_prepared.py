import itertools
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from conftest import TINY_RUN, config_with, refused, run, unprivileged
from test_prepare import make, words_tokenizer, write_pairs

from refusion_jax import UserError
from refusion_jax.data.dataset import load_dataset
from refusion_jax.data.loader import RowOrder, epochs, host_batches, row_order
from refusion_jax.data.packing import PackedRows
from refusion_jax.data.prepared import MixedRows, PreparedRows
from refusion_jax.data.tokenizer import SentencePieceTokenizer
from refusion_jax.evaluation.heldout import find_held_out
from refusion_jax.training.events import account, read_events
from refusion_jax.training.inspection import verify
from refusion_jax.training.metrics import read_metrics

ROW = 64


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Two prepared directories of different sizes, a and b."""
    home = tmp_path_factory.mktemp("prepared")
    for name, count in (("a", 400), ("b", 90)):
        write_pairs(home / f"{name}.jsonl", count, seed=count)
        make(home / f"{name}.jsonl", home / name)
    return home


def read(rows, hosts, batch_size, first, last, seed=0):
    """What the hosts together read: the rows of each step, in the order of the global batch."""
    steps = {"batch_size": batch_size, "seed": seed, "first_step": first, "last_step": last}
    each = batch_size // hosts
    parts = [host_batches(rows, range(i * each, (i + 1) * each), **steps) for i in range(hosts)]
    return [row for step in zip(*parts, strict=True) for part in step for row in part["tokens"][:, 0].tolist()]


@hypothesis.settings(max_examples=10)
@hypothesis.given(
    rows=st.integers(30, 70),  # Grain's shuffle of a few takes milliseconds for each
    batch_size=st.sampled_from([4, 8, 12]),
    switches=st.lists(st.tuples(st.integers(1, 6), st.sampled_from([1, 2, 4])), min_size=1, max_size=5),
    seed=st.integers(0, 2**31),
)
@hypothesis.example(rows=1, batch_size=4, switches=[(2, 2), (1, 1)], seed=0)
def test_every_row_comes_once_an_epoch_whatever_the_hosts(rows, batch_size, switches, seed):
    numbers = np.arange(rows)[:, None]
    data, seen, step = PackedRows(numbers, numbers, numbers > 0), [], 0
    for steps, hosts in switches:
        seen += read(data, hosts, batch_size, step, step + steps, seed)
        step += steps
    order = row_order(data, seed)
    assert seen == [order[place] for place in range(step * batch_size)]
    whole, rest = divmod(len(seen), rows)
    for epoch in range(whole):
        assert sorted(seen[epoch * rows : (epoch + 1) * rows]) == list(range(rows))
    assert len(set(seen[whole * rows :])) == rest


def test_every_seed_and_every_epoch_has_an_order_of_its_own():
    orders = [RowOrder([50], [1.0], seed) for seed in (0, 1)]
    epochs = [tuple(order[epoch * 50 + i] for i in range(50)) for order in orders for epoch in range(2)]
    assert len(set(epochs)) == 4
    mixed = [RowOrder([50, 50], [1.0, 1.0], seed) for seed in (0, 1)]
    draws = [[[row for i in range(100) if (row := order[i]) // 50 == source] for source in (0, 1)] for order in mixed]
    assert draws[0] != draws[1]
    assert draws[0][0] != [row - 50 for row in draws[0][1]]  # nor do two sources share one


def test_the_order_is_the_one_that_the_docstring_draws():
    order, drawn = RowOrder([2, 6], [1, 3], seed=0), re.search(r"order\[place\] +([0-9 ]+?)  ", RowOrder.__doc__)[1]
    assert [order[place] for place in range(8)] == [int(row) for row in drawn.split()]


def test_a_host_reads_its_own_rows_only_and_each_whole(prepared, monkeypatch):
    rows, asked, real = PreparedRows(str(prepared / "a")), [], PreparedRows.record
    monkeypatch.setattr(PreparedRows, "record", lambda self, index: asked.append(index) or real(self, index))
    batches = list(host_batches(rows, range(2, 4), batch_size=8, seed=0, first_step=0, last_step=5))
    order = row_order(rows, seed=0)
    own = [order[step * 8 + row] for step in range(5) for row in (2, 3)]
    assert sorted(asked) == sorted(own)
    for name in batches[0]:
        expected = [rows[index][name] for index in own]
        np.testing.assert_array_equal(np.concatenate([batch[name] for batch in batches]), expected)


def test_any_step_of_a_huge_data_set_is_there_at_once():
    """An order that was stored would take gigabytes."""
    order = RowOrder([10**9, 10**6], [3, 1], seed=0)
    assert len({order[10**12 + i] for i in range(1000)}) > 990


@hypothesis.settings(max_examples=15)
@hypothesis.given(
    parts=st.lists(st.tuples(st.integers(50, 300), st.integers(1, 20)), min_size=2, max_size=4),
    places=st.integers(1, 1000),
)
@hypothesis.example(parts=[(1, 1), (2, 3)], places=50)
def test_a_mixture_keeps_its_weights_and_each_source_its_epochs(parts, places):
    sizes, weights = zip(*parts, strict=True)
    order = RowOrder(sizes, weights, seed=1)
    starts = [0, *itertools.accumulate(sizes)]
    seen = [order[place] for place in range(places)]
    for source, size in enumerate(sizes):
        own = [row - starts[source] for row in seen if starts[source] <= row < starts[source + 1]]
        assert abs(len(own) - places * weights[source] / sum(weights)) <= len(sizes)
        assert order.epochs(places)[source] == len(own) / size
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == list(range(size))
        assert len(set(own[len(own) // size * size :])) == len(own) % size


def config(prepared, path, **keys):
    own = {"data.path": path.format(prepared), "row_length": ROW, "data.tokenizer": str(words_tokenizer())}
    return config_with(**own | keys)


def test_a_mixture_of_directories(prepared, tmp_path):
    own = config(prepared, "{0}/a,{0}/b", **{"data.weights": (1, 3)})
    _, rows = load_dataset(own, tmp_path)
    assert isinstance(rows, MixedRows)
    a, b = (PreparedRows(str(prepared / name)) for name in "ab")
    assert len(rows) == len(a) + len(b)
    np.testing.assert_array_equal(rows[len(a) - 1]["tokens"], a[len(a) - 1]["tokens"])
    np.testing.assert_array_equal(rows[len(a)]["tokens"], b[0]["tokens"])
    assert epochs(rows, 400) == {"epoch_a": 100 / len(a), "epoch_b": 300 / len(b)}
    _, other = load_dataset(config(prepared, "{0}/a,{0}/b"), tmp_path)
    assert rows.fingerprint() != other.fingerprint()
    assert epochs(load_dataset(config(prepared, "{0}/a"), tmp_path)[1], 8) == {"epoch": 8 / len(a)}


@pytest.mark.parametrize(
    ("path", "keys", "said"),
    [
        ("{0}/a", {"row_length": 32}, "--config.row_length=32: .*/a holds rows of 64 tokens; give that"),
        ("{0}/a,{0}/a.jsonl", {}, "a.jsonl is not a prepared directory, and only those can be mixed"),
        ("{0}/a,{0}/b", {"data.weights": (1,)}, "must be a number above 0 for each of the 2 directories"),
        ("{0}/a,{0}/b", {"data.weights": (1, 0)}, "must be a number above 0"),
        ("{0}/a,{0}/b", {"data.weights": (1, 99999)}, "the smallest is less than 1/4096 of their sum"),
        ("{0}/a.jsonl", {"data.weights": (1,)}, "only prepared directories are mixed by weight"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(path, keys, said, prepared, tmp_path):
    with pytest.raises(UserError, match=said):
        load_dataset(config(prepared, path, **keys), tmp_path)


def test_another_tokenizer_is_refused(prepared, tmp_path):
    other = SentencePieceTokenizer.train(["eight nine ten"] * 9, 280)
    (tmp_path / "other.model").write_bytes(other.model)
    keys = {"data.tokenizer": f"{tmp_path}/other.model", "eval.path": f"{prepared}/a"}
    own = config(prepared, "{0}/a", **keys)
    with pytest.raises(UserError, match="^--config.data.path: .*/a was made with another tokenizer than the run's"):
        load_dataset(own, tmp_path)
    with pytest.raises(UserError, match="^--config.eval.path: .*/a was made with another tokenizer than the run's"):
        find_held_out(own, other)


def test_damage_is_found(tmp_path):
    write_pairs(tmp_path / "a.jsonl", 300)
    make(tmp_path / "a.jsonl", tmp_path / "out", shard=1 << 20)
    (file,) = (tmp_path / "out").glob("rows-*")
    whole = file.read_bytes()
    assert verify(str(tmp_path / "out")) == len(PreparedRows(str(tmp_path / "out")))
    middle = 1000  # of the first rows
    file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    with pytest.raises(UserError, match="rows-00000.array_record: the checksum is not the manifest's"):
        verify(str(tmp_path / "out"))
    rows = PreparedRows(str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"out: row \d+ cannot be read: "):
        [rows[index] for index in range(len(rows))]
    file.write_bytes(bytes(len(whole)))
    with pytest.raises(UserError, match="rows-00000.array_record is missing or cannot be read: "):
        PreparedRows(str(tmp_path / "out"))
    file.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=r"rows-00000.array_record has \d+ bytes instead of"):
        PreparedRows(str(tmp_path / "out"))
    file.unlink()
    with pytest.raises(UserError, match="rows-00000.array_record is missing or cannot be read: .*No such file"):
        PreparedRows(str(tmp_path / "out"))


def test_a_file_that_may_not_be_read_is_not_missing(prepared):
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        shutil.copytree(prepared / "a", f"{directory}/a")
        next(Path(directory).glob("a/rows-*")).chmod(0)
        with unprivileged(), pytest.raises(UserError, match="array_record .* cannot be read: .*Permission denied"):
            PreparedRows(f"{directory}/a")


def test_files_of_other_rows_than_the_manifest_counts_are_named_before_a_run_begins(prepared, tmp_path):
    shutil.copytree(prepared / "a", tmp_path / "a")
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    manifest["shards"][-1]["rows"] += 1
    manifest["shards"][-2]["rows"] -= 1  # as many in all
    (tmp_path / "a" / "manifest.json").write_text(json.dumps(manifest))
    flags = [*TINY_RUN, f"--config.data.path={tmp_path}/a", f"--config.row_length={ROW}"]
    _, err = run("train", *flags, f"--workdir={tmp_path}/run", code=2)
    said = r"error: \S*/a/rows-\d+.array_record has \d+ rows instead of \d+; prepare the data again\n"
    assert re.fullmatch(said, err)
    assert not (tmp_path / "run").exists()


def test_train_reads_a_mixture_and_logs_its_epochs(prepared, tmp_path):
    flags = [*TINY_RUN, f"--config.data.path={prepared}/a,{prepared}/b", "--config.data.weights=3,1"]
    flags += [f"--config.row_length={ROW}", "--config.batch_size=8"]
    run("train", *flags, f"--workdir={tmp_path}", "--config.steps=20")
    records = read_metrics(tmp_path)
    sizes = [len(PreparedRows(str(prepared / name))) for name in "ab"]
    assert records[-1]["epoch_a"] == 120 / sizes[0]
    assert records[-1]["epoch_b"] == 40 / sizes[1]


@pytest.mark.thorough
def test_a_slow_store_delays_a_run_and_shows_in_its_goodput(prepared, store, tmp_path):
    for file in (prepared / "a").iterdir():
        store.objects[f"a/{file.name}"] = next(store.generations), file.read_bytes()
    here, there = PreparedRows(str(prepared / "a")), PreparedRows("gs://bucket/a")
    assert all(here.record(row) == there.record(row) for row in range(0, len(here), 9))
    store.latency = 0.25  # seconds for each of a step's 8 rows: longer than the 16 steps take that are read at once
    flags = [*TINY_RUN, "--config.data.path=gs://bucket/a", f"--config.row_length={ROW}", "--config.steps=20"]
    run("train", *flags, f"--workdir={tmp_path}")
    assert read_metrics(tmp_path)[-1]["step"] == 20
    assert account(read_events(tmp_path))["data"] > 0.5


def test_a_row_can_be_looked_at(prepared):
    out, _ = run("inspect_data", f"--data={prepared}/a", "--row=1", "--labels")
    assert "row 1 of" in out
    assert "document 1 of" in out
    assert "must predict" in out
    assert "\x1b[" not in out  # no colors where there is no terminal
    out, _ = run("inspect_data", f"--data={prepared}/a", "--verify")
    assert "rows are as they were written" in out
    _, err = run("inspect_data", "--config=configs/quickstart.py", "--verify", code=2)
    assert err == "error: --verify goes with --data; --help explains\n"
    for place in ([f"--data={prepared}/a", "--row=100000"], ["--config=configs/quickstart.py", "--place=10000"]):
        assert f"{place[1]}: " in refused("inspect_data", *place)


def test_several_prepared_directories_are_held_out_together(prepared, tmp_path):
    a, b = prepared / "a", prepared / "b"
    config = config_with(**{"row_length": ROW, "data.path": str(a), "eval.path": f"{a}, {b}"})
    tokenizer, _ = load_dataset(config, tmp_path)
    assert [len(rows) for rows in find_held_out(config, tokenizer)] == [len(PreparedRows(str(x))) for x in (a, b)]
    config.eval.path = f"{a},tasks"
    with pytest.raises(UserError, match="--config.eval.path: tasks is not a prepared directory, and only those can be"):
        find_held_out(config, tokenizer)

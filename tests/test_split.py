"""One model over two machines: where it is cut, what crosses the link, and answers of the whole model."""
# ruff: noqa: F811  fixtures are arguments of the same names

import dataclasses
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import PROMPTS, run, settings, sharp_model, start, tiny_config, tiny_model
from etils import epath
from flax import nnx
from helpers import flags_of, wait_until
from test_experts import LLADA2
from test_split_server import key, link_to, model, served, stamp_of  # noqa: F401  some are fixtures

from refusion_jax import decode
from refusion_jax.checkpoints.contents import read_model_config
from refusion_jax.checkpoints.load import open_weights, reader_of
from refusion_jax.checkpoints.run_directory import write_model_config
from refusion_jax.checkpoints.weights import save_params
from refusion_jax.cli.errors import Failure, UserError
from refusion_jax.decoding.output import File
from refusion_jax.decoding.requests import prepare
from refusion_jax.model import huggingface
from refusion_jax.model.flops import weights_in_layers
from refusion_jax.split import choice, device, frames
from refusion_jax.split.codec import CODECS
from refusion_jax.split.device import decode_split, decoder_on_link
from refusion_jax.split.model import SplitModel
from refusion_jax.split.parts import abstract_part, fingerprint, load_part, part_of
from refusion_jax.split.session import DeviceSession
from refusion_jax.systems.registry import find_decoder


def decoding(model, link, method, prompts=PROMPTS, layers=1, **changes):
    """A function that decodes over a link: tokens."""
    requests = prepare(prompts, settings(method, **changes), model.config)
    part = SplitModel(part_of(model, 0, layers), link)

    def tokens():
        found = dict(decode_split(part, requests, decoder_on_link(requests, model.config)))
        return [found[i].tokens for i in range(len(requests))]

    return tokens


def test_a_row_of_a_batch_that_holds_no_prompt_stops_nothing(served, model, key):
    """The last of four; `ar` computes at the place before the one that it predicts, also where there is none."""
    link = link_to(served, model, key)
    assert decoding(model, link, "ar", PROMPTS[:3])() == decode(model, PROMPTS[:3], settings("ar")).tokens
    link.close()


@pytest.mark.thorough
def test_an_answer_goes_on_where_the_connection_broke(served, model, key, monkeypatch):
    """The connection is cut five times; then the server forgets all; then the other way round it ends in one line.

    So it does where the server can be reached, but gives no answer.
    """
    service, cutter = served
    whole = decode(model, PROMPTS, settings("idlm", batch_size=2)).tokens
    link = link_to(served, model, key)
    tokens = decoding(model, link, "idlm", batch_size=2)
    for cut_at in (None, 3_000, 9_000, 17_000, 26_000):
        link.begin()
        cutter.passed, cutter.cut_at = 0, cut_at
        assert tokens() == whole
        assert cutter.cut_at is None
    link.begin()
    cutter.passed, cutter.cut_at = 0, 9_000
    forget = threading.Thread(target=lambda: (wait_until(lambda: cutter.cut_at is None), service._sessions.clear()))
    forget.start()
    assert tokens() == whole
    forget.join()

    link.begin()
    link._patience, link._address = 1.0, ("127.0.0.1", 1)
    cutter.cut()
    with pytest.raises(Failure, match="cannot be reached"):
        tokens()
    link.close()
    monkeypatch.setattr(DeviceSession, "deal", lambda *_: None)
    with pytest.raises(Failure, match="cannot be reached"):
        decoding(model, link_to(served, model, key, patience=1.0), "idlm", batch_size=2)()


@pytest.mark.parametrize("kind", ["run", "Hugging Face"])
@pytest.mark.thorough
def test_a_part_is_what_the_whole_model_has_and_nothing_else_is_kept(model, tmp_path, kind):
    save(model, epath.Path(tmp_path), kind)
    config, read, sizes = read_model_config(epath.Path(tmp_path)), open_weights(tmp_path), []

    def counting(*asked):
        sizes.append(read(*asked).size)
        return read(*asked)

    kept = 0
    for layers, weights in (((0, 1), "int4"), ((1, 3), "same")):
        part = load_part(counting, config, *layers, "float32", weights)
        wanted = part_of(model.rounded(weights), *layers)
        jax.tree.map(np.testing.assert_array_equal, *(nnx.to_pure_dict(nnx.state(x)) for x in (part, wanted)))
        kept += sum(x.size for x in jax.tree.leaves(nnx.state(part_of(model, *layers))))
    assert sum(sizes) == kept
    assert not hasattr(part, "embed_tokens")
    stamp = fingerprint(read, config, "float32")
    assert stamp == fingerprint(reader_of(model), config, "float32")
    assert stamp != fingerprint(lambda name, at: read(name, at) + (name[-1] == "o_proj"), config, "float32")


def save(model, path, kind="run"):
    if kind == "run":
        save_params(path, nnx.to_pure_dict(nnx.state(model)))
        write_model_config(path, model.config)
    else:
        huggingface.save(model, path)


def call_device(served, key, directory, prompt, *flags):
    """The command `device`, with the model in `directory` and one line of input."""
    (directory / "in.jsonl").write_text(json.dumps(prompt))
    given = [f"--checkpoint={directory}/run", f"--key={key}", f"--server=127.0.0.1:{served[1].port}", "--layers=1"]
    device.main(flags_of(device, *given, f"--input={directory}/in.jsonl", *flags))


def test_answers_to_other_prompts_are_not_taken_from_a_call_that_was_cut_off(served, model, key, tmp_path, monkeypatch):
    save(model, epath.Path(tmp_path / "run"))
    monkeypatch.setattr(File, "finish", lambda _: None)  # as if it were killed before its end

    flags = [f"--output={tmp_path}/out.jsonl", "--decode.max_new_tokens=4"]
    call_device(served, key, tmp_path, {"prompt_ids": [1, 2, 3]}, *flags)
    with pytest.raises(UserError, match="out.jsonl.partial holds answers .*differs in .*prompts"):
        call_device(served, key, tmp_path, {"prompt_ids": [1, 2, 4]}, *flags)


def test_the_given_tokens_of_a_template_are_none_of_those_that_crossed(served, model, key, tmp_path, capsys):
    save(model, epath.Path(tmp_path / "run"))
    asked = {"prompt_ids": [1, 2], "template": [[3] * 5, 4, [3] * 5]}
    call_device(served, key, tmp_path, asked, "--decode.slot_size=4")
    out, err = capsys.readouterr()
    assert (len(json.loads(out)["tokens"]), err.split(",")[0]) == (14, "4 tokens")


@pytest.mark.slow  # four processes
def test_three_devices_on_one_server_get_what_the_whole_model_gives(model, key, tmp_path):
    """As processes, at once; with rows in which prompts of several lengths are filled."""
    save(model, epath.Path(tmp_path / "run"))
    asked = [f"--checkpoint={tmp_path}/run", f"--key={key}"]
    names = "slot_size slot_threshold token_threshold speculate max_new_tokens batch_size".split()
    flags = [f"--decode.{name}={getattr(settings(batch_size=2), name)}" for name in names]
    lines = [json.dumps({"prompt_ids": prompt}) for prompt in PROMPTS]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    server = start("split", "server", *asked, "--port=0")
    port = int(server.stdout.readline().rpartition(":")[2])
    asked += [f"--server=127.0.0.1:{port}", "--layers=1", "--patience=600", f"--input={tmp_path}/in.jsonl", *flags]
    outs = [f"{tmp_path}/{number}.jsonl" for number in range(3)]
    devices = [start("split", "device", *asked, f"--output={out}") for out in outs]
    for process in devices:
        _, err = process.communicate()
        assert process.returncode == 0, err
    server.terminate()
    _, err = server.communicate()
    assert server.returncode == 0, err
    whole = decode(model, PROMPTS, settings(batch_size=2)).tokens
    for path in outs:
        assert [json.loads(line)["tokens"] for line in Path(path).read_text().splitlines()] == whole


@pytest.mark.slow  # 200 prompts for each decoder
@pytest.mark.parametrize("method", ["ar", "refusion", "idlm", "card", "wedlm", "dense", "block_diffusion"])
def test_answers_are_those_of_the_whole_model(served, model, key, method):
    draw = np.random.default_rng(0)
    prompts = [[1, *draw.integers(5, 30, draw.integers(1, 16)).tolist()] for _ in range(200)]
    whole = decode(model, prompts, settings(method, batch_size=8)).tokens
    link = link_to(served, model, key, layers=2)
    assert decoding(model, link, method, prompts, 2, batch_size=8)() == whole
    link.close()


def test_the_choice_of_a_cut_keeps_both_limits_and_gives_up_least():
    draw = np.random.default_rng(0)
    config, decoder = sharp_model().config, find_decoder("refusion")
    config = dataclasses.replace(config, num_hidden_layers=6)
    device, server = choice.Machine(1e-3, 1e-4), choice.Machine(2e-4, 1e-6)
    none = fitted = 0
    for _ in range(40):
        link = float(draw.uniform(0, 0.2)), float(10 ** draw.uniform(3, 7))
        memory, latency = 10 ** draw.uniform(3, 6, 2), 10 ** draw.uniform(-1, 1)
        given_up = []
        for each in sorted(memory):
            setup = choice.Setup(config, device, server, *link, each, latency, prompt=16, new_tokens=32)
            if not any(x.memory <= each and x.answer <= latency for x in setup.candidates(decoder)):
                with pytest.raises(UserError, match="nothing keeps both limits"):
                    setup.choose(decoder)
                none += 1
                continue
            fitting, chosen, _ = setup.choose(decoder)
            fitted += 1
            assert chosen.memory <= each
            assert chosen.answer <= latency
            given_up.append(chosen.rank[0])
            assert all(x.rank[0] >= given_up[-1] for x in fitting)
            assert all(x.answer >= chosen.answer for x in fitting if x.rank[1] == chosen.rank[1])
            assert chosen.cache_length >= 48
        assert given_up == sorted(given_up, reverse=True)  # with more memory no more is given up
    assert min(none, fitted) > 5
    for rtt, bandwidth, fed in ((0.0, 1e4, 8), (0.2, 1e9, 16)):  # each token takes its bytes
        setup = dataclasses.replace(setup, rtt=rtt, bandwidth=bandwidth)
        assert min(setup.candidates(decoder), key=lambda each: each.rank).fed == fed
    of_layer = weights_in_layers(config, config.num_experts_per_tok) // config.num_hidden_layers
    config = dataclasses.replace(config, vocab_size=of_layer // config.hidden_size)  # the head is as large as a layer
    for each in dataclasses.replace(setup, config=config).candidates(decoder):
        expected = device.seconds(each.layers, each.fed) + device.each * each.fed
        assert each.parts["the device"] == pytest.approx(expected, rel=0.01)


def test_the_memory_of_the_first_layers_is_theirs_where_only_later_ones_have_experts():
    c = tiny_config(**LLADA2, hidden_size=64)
    machine = choice.Machine(1.0, 1.0)
    setup = choice.Setup(c, machine, machine, 0.0, 1.0, memory=1e9, latency=1.0, prompt=0, new_tokens=0)
    found = [each for each in setup.candidates(find_decoder("refusion")) if each.weights == "same"]
    for layers, memory in {(each.layers, each.memory) for each in found}:
        held = sum(x.size for x in jax.tree.leaves(nnx.state(abstract_part(c, 0, layers, "float32"))))
        assert memory == pytest.approx(4 * held, rel=0.05)  # norms and biases are not counted


def test_what_is_measured_decides_where_to_cut(served, model, key, capsys):
    """--auto sets the flags that it stands for and says so; limits that nothing keeps are refused."""
    requests = prepare(PROMPTS, settings(), model.config)

    def chosen(*limits):
        given = [f"--key={key}", f"--server=127.0.0.1:{served[1].port}", "--auto", *limits]
        own = flags_of(device, *given)
        decoder = decoder_on_link(requests, model.config)
        device.choose_flags(own, model.config, stamp_of(model), requests, decoder)
        return own

    own = chosen()
    assert own.layers in range(1, model.config.num_hidden_layers)
    assert f"--layers={own.layers} --weights={own.weights} --cache={own.cache}" in capsys.readouterr().err
    with pytest.raises(UserError, match="nothing keeps both limits: .* of --device_memory=inf GiB"):
        chosen("--latency=1e-6")


def test_plan_says_where_to_cut(tmp_path):
    flags = ["--what=split", "--config=configs/quickstart.py", "--device_flops=2", "--server=10", "--bandwidth=10"]
    out, _ = run("plan", *flags, "--rtt=100", "--device_memory=0.001", "--latency=9", "--max_new_tokens=32", "--json")
    *fitting, chosen = map(json.loads, out.splitlines())
    assert any(each["layers"] == chosen["layers"] and each["codec"] == chosen["codec"] for each in fitting)
    assert chosen["tokens_per_second"]["refusion"] > 2.5 * chosen["tokens_per_second"]["ar"]
    assert "--device_memory: needed" in run("plan", *flags, "--rtt=100", code=2)[1]
    assert "nothing keeps" in run("plan", *flags, "--rtt=1", "--device_memory=1e-5", code=2)[1]
    (tmp_path / "plain.py").write_text("from refusion_jax.config import default_config as get_config\n")
    huggingface.save(tiny_model(num_hidden_layers=3), tmp_path)
    flags[1:2] = [f"--config={tmp_path}/plain.py", "--rtt=1", "--device_memory=1", "--json"]
    out, _ = run("plan", *flags, f"--config.init_from={tmp_path}")
    assert {json.loads(line)["layers"] for line in out.splitlines()} == {1, 2}  # of the model that is adapted
    assert "init_from=/no is not a directory" in run("plan", *flags, "--config.init_from=/no", code=2)[1]


@pytest.mark.parametrize("D", [16, 128, 300])
def test_hidden_states_cross_within_their_bound(D):
    draw = np.random.default_rng(D)
    for tokens in (0, 1, 33):
        x = (draw.standard_t(3, (tokens, D)) * np.exp(draw.normal(0, 3, (tokens, 1)))).astype(np.float32)
        x[:1] = 0
        rms = np.sqrt(np.mean(np.square(x, dtype=np.float64), axis=1, keepdims=True))
        for name, codec in CODECS.items():
            y = codec.decode(codec.encode(x), tokens, D, np.float32)
            bound = {"exact": 0, "int8": np.abs(x).max(axis=1, keepdims=True) / 254 * 1.01}
            assert np.all(np.abs(y - x) <= bound.get(name, codec.tolerance * rms) * (1 + 1e-6)), name
            is_outlier = (name == "adaptive") & (np.abs(x) > min(codec.threshold, 9) * rms)
            np.testing.assert_array_equal(y[is_outlier], x[is_outlier])
    normal = draw.normal(size=(8, D)).astype(np.float32)
    if D > 100:
        assert len(CODECS["exact"].encode(normal)) <= 0.87 * normal.nbytes
        assert len(CODECS["int8"].encode(normal)) <= 0.27 * normal.nbytes
        assert len(CODECS["adaptive"].encode(normal)) <= 0.15 * normal.nbytes


def test_a_slow_link_is_not_a_lost_one():
    """A message takes longer than the patience, and none of its parts does."""
    here, there = socket.socketpair()
    sent = frames.Result(1, bytes(1 << 21))

    def read(received):
        while some := there.recv(1 << 16):
            received += some
            time.sleep(0.15)

    with ThreadPoolExecutor(1) as reader, there, here:
        here.settimeout(4.0)
        received = bytearray()
        done = reader.submit(read, received)
        frames.send(here, sent)
        here.shutdown(socket.SHUT_WR)
        done.result()
    assert received == frames.pack(sent)

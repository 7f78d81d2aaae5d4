"""Where a split model is cut: the limits are kept, and the least precision is given up."""

import dataclasses
import json

import numpy as np
import pytest
from conftest import run, sharp_model

from refusion_jax.cli.errors import UserError
from refusion_jax.split import choice
from refusion_jax.systems.registry import find_decoder


def test_the_choice_keeps_both_limits_and_gives_up_least():
    draw = np.random.default_rng(0)
    config, decoder = sharp_model().config, find_decoder("refusion")
    config = dataclasses.replace(config, num_hidden_layers=6)
    device, server = choice.Machine(1e-3, 1e-4), choice.Machine(2e-4, 1e-6)
    none = fitted = 0
    for _ in range(40):
        network = choice.Network(float(draw.uniform(0, 0.2)), float(10 ** draw.uniform(3, 7)))
        memory, latency = 10 ** draw.uniform(3, 6, 2), 10 ** draw.uniform(-1, 1)
        given_up = []
        for each in sorted(memory):
            wanted = choice.Wanted(each, latency, 16, 32)
            found = choice.Setup(config, device, server, network, wanted, 1e-4).candidates(decoder)
            if not any(x.memory <= each and x.answer <= latency for x in found):
                with pytest.raises(UserError, match="nothing keeps both limits"):
                    choice.choose(found, wanted)
                none += 1
                continue
            fitting, chosen, _ = choice.choose(found, wanted)
            fitted += 1
            assert chosen.memory <= each
            assert chosen.answer <= latency
            given_up.append(sum(chosen.given_up))
            assert all(sum(x.given_up) >= given_up[-1] for x in fitting)
            assert all(x.answer >= chosen.answer for x in fitting if x.given_up == chosen.given_up)
            assert chosen.cache_length >= 48
        assert given_up == sorted(given_up, reverse=True)  # with more memory no more is given up
    assert min(none, fitted) > 5
    for network, fed in ((choice.Network(0.0, 1e4), 8), (choice.Network(0.2, 1e9), 16)):  # each token takes its bytes
        found = choice.Setup(config, device, server, network, wanted, 1e-4).candidates(decoder)
        assert min(found, key=choice.rank).fed == fed


def test_plan_says_where_to_cut():
    flags = ["--what=split", "--config=configs/quickstart.py", "--device_flops=2", "--server=10", "--bandwidth=10"]
    out, _ = run("plan", *flags, "--rtt=100", "--device_memory=0.001", "--latency=9", "--max_new_tokens=32", "--json")
    *fitting, chosen = map(json.loads, out.splitlines())
    assert any(each["layers"] == chosen["layers"] and each["codec"] == chosen["codec"] for each in fitting)
    assert chosen["tokens_per_second"]["refusion"] > 2.5 * chosen["tokens_per_second"]["ar"]
    assert "--device_memory: needed" in run("plan", *flags, "--rtt=100", code=2)[1]
    assert "nothing keeps" in run("plan", *flags, "--rtt=1", "--device_memory=1e-5", code=2)[1]

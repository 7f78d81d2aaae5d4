"""What crosses the link of a split model: hidden states keep their bound, and messages take the time they need."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from refusion_jax.cli.errors import UserError
from refusion_jax.split import frames
from refusion_jax.split.codec import CODECS


@pytest.mark.parametrize("D", [16, 128, 300])
def test_hidden_states_cross_within_their_bound(D):
    draw = np.random.default_rng(D)
    for tokens in (0, 1, 33):
        x = (draw.standard_t(3, (tokens, D)) * np.exp(draw.normal(0, 3, (tokens, 1)))).astype(np.float32)
        x[:1] = 0
        rms = np.sqrt(np.mean(np.square(x, dtype=np.float64), axis=1, keepdims=True))
        for name, codec in CODECS.items():
            content = codec.encode(x)
            y = codec.decode(content, tokens, D, np.float32)
            bound = {"exact": 0, "int8": np.abs(x).max(axis=1, keepdims=True) / 254 * 1.01}
            assert np.all(np.abs(y - x) <= bound.get(name, codec.tolerance * rms) * (1 + 1e-6)), name
            is_outlier = (name == "adaptive") & (np.abs(x) > min(codec.threshold, 9) * rms)
            np.testing.assert_array_equal(y[is_outlier], x[is_outlier])
            for bad in (content[:-1], content + b"\0", content[: len(content) // 2]) if content else ():
                with pytest.raises(UserError):
                    codec.decode(bad, tokens, D, np.float32)
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

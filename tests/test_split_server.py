"""The server of a model's upper layers: whom it serves, what it refuses, and that none keeps another out."""

import contextlib
import dataclasses
import errno
import random
import shutil
import socket
import ssl
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from conftest import sharp_model, tiny_model
from flax import nnx
from helpers import wait_until

from refusion_jax.checkpoints.load import reader_of
from refusion_jax.cli.errors import Failure, UserError
from refusion_jax.split import frames
from refusion_jax.split.codec import CODECS
from refusion_jax.split.link import Link
from refusion_jax.split.model import Packing, Upper
from refusion_jax.split.parts import fingerprint, part_of
from refusion_jax.split.service import LayerService


def test_several_devices_are_computed_together(served, model, key, monkeypatch):
    """Each gets what it would get alone. The first forward is held until two others wait, however busy the machine."""
    service, _ = served
    draw, packing = np.random.default_rng(0), Packing(1, 2, 1, 2, 1)
    D, none, visible = model.config.hidden_size, np.zeros(1, np.int32), np.tri(2, dtype=bool)[None]
    shape, index = jax.ShapeDtypeStruct((1, 2, D), np.float32), np.arange(2, dtype=np.int32)[None]
    xs = draw.normal(size=(3, 1, 2, D)).astype(np.float32)
    links = [link_to(served, model, key) for _ in xs]

    def ask(link, x):
        link.begin()
        link.start(1, 16)
        read = link.receive(shape, packing, link.send(packing, x, index, none, visible, index, none + 2))
        link.check()
        return read

    alone = [ask(*pair) for pair in zip(links, xs, strict=True)]
    forward, others_wait, sizes = Upper.__call__, threading.Event(), []

    def hold(upper, packing, caches, arrays):
        sizes.append(len(caches))
        others_wait.wait(300)  # not for ever, where the others do not come
        return forward(upper, packing, caches, arrays)

    monkeypatch.setattr(Upper, "__call__", hold)
    with ThreadPoolExecutor(3) as devices:
        together = [devices.submit(ask, links[0], xs[0])]
        wait_until(lambda: sizes == [1])
        together += [devices.submit(ask, *pair) for pair in zip(links[1:], xs[1:], strict=True)]
        wait_until(lambda: service._batches._jobs.qsize() == 2)
        others_wait.set()
    np.testing.assert_allclose([each.result() for each in together], alone, rtol=1e-5, atol=1e-6)
    assert sizes == [1, 2]
    for link in links:
        link.close()


def test_another_version_and_what_is_no_message_are_refused(served, model):
    older = frames.pack(dataclasses.replace(hello(model), version=1))
    nonsense = frames._HEADER.pack(2) + b"\xc1x"
    for sent, why in ((older, "it speaks version 1"), (nonsense, "a malformed message")):
        with talking(served[0]) as there:
            there.sendall(sent)
            assert frames.receive(there)[0].why.startswith(why)


def test_a_message_that_comes_twice_is_dealt_with_once(served, model):
    """Its second content is not looked at: what the first gave comes again, also after a new connection."""
    first_hello = hello(model)

    def answer(there, message):
        frames.send(there, message)
        return frames.receive(there)[0]

    with talking(served[0]) as there:
        assert answer(there, first_hello) == frames.Welcome(0)
        frames.send(there, frames.Start(1, 1, 16))
        first = answer(there, forward(model, 2, 1.0))
        assert answer(there, forward(model, 2, -3.0)) == first
        frames.send(there, frames.Start(1, 1, 16))  # would empty the cache
        second = answer(there, forward(model, 3, 2.0, length=1))
    with talking(served[0]) as there:
        assert answer(there, dataclasses.replace(first_hello, last=3)) == frames.Welcome(3)
        assert answer(there, forward(model, 3, -3.0, length=1)) == second
        frames.send(there, frames.Bye(3))
    with talking(served[0]) as there:  # once each, they give the same
        answer(there, hello(model))
        frames.send(there, frames.Start(1, 1, 16))
        assert answer(there, forward(model, 2, 1.0)) == first
        assert answer(there, forward(model, 3, 2.0, length=1)) == second


class FullSocket(socket.socket):
    """No descriptor is left for its first connection, as where a stranger has opened a thousand."""

    is_full = True

    def accept(self):
        if self.is_full:
            self.is_full = False
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_strangers_and_lost_devices_do_not_keep_others_out(model, key, monkeypatch):
    """Want of descriptors is waited out; a killed device's caches make room for it; a silent one's connection ends.

    So do those of a device that asked for more than there is.
    """
    memory = 2 * Upper(part_of(model, 1, 3)).cache_bytes(1, 16)
    service = LayerService(reader_of(model), model.config, memory, "float32")
    listening, tls = FullSocket(), frames.secured(key, is_server=True)
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    threading.Thread(target=service.listen, args=(listening, tls), daemon=True).start()
    Link(listening.getsockname(), key, stamp_of(model), 1, "exact", 300.0).close()

    def is_served(there):
        frames.send(there, hello(model))
        assert isinstance(frames.receive(there)[0], frames.Welcome)
        frames.send(there, frames.Start(1, 1, 16))
        with contextlib.suppress(OSError):  # refused before
            frames.send(there, forward(model, 2, 0.0))
        return isinstance(frames.receive(there)[0], frames.Result)

    def is_another_served():
        with talking(service) as another:
            return is_served(another)

    greedy = hello(model)
    with talking(service) as there:
        for message in (greedy, frames.Start(1, 1, 16), frames.Start(2, 2, 16)):
            frames.send(there, message)
        assert isinstance(frames.receive(there)[0], frames.Welcome)
        assert isinstance(frames.receive(there)[0], frames.Refused)
    wait_until(is_another_served, seconds=60)
    with talking(service) as there:
        frames.send(there, greedy)
        assert frames.receive(there)[0].last == 0  # nothing is kept of it
        frames.send(there, frames.Bye(1))
    with talking(service) as first:
        assert is_served(first)
        assert not is_another_served()
    wait_until(is_another_served, seconds=60)
    monkeypatch.setattr("refusion_jax.split.service._KEEP", 0.1)
    with Link(listening.getsockname(), key, stamp_of(model), 1, "exact", 60.0)._connection as silent:
        assert silent.recv(1) == b""


def hello(model):
    """The first message of a device with one layer, in a new session."""
    return frames.Hello(frames.VERSION, stamp_of(model), 1, "exact", random.randbytes(16), 0)


def forward(model, number, value, length=0):
    """A message with one token, whose hidden state is `value` throughout, after `length` entries of the cache."""
    at = np.int32(length).tobytes()
    x = CODECS["exact"].encode(np.full((1, model.config.hidden_size), value, np.float32))
    return frames.Forward(number, True, 1, 1, 1, 1, np.int32(1).tobytes(), at, at, b"", x)


@contextlib.contextmanager
def talking(service):
    """A connection to the service without TLS, whose end the service's thread closes: else it might read another's."""
    here, there = socket.socketpair()

    def talk():
        with there:
            service.talk(there)

    threading.Thread(target=talk, daemon=True).start()
    with here:
        yield here


def test_only_holders_of_the_key_and_the_model_are_served(served, model, key, tmp_path):
    with pytest.raises(UserError, match="another --key"):
        link_to(served, model, make_key(tmp_path / "other.pem"))
    with pytest.raises(UserError, match="another model"):
        link_to(served, sharp_model(1), key)


@pytest.mark.parametrize(
    ("kind", "failed", "said"),
    [
        (ssl.SSLCertVerificationError, UserError, "or a clock is wrong: certificate is not yet valid"),
        (ssl.SSLError, Failure, "cannot be reached: alert bad certificate"),  # it is not yet valid for the server
    ],
)
def test_why_a_server_is_not_reached_is_told(served, model, key, monkeypatch, kind, failed, said):
    error = kind(1, said.partition(": ")[2])
    error.verify_message = said.partition(": ")[2]

    def fail(_, plain, **__):
        plain.close()  # as the real one does
        raise error

    monkeypatch.setattr(ssl.SSLContext, "wrap_socket", fail)
    with pytest.raises(failed, match=said):
        link_to(served, model, key)


@pytest.mark.parametrize("layer", [1, 2])
def test_a_model_of_which_one_layer_alone_was_trained_is_another(layer):
    model = tiny_model(num_hidden_layers=3, hidden_size=8192, family="smollm3")  # as wide as models of any use
    other = nnx.clone(model)
    nnx.update(other.layers, jax.tree.map(lambda w: w.at[layer].add(1), nnx.state(other.layers)))
    assert stamp_of(other) != stamp_of(model)


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    if not shutil.which("openssl"):
        pytest.skip("openssl makes the key")
    return make_key(tmp_path_factory.mktemp("key") / "split.pem")


def make_key(path):
    ask = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=split".split()
    subprocess.run(["openssl", *ask, "-keyout", path, "-out", path], check=True, capture_output=True)
    return path


class Cutter:
    """Forwards bytes between devices and a server, until it is told to cut all connections."""

    def __init__(self, to: int):
        self.to, self.open, self.passed, self.cut_at = to, [], 0, None
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            here, _ = self._listening.accept()
            there = socket.create_connection(("127.0.0.1", self.to))
            self.open += [here, there]
            for pair in ((here, there), (there, here)):
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, a, b):
        try:
            while some := a.recv(1 << 16):
                self.passed += len(some)
                if self.cut_at is not None and self.passed > self.cut_at:
                    self.cut_at = None
                    self.cut()
                b.sendall(some)
        except OSError:
            pass

    def cut(self):
        for each in self.open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self.open = []


@pytest.fixture(scope="module")
def model():
    return sharp_model(num_hidden_layers=3, family="smollm3", no_rope_layer_interval=2)


@pytest.fixture(scope="module")
def served(model, key):
    """(the service, a proxy before it)."""
    service = LayerService(reader_of(model), model.config, 1 << 30, "float32")
    listening = socket.create_server(("127.0.0.1", 0))
    tls = frames.secured(key, is_server=True)
    threading.Thread(target=service.listen, args=(listening, tls), daemon=True).start()
    return service, Cutter(listening.getsockname()[1])


def stamp_of(model):
    return fingerprint(reader_of(model), model.config, "float32")


def link_to(served, model, key, layers=1, patience=300.0):
    return Link(("127.0.0.1", served[1].port), key, stamp_of(model), layers, "exact", patience)

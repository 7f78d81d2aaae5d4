"""What the tests of two machines share: a model, a server of its upper layers, a proxy before it, and links to them."""

import contextlib
import shutil
import socket
import subprocess
import threading

import pytest
from conftest import sharp_model

from refusion_jax.checkpoints.load import reader_of
from refusion_jax.split import frames
from refusion_jax.split.link import Link
from refusion_jax.split.parts import fingerprint
from refusion_jax.split.service import LayerService


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

"""Serves a trained model over HTTP, as OpenAI's API does.

  python -m refusion_jax.serve --checkpoint=runs/quickstart --port=8000
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Sort 7 3 9 1."}'

GET / is a page for people, GET /docs lists the fields of requests, and refusion_jax/serving/README.md explains all
routes. A field that would change the answer and is not supported is refused, never ignored.

Requests share one batch of --decode.batch_size rows; none waits for the others to finish, and an answer depends only on
its own request. The --decode flags are the defaults of requests, and set the sizes that are compiled:
--decode.max_new_tokens is the most that a request may ask for, --decode.cache_length the most tokens of a prompt and
its answer together.

The server listens only on this machine unless --host says otherwise; with --api_key it refuses requests without a key.
On SIGINT or SIGTERM it finishes the answers under way and ends, on SIGTERM with exit code 0.
"""

import gc
import os
import signal
import sys

import jax
from absl import flags
from etils import epath

import refusion_jax
from refusion_jax.checkpoints.contents import chosen_settings, load_tokenizer, read_model_config
from refusion_jax.checkpoints.load import load_for
from refusion_jax.cli import command
from refusion_jax.cli.errors import Failure, UserError, first_line, needs
from refusion_jax.cli.progress import waiting
from refusion_jax.distributed.compiled_code import keep_for_user
from refusion_jax.distributed.host import listen
from refusion_jax.distributed.sharding import local_mesh
from refusion_jax.systems.api import all_settings

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, command.CHECKPOINT)
_HOST = flags.DEFINE_string(
    "host", "127.0.0.1", "Address to listen on; 0.0.0.0: all addresses, for everyone who can reach them"
)
_PORT = flags.DEFINE_integer("port", 8000, "Port to listen on; 0: any that is free", 0, 65535)
_NAME = flags.DEFINE_string("model_name", None, "Name of the model that clients see; by default --checkpoint as given")
_KEYS = flags.DEFINE_list(
    "api_key", [], "Keys, comma-separated, one of which each request must carry; by default those in REFUSION_API_KEY"
)
_CORS = flags.DEFINE_list("cors", [], "Origins of web pages that may ask from a browser, comma-separated; *: all")
_HOSTS = flags.DEFINE_list(
    "allowed_host", [], "Host names that requests may use, such as a proxy's; on the loopback also localhost's names"
)
_PREFIXES = flags.DEFINE_integer(
    "prefix_cache_mib",
    None,
    "MiB per device for keys and values of prefixes, reused by prompts that begin alike; 0: none; by default as much "
    "as the batch has, or a quarter of what is then free if that is less",
    0,
    2**30,
)
_STRUCTURED = flags.DEFINE_bool(
    "structured", False, "Compile for structured answers before listening; otherwise the first of them waits for it"
)
_LOG = flags.DEFINE_bool("access_log", False, "Print a JSON line for each request, with its X-Request-Id")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of weights, cache and computation")
_DATA = flags.DEFINE_integer("mesh.data", 1, "Split the batch over this many devices", lower_bound=1)
_TENSOR = flags.DEFINE_integer("mesh.tensor", 1, "Split heads and weights over this many devices", lower_bound=1)
command.define_settings(
    all_settings(),
    defaults={
        "max_new_tokens": "256, or half of what the model reads",
        "cache_length": "what the model reads",
        "batch_size": "64; 8 on a CPU",
        "seed": "each request draws its own",
    },
)
_ROWS = {"cpu": 8}  # rows of a batch, if different from the default: on a CPU each one costs time


def main() -> None:
    if _CHECKPOINT.value is None:
        raise UserError("--checkpoint=DIR is needed; --help explains")
    # An empty key would match all requests without a key.
    keys = [key for key in _KEYS.value or os.environ.get("REFUSION_API_KEY", "").split(",") if key]
    if _KEYS.present and not keys:
        raise UserError("--api_key: holds no key; without the flag, all requests are served")
    with needs("serve"):
        from refusion_jax.serving.access import Access, allowed_hosts
        from refusion_jax.serving.app import make_app
        from refusion_jax.serving.connections import make_server
        from refusion_jax.serving.engine import Engine, sized
        from refusion_jax.serving.service import Service
    checkpoint = epath.Path(_CHECKPOINT.value)
    given = command.given()
    settings = chosen_settings(checkpoint, given)
    tokenizer = load_tokenizer(checkpoint)
    settings = sized(settings, read_model_config(checkpoint))
    rows = given.get("batch_size") or _ROWS.get(jax.default_backend(), settings.batch_size)
    mesh = local_mesh(data=_DATA.value, tensor=_TENSOR.value)
    listening = listen(_HOST.value, _PORT.value)
    keep_for_user()

    print(f"loading {checkpoint}", file=sys.stderr)  # where a log is, this may be all that it says for a minute
    model = load_for(checkpoint, settings, _DTYPE.value, mesh)
    engine = Engine(model, settings, rows, prefix_cache=_PREFIXES.value and _PREFIXES.value << 20)
    host, port, *_ = listening.getsockname()
    access = Access(keys, _CORS.value, allowed_hosts(host, _HOSTS.value), _LOG.value)
    service = Service(_NAME.value or _CHECKPOINT.value, model, tokenizer, engine, given.get("seed"))
    server = make_server(make_app(service, access, refusion_jax.__version__))
    try:
        with waiting("compiling"):
            engine.start(failed=lambda: setattr(server, "should_exit", True))
            if _STRUCTURED.value and not engine.failure:
                service.compile_structured()
        # Existing objects stay. A garbage collector that examines them, too, would block everybody for 0.1 s or more.
        gc.collect()
        gc.freeze()
        if not engine.failure:
            command.say(f"serving {_CHECKPOINT.value} at http://{f'[{host}]' if ':' in host else host}:{port}/v1")
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # raised again by uvicorn, after the last answer
            server.run(sockets=[listening])
    finally:
        engine.close()
    if engine.failure:
        raise Failure(f"the decoder has failed: {first_line(engine.failure)}") from engine.failure


if __name__ == "__main__":
    command.run(main)

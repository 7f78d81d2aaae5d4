r"""Decodes with one model over two machines: `device` holds its first layers, `server` the rest.

  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj /CN=split \
      -keyout split.pem -out split.pem                         # the key, for both machines
  python -m refusion_jax.split server --checkpoint=runs/quickstart --key=split.pem --host=0.0.0.0 --port=9000
  python -m refusion_jax.split device --checkpoint=runs/quickstart --key=split.pem --server=HOST:9000 --layers=1 \
      --prompt='Sort 7 3 9 1.'

See refusion_jax/split/README.md.
"""

from refusion_jax.cli import command

if __name__ == "__main__":
    sides = {side: f"refusion_jax.split.{side}" for side in ("device", "server")}
    command.guard(lambda: command.run_part("split", __doc__, sides))

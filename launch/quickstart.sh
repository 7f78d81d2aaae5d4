#!/usr/bin/env bash
# Installs into .venv, pretrains a small ReFusion model from scratch on the CPU, decodes held-out problems and prints how
# well and how fast. Run again, it finds the training complete and goes straight to decoding.
#   bash launch/quickstart.sh [--config.KEY=VALUE ...]      flags go to `train`
set -euo pipefail
started=$(date +%s)
source "$(dirname "$0")/install.sh" ""
workdir=${WORKDIR:-runs/quickstart}
export JAX_PLATFORMS=cpu
.venv/bin/python -m refusion_jax.train --config=configs/quickstart.py --workdir="$workdir" "$@"
.venv/bin/python -m refusion_jax.quickstart --workdir="$workdir" --started="$started" --decode.slot_size=4 \
  --decode.serial_blocks=2 # of 16 tokens: a CPU pays for every mask that is planned

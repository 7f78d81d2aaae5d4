#!/usr/bin/env bash
# Installs what the tests need into .venv, checks style and types, and runs the tests.
#   bash launch/test.sh [pytest arguments]
#   bash launch/test.sh -m "thorough and not slow"   # more systems, meshes and processes, as in CI
#   bash launch/test.sh -m slow                      # hours
set -euo pipefail
source "$(dirname "$0")/install.sh" "[test]"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
# Three files at a time: most tests wait for a compiler that uses one core, and some for processes; with two at a time,
# a sixth of two cores is idle. A worker that dies is not replaced: pytest-xdist then hands out its finished files again,
# and waits for ever at the end.
.venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 "$@"

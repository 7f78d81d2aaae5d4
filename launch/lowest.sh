#!/usr/bin/env bash
# Runs tests with the lowest versions that the project allows, in an environment of their own (pip install uv).
#   bash launch/lowest.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
uv run --no-project --isolated --python 3.11 --resolution lowest-direct --refresh-package refusion-jax \
  --with-editable '.[test]' python -m pytest "$@"

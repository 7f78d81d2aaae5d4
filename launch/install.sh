# shellcheck shell=bash
# Sourced by the other scripts: goes to the project's root, makes .venv where there is none, and installs the project with
# the extras in $1 ("" or "[test]"), with the versions of the lock file $2, if any. Done once; again only after
# requirements.txt, pyproject.toml or the lock file have changed.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
if [ ! -x .venv/bin/python ] || [ ! -x .venv/bin/pip ]; then # a venv that was interrupted has no pip
  for python in python3 python3.13 python3.12 python3.11 none; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi
  done
  if [ "$python" = none ]; then
    echo "error: Python 3.11 or newer is needed" >&2
    exit 2
  fi
  "$python" -m venv .venv
fi
installed=".venv/installed$1"
lock=${2:-requirements.txt}
if [ ! "$installed" -nt requirements.txt ] || [ ! "$installed" -nt pyproject.toml ] || [ ! "$installed" -nt "$lock" ]; then
  pip=(.venv/bin/pip install --quiet --disable-pip-version-check)
  if [ -n "${2:-}" ]; then "${pip[@]}" --require-hashes --requirement "$2" || exit; fi
  "${pip[@]}" --editable ".$1" || exit
  touch "$installed"
fi

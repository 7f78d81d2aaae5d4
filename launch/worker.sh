#!/usr/bin/env bash
# What launch/tpu_vm.sh runs on every worker of a TPU, detached, so that a lost connection ends nothing.
#   install        into .venv, with TPU support, the versions of requirements.lock
#   start FLAGS    `train FLAGS` in the background; one that still runs has ten minutes to save a checkpoint and end.
#                  Its output goes to train.log, which is copied to WORKDIR/logs/HOST.log each minute and at the end
#   wait           until it ends: its exit code, or 254 if it is gone without one (the machine was restarted)
#   lost           75 if it should be started again, 254 if it was killed or is gone without an exit code, else 0
#   stop           as a preemption does: one checkpoint, then the end
#   logs           its output, from the last 100 lines on
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

is_running() { # whether `train` is, or what is in the file $1
  local file=${1:-train.pid}
  [ -f "$file" ] && grep -Eq 'refusion_jax|worker.sh' "/proc/$(cat "$file")/cmdline" 2>/dev/null
}

copy_log() { # while the process $1 runs, and once after it, to the file $2
  local ended='' i size copied=''
  trap '' TERM # of a machine that is shut down
  until [ -n "$ended" ]; do
    for ((i = 0; i < ${LOG_SECONDS:-60}; i++)); do
      if ! kill -0 "$1" 2>/dev/null; then ended=1 && break; fi
      sleep 1
    done
    size=$(wc -c <train.log)
    if [ "$size" != "$copied" ] && timeout -s KILL 60 .venv/bin/python -c 'import sys
from refusion_jax.distributed.storage import read_file, write_file
write_file(sys.argv[1], read_file("train.log"))' "$2" 2>&1 | tail -n 1; then copied=$size; fi
  done
}

case ${1:-} in
  install)
    if [ ! -x .venv/bin/pip ] && ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      rm -rf .venv # an interrupted `uv venv` has no pip
      python3 -m pip install --quiet --user uv && python3 -m uv venv --quiet --seed --python 3.11 .venv || exit 1
    fi
    source launch/install.sh "[tpu]" launch/requirements.lock
    ;;
  start)
    shift
    if is_running; then kill -TERM "$(cat train.pid)"; fi
    for ((i = 0; i < 600; i++)); do
      if ! is_running; then break; fi
      sleep 1
    done
    if is_running; then kill -KILL "$(cat train.pid)"; fi
    rm -f train.exit train.pid
    nohup setsid bash launch/worker.sh job "$@" >>train.log 2>&1 </dev/null &
    for ((i = 0; i < 50; i++)); do
      if [ -s train.pid ]; then exit 0; fi
      sleep 0.1
    done
    exit 1
    ;;
  job) # of `start`
    shift
    .venv/bin/python -m refusion_jax.train "$@" &
    train=$!
    echo $train >train.pid
    for flag in "$@"; do
      case $flag in --workdir=*) copy_log $train "${flag#*=}/logs/$HOSTNAME.log" & ;; esac
    done
    echo $! >train.copy
    trap 'kill -TERM $train 2>/dev/null' TERM # of a machine that is shut down
    while
      wait $train
      code=$?
      kill -0 $train 2>/dev/null
    do :; done
    echo $code >train.exit
    ;;
  wait)
    while is_running; do sleep 2; done
    sleep 1 # for the exit code to be written
    if [ -s train.exit ]; then exit "$(cat train.exit)"; fi
    exit 254
    ;;
  lost)
    if is_running; then exit 0; fi
    case $(cat train.exit 2>/dev/null) in
      75) exit 75 ;;
      137 | 143 | '') exit 254 ;; # 143: told to end before it could listen, while it was still being imported
    esac
    ;;
  stop)
    if is_running; then kill -TERM "$(cat train.pid)"; fi
    while is_running || is_running train.copy; do sleep 1; done
    ;;
  logs) exec tail -n 100 -F train.log ;;
  *)
    echo "error: $0 install|start|wait|lost|stop|logs" >&2
    exit 2
    ;;
esac

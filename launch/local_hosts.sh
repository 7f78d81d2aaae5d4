#!/usr/bin/env bash
# Trains or evaluates with N processes on this machine, which find each other as the hosts of a pod do.
#   bash launch/local_hosts.sh N --config=configs/NAME.py --workdir=DIR [flags of `train`]
#   COMMAND=evaluate bash launch/local_hosts.sh N --checkpoint=DIR --tasks=A,B --output=DIR [flags of `evaluate`]
# From the environment: COMMAND (train), DEVICES (virtual CPU devices of each process, 1), RESTARTS (how often to start again after a
# preemption or a lost process, 0), PYTHON (python).
# SIGTERM and Ctrl-C save one checkpoint and end the run. When one process dies the others are killed. The exit code is that
# of the process that ended first with another than 0: 75 and 143 preempted (start it again), 2 bad input (never started again).
# Shows the output of process 0, and that of a process that dies.
set -o pipefail # without -u: for macOS's bash, 3.2, an empty array is an unset variable
hosts=${1:-}
if ! [[ $hosts =~ ^[1-9][0-9]*$ ]]; then
  echo "error: the first argument is the number of processes, such as: bash launch/local_hosts.sh 2 --config=..." >&2
  exit 2
fi
shift
python=${PYTHON:-python}
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
export XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=${DEVICES:-1}"
export NPROC=${NPROC:-32} # threads of XLA: virtual devices that share too few of them wait for each other for ever
export JAX_NUM_PROCESSES=$hosts
logs=$(mktemp -d)
pids=()
told=
trap 'rm -rf "$logs"' EXIT
trap 'told=1; kill -TERM "${pids[@]}" 2>/dev/null' TERM INT

work() { # starts all processes and waits for them; sets code
  local index status
  JAX_COORDINATOR_ADDRESS=localhost:$("$python" -c 'import socket; s = socket.create_server(("", 0)); print(s.getsockname()[1])')
  export JAX_COORDINATOR_ADDRESS
  pids=()
  for ((index = 0; index < hosts; index++)); do
    if ((index == 0)); then
      JAX_PROCESS_ID=$index "$python" -m "refusion_jax.${COMMAND:-train}" "$@" &
    else
      JAX_PROCESS_ID=$index "$python" -m "refusion_jax.${COMMAND:-train}" "$@" >"$logs/$index" 2>&1 &
    fi
    pids[index]=$!
  done
  code=0
  while ((${#pids[@]} > 0)); do
    sleep 0.1 # a signal is passed on after it
    for index in "${!pids[@]}"; do
      if kill -0 "${pids[index]}" 2>/dev/null; then continue; fi
      wait "${pids[index]}"
      status=$?
      unset "pids[index]"
      if ((status == 0 || code != 0)); then continue; fi
      code=$status
      if ((status != 75)); then # preempted they leave together; else the others would wait for the dead one
        sleep 1                 # if the input is at fault process 0 is about to say so itself
        if ((index != 0)) && [ -n "${pids[0]:-}" ] && kill -0 "${pids[0]}" 2>/dev/null; then
          echo "process $index ended with exit code $status:" >&2
          grep -v '^\[Gloo\]' "$logs/$index" | tail -n 30 >&2
        fi
        if ((${#pids[@]} > 0)); then kill -KILL "${pids[@]}" 2>/dev/null; fi
      fi
    done
  done
}

for ((start = 0; start <= ${RESTARTS:-0}; start++)); do
  if ((start > 0)); then echo "starting again after exit code $code ($start of $RESTARTS)"; fi
  work "$@"
  if [ -n "$told" ] || ((code != 75 && code != 137 && code != 143)); then break; fi # killed, as a lost machine is; ended while imported
done
exit "$code"

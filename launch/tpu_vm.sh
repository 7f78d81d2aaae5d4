#!/usr/bin/env bash
# Trains on a Cloud TPU, one slice or several, from any machine that has gcloud.
#   bash launch/tpu_vm.sh run NAME --zone=us-east5-a --accelerator=v5p-64 --spot -- --config=configs/NAME.py --workdir=gs://BUCKET/DIR
# does it all. The commands, each with a NAME of your choice for the TPU:
#   create    requests the TPU (a queued resource) and waits until it is ready
#   setup     copies this project to all workers and installs it
#   run       creates and sets up what is missing, starts `train` with the flags after -- on all workers, and watches it:
#             a preempted TPU is created again and the run resumed, until it is complete; one that runs there saves first
#   resume    continues to watch the last `run` of NAME, and restarts it if it is not running
#   logs      what `train` prints (--worker=0)
#   delete    lets the run save a checkpoint, then deletes the TPU
# Options, remembered from `create` and `run` on:
#   --zone=Z --accelerator=TYPE (v4-32, v5litepod-64, v5p-64, v6e-32 ...) --project=P --slices=N --spot
#   --runtime=VERSION (that of the accelerator's generation)
#   --internal-ip, --tunnel-through-iap: how gcloud reaches workers without external addresses
#     (several workers it reaches only with the key in an agent: ssh-add ~/.ssh/google_compute_engine)
#   --alpha calls `gcloud alpha`, for flags that exist only there
#   any other --flag=value goes to `gcloud compute tpus queued-resources create` as it is: --reserved, --service-account=A,
#   --network=N, --subnetwork=N, --internal-ips, --labels=K=V; --type=v5p --topology=4x4x4 in place of --accelerator, with
#   --runtime; --alpha --provisioning-model=flex-start --max-run-duration=2d
#   --dry_run prints every command instead of running it
# Exit codes: that of `train`; 2 for bad input, which is never retried. If you interrupt this script, the run continues.
set -o pipefail # without -u: for macOS's bash, 3.2, an empty array is an unset variable
cd "$(dirname "$0")/.." || exit 1
POLL_SECONDS=${POLL_SECONDS:-30}
MEMORY=${XDG_STATE_HOME:-$HOME/.local/state}/refusion_jax

fail() {
  echo "error: $*" >&2
  exit 2
}

command=${1:-} name=${2:-}
case $command in
  create | setup | run | resume | logs | delete) ;;
  --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' launch/tpu_vm.sh && exit ;;
  *) fail "${command:-no command}: the first argument is one of create, setup, run, resume, logs, delete" ;;
esac
named='^[a-z]([-a-z0-9]*[a-z0-9])?$' shared=' --workdir=(gs:/)?/' copied='^(configs|refusion_jax|launch)/' # patterns; bash 3.2 takes them from variables alone
[[ $name =~ $named ]] || fail "${name:-no name}: the second argument names the TPU: a-z, 0-9 and -"
shift 2

zone='' accelerator='' project='' slices=1 spot='' runtime='' alpha='' dry_run='' worker=0
reach=() # flags for ssh and scp
asked=() # flags for `create`
flags=() options=()
read_options() { # of the command line, or remembered ones; what follows -- are flags of `train`
  while (($# > 0)); do
    case $1 in
      --zone=* | --accelerator=* | --project=* | --slices=* | --runtime=* | --worker=*)
        local key=${1%%=*}
        printf -v "${key#--}" %s "${1#*=}"
        ;;
      --spot) spot=1 ;;
      --alpha) alpha=1 ;;
      --internal-ip | --tunnel-through-iap) reach=("$1") ;;
      --dry_run | --dry-run) dry_run=1 ;; # the second is gcloud's spelling
      --)
        shift
        flags=("$@")
        return
        ;;
      --config* | --workdir*) fail "$1: flags of train come after --" ;;
      --?*) asked+=("$1") ;;
      *) fail "$1: no such option; write --flag=value, and flags of train after --" ;;
    esac
    shift
  done
}
if [ -f "$MEMORY/$name" ]; then
  while IFS= read -r -d '' option; do options+=("$option"); done <"$MEMORY/$name"
  read_options "${options[@]}"
fi
options=("${asked[@]}") asked=()
read_options "$@"
if ((${#asked[@]} == 0)); then
  asked=("${options[@]}")
elif [[ $command != create && $command != run ]]; then
  fail "${asked[0]}: no such option of $command"
fi
[ -n "$zone" ] || fail "--zone=Z is needed, such as --zone=us-east5-a"
[[ $slices =~ ^[1-9][0-9]*$ ]] || fail "--slices=$slices: must be a number of at least 1"
if [[ $command == resume ]]; then ((${#flags[@]} > 0)) || fail "no run of $name is remembered; start one with: run"; fi
if [[ $command == create || $command == run || $command == resume ]]; then
  [[ -n $accelerator || " ${asked[*]}" == *" --topology="* ]] ||
    fail "--accelerator=TYPE is needed, such as --accelerator=v5p-64"
  case $accelerator in
    v4-*) version=tpu-ubuntu2204-base ;;
    v5litepod-*) version=v2-alpha-tpuv5-lite ;;
    v5p-*) version=v2-alpha-tpuv5 ;;
    v6e-*) version=v2-alpha-tpuv6e ;;
    7x* | tpu7x*) fail "--accelerator=$accelerator: Google has this generation on GKE only, see launch/gke" ;;
    '') [ -n "$runtime" ] || fail "--runtime=VERSION is needed with --topology, such as --runtime=v2-alpha-tpuv5 for v5p" ;;
    *) [ -n "$runtime" ] || fail "--accelerator=$accelerator: known are v4-N, v5litepod-N, v5p-N, v6e-N; else give --runtime=VERSION" ;;
  esac
  version=${runtime:-$version}
fi
if [[ $command == run ]]; then
  [[ " ${flags[*]} " == *" --config="* ]] || fail "the flags of train come after --, and --config=configs/NAME.py is one of them"
  [[ " ${flags[*]} " =~ $shared ]] ||
    fail "--workdir=gs://BUCKET/DIR (or the absolute path of a mounted one) is needed after --: all workers share it, and it outlives them"
  file=" ${flags[*]} " && file=${file#* --config=} && file=${file%%[: ]*} && file=${file#./}
  [[ $file == /* || -f $file && $file =~ $copied ]] || fail "--config=$file: workers get only what is in configs/, and it is not there"
fi

remember() {
  if [ -n "$dry_run" ]; then return; fi
  mkdir -p "$MEMORY"
  printf '%s\0' "--zone=$zone" "--accelerator=$accelerator" "--project=$project" "--slices=$slices" ${spot:+--spot} \
    "--runtime=$runtime" ${alpha:+--alpha} "${reach[@]}" "${asked[@]}" -- "${flags[@]}" >"$MEMORY/$name"
}

gcloud_() { # gcloud compute tpus queued-resources VERB NAME ..., in the right place
  local line=(gcloud ${alpha:+alpha} compute tpus queued-resources "$@" "--zone=$zone" ${project:+"--project=$project"})
  case $1 in ssh | scp) line+=("${reach[@]}") ;; esac
  if [ -n "$dry_run" ]; then
    printf '%q ' "${line[@]}"
    echo
  else
    "${line[@]}"
  fi
}

everywhere() { # runs a line on all workers of all slices; the exit code is that of the first that has not 0. Sets reached
  local said code
  # gcloud (528) ends with 0 also where it has reached no worker, as of a TPU that is gone.
  said=$(gcloud_ ssh "$name" --node=all --worker=all --command="echo reached; $1")
  code=$?
  reached='' && if [[ $said == *reached* ]]; then reached=1; fi
  if [ -n "$dry_run" ]; then echo "$said"; elif ((code == 0)) && [ -z "$reached" ]; then code=255; fi
  return "$code"
}

on_all() { # runs launch/worker.sh COMMAND on all workers
  local quoted
  printf -v quoted '%q ' bash refusion_jax/launch/worker.sh "$@"
  everywhere "${quoted% }"
}

get_state() { # sets state, NONE if there is no such TPU, and, where gcloud knows them, kind and topology
  local tries error node='tpu.nodeSpec[0].node'
  local about="--format=value[separator=\",\"](state.state,$node.acceleratorType.basename(),$node.acceleratorConfig.topology)"
  if [ -n "$dry_run" ]; then
    gcloud_ describe "$name" "$about"
    state=${created:+ACTIVE}
    state=${state:-NONE}
    return
  fi
  error=$(mktemp)
  for ((tries = 0; tries < 5; tries++)); do
    if state=$(gcloud_ describe "$name" "$about" 2>"$error"); then
      rm -f "$error"
      IFS=, read -r state kind topology <<<"$state"
      return
    elif grep -qi not_found "$error"; then
      state=NONE
      rm -f "$error"
      return
    fi
    sleep "$POLL_SECONDS"
  done
  cat "$error" >&2
  rm -f "$error"
  exit 1
}

create() { # until the TPU is there; what is left of a preempted one is deleted first
  local nodes=("--node-id=$name") said='' there wanted
  if ((slices > 1)); then nodes=("--node-count=$slices" "--node-prefix=$name"); fi
  while :; do
    get_state
    case $state in
      ACTIVE)
        there=$kind wanted=$accelerator
        if [ -z "$wanted" ]; then
          there=$topology wanted="${asked[*]} " && wanted=${wanted##*--topology=} && wanted=${wanted%% *}
        fi
        if [ "${there:-$wanted}" != "$wanted" ]; then
          echo "$name exists, as $there and not as $wanted; to have that, delete it first"
        fi
        return
        ;;
      NONE)
        gcloud_ create "$name" "${nodes[@]}" ${accelerator:+"--accelerator-type=$accelerator"} "--runtime-version=$version" \
          ${spot:+--spot} "${asked[@]}" || exit 1
        created=1
        ;;
      SUSPENDED | FAILED)
        if [ "$state" = FAILED ] && [ -n "${created:-}" ]; then
          echo "the request for $name has failed; why: gcloud compute tpus queued-resources describe $name --zone=$zone" >&2
          exit 1
        fi
        gcloud_ delete "$name" --force --quiet
        ;;
      *)
        if [ "$said" != "$state" ]; then echo "$name is $state"; fi
        said=$state
        sleep "$POLL_SECONDS"
        ;;
    esac
  done
}

setup() {
  local archive=refusion_jax.tgz folder=${TMPDIR:-/tmp} tries pack ready=''
  if [ -z "$dry_run" ]; then folder=$(mktemp -d); fi
  pack=(tar -czf "$folder/$archive" --exclude=__pycache__ refusion_jax configs launch requirements.txt pyproject.toml README.md LICENSE)
  if [ -n "$dry_run" ]; then echo "${pack[@]}"; else COPYFILE_DISABLE=1 "${pack[@]}" || exit 1; fi
  # Where scp copies nothing gcloud may end with 0, too: an archive that was left there would be older code.
  for ((tries = 0; tries < 10; tries++)); do # a new machine takes a while to answer
    if gcloud_ scp "$folder/$archive" "$name:$archive" --node=all --worker=all &&
      everywhere "mkdir -p refusion_jax && tar -xzf $archive -C refusion_jax && rm $archive && bash refusion_jax/launch/worker.sh install"; then
      ready=1
      break
    fi
    get_state
    if [ "$state" != ACTIVE ]; then break; fi
    sleep "$POLL_SECONDS"
  done
  if [ -z "$dry_run" ]; then rm -rf "$folder"; fi # of a dry run it is not ours
  if [ -n "$ready" ]; then return; fi
  echo "$name cannot be set up, and is $state" >&2
  return 1
}

prepare() { # a TPU that is preempted while it is set up is created again
  until
    created=''
    create
    setup
  do
    case $state in ACTIVE | DELETING | NONE) exit 1 ;; esac
  done
}

watch() { # until the run is complete or fails by itself
  local code said silent=0
  while :; do
    on_all wait
    code=$?
    if ((code != 0 && code != 2 && code != 75 && code != 254 && code != 255)); then
      on_all lost # the others fail, each in its way, where one machine is lost or one process leaves
      said=$?
      case $said in 75 | 254 | 255) code=$said ;; esac
    fi
    case $code in
      75) echo "$name was interrupted, and goes on from its newest checkpoint" ;;
      254) echo "a machine of $name was lost" ;;
      255) echo "$name does not answer" ;;
      *)
        if [ -z "$dry_run" ]; then echo "train has ended with exit code $code; what it said: bash launch/tpu_vm.sh logs $name"; fi
        return "$code"
        ;;
    esac
    get_state
    if [[ $state == DELETING || $state == NONE ]]; then # by somebody: a preempted one is SUSPENDED
      echo "$name has been deleted; run creates it again, and resumes"
      return 75
    elif [ "$state" != ACTIVE ]; then
      echo "$name is $state: creating it again"
      prepare
      on_all start "${flags[@]}"
      silent=0
    elif ((code != 255)); then
      on_all start "${flags[@]}"
      silent=0
    elif [ -n "$reached" ]; then # a connection of hours was lost
      silent=0
    elif ((++silent > 20)); then
      echo "error: $name is ACTIVE, but has not answered $silent times" >&2
      return 1
    fi
    sleep "$POLL_SECONDS"
  done
}

case $command in
  create)
    remember
    create
    ;;
  setup) setup ;;
  run)
    remember
    prepare
    on_all start "${flags[@]}" || (($? == 255)) || exit 1 # of one that is gone meanwhile `watch` takes care
    echo "started; see it with: bash launch/tpu_vm.sh logs $name"
    watch
    ;;
  resume) watch ;;
  logs) gcloud_ ssh "$name" --node=0 "--worker=$worker" --command="bash refusion_jax/launch/worker.sh logs" ;;
  delete)
    on_all stop
    gcloud_ delete "$name" --force --quiet && if [ -z "$dry_run" ]; then rm -f "$MEMORY/$name"; fi
    ;;
esac

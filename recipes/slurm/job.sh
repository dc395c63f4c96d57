# Functions that the scripts of this folder share. They source it from the project's folder: Slurm runs a copy of a batch
# script in a folder of its own, which has no other files.
# shellcheck shell=bash
set -uf -o pipefail # -f: Hydra's overrides may contain * and [

complain() { echo "error: $*" >&2; }
[ -n "${SLURM_JOB_NUM_NODES:-}" ] || { complain "this is no job of Slurm's: start it with sbatch"; exit 64; }
# Each component has its own list of nodes and its own ranks, so each would train alone.
[ "${SLURM_HET_SIZE:-1}" -le 1 ] || {
  complain "SLURM_HET_SIZE=$SLURM_HET_SIZE: a heterogeneous job can't train in one run: ask for all nodes in one" \
    "component (they may differ in GPUs: --nodes=3 --gpus=6), without ':' in sbatch's options"
  exit 64
}
# sbatch --export=NONE makes srun, too, pass nothing on, of what this script sets for its steps.
export SLURM_EXPORT_ENV=ALL

# srun, with one task on each node, which gets everything that the job has there, however many tasks the job was submitted
# with. srun would take the variables as options, and divide CPUs and GPUs among tasks that don't exist.
# --immediate: seconds until srun gives up waiting for nodes that "are busy". After a requeue Slurm may have lost one of them.
ONCE_A_NODE=(env -u SLURM_NTASKS -u SLURM_NPROCS -u SLURM_NTASKS_PER_NODE -u SLURM_CPUS_PER_TASK -u SLURM_GPUS_PER_TASK
  srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 --immediate=600)
ALL=(--nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES")
# In a job with GPUs per task, a step with fewer tasks would get fewer GPUs.
[ -z "${SLURM_GPUS_PER_TASK:-}" ] || ALL+=(--gpus=$((${SLURM_GPUS_PER_TASK##*:} * SLURM_NTASKS)))

# MINGPT_CONTAINER=image: the steps run in it. A .sif file or a docker:// address is apptainer's; all else is pyxis', whose
# options srun takes. Both see this folder, and what MINGPT_CONTAINER_MOUNTS names: FROM:TO,…
PYXIS=() WITHIN=() mounts=$PWD:$PWD${MINGPT_CONTAINER_MOUNTS:+,$MINGPT_CONTAINER_MOUNTS}
case ${MINGPT_CONTAINER:-} in
  '') ;;
  *.sif | *://*)
    WITHIN=(apptainer exec --bind "$mounts" --pwd "$PWD")
    [ "${SLURM_GPUS_ON_NODE:-0}" = 0 ] || WITHIN+=(--nv)
    WITHIN+=("$MINGPT_CONTAINER")
    ;;
  *) PYXIS=(--container-image="$MINGPT_CONTAINER" --container-mounts="$mounts" --container-workdir="$PWD") ;;
esac

step='' warned='' code=0 before=none
# By the job's id alone, Slurm may take all tasks of an array.
ME=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID} ME=${ME:-$SLURM_JOB_ID}
# This shell gets Slurm's warning before the time limit (#SBATCH --signal=B:USR1@…), and passes it to the step.
trap 'warned=1; [ -z "$step" ] || kill -USR1 "$step"' USR1

# Slurm gives all tasks of an array the same arguments. So by default each task has its own run, named by its number.
SLURM_JOB_NAME=${SLURM_JOB_NAME:-run} ITS_OWN=()
[ -z "${SLURM_ARRAY_TASK_ID:-}" ] || ITS_OWN=("run.name=${SLURM_JOB_NAME//[^[:alnum:]._-]/-}-$SLURM_ARRAY_TASK_ID")

# names_run ARGUMENT…: sets RUN to the last argument that sets the run's place or name.
names_run() {
  local word
  RUN=''
  for word; do
    case $word in run.dir=* | run.name=* | +run.dir=* | ++run.dir=* | +run.name=* | ++run.name=*) RUN=$word ;; esac
  done
  [ -n "$RUN" ]
}

# refuse_one_run_for_all ARGUMENT…: exits if the tasks of an array would share a run; each would end the others.
refuse_one_run_for_all() {
  [ -n "${SLURM_ARRAY_TASK_ID:-}" ] || return 0
  names_run "$@" || RUN='no run.name or run.dir'
  [[ $RUN == *SLURM_ARRAY_TASK_ID* || $RUN =~ (^|[^0-9])$SLURM_ARRAY_TASK_ID($|[^0-9]) ]] || {
    complain "$RUN: all tasks of this array would train in one run, and end each other: give each its own, such as" \
      "'run.name=mine-\${oc.env:SLURM_ARRAY_TASK_ID}'"
    exit 64
  }
}

# look ARGUMENT…: prints the step of the run's newest snapshot, and the run's sick hosts.
look() { # a mistake in the arguments is told later, by what trains; the time limit is near when this is asked at the end
  timeout -k 5 30 "${ONCE_A_NODE[@]}" --nodes=1 --ntasks=1 "${PYTHON[@]}" -m mingpt.launch.sick "$@" 2>/dev/null
}

# requeue [HOST…]: puts this job, or this task of an array, back into the queue, not to start on these hosts again.
requeue() {
  local IFS=,
  trap '' TERM # Slurm ends this script now, and the rest must be said
  if [ $# = 0 ]; then scontrol requeue "$ME"; return; fi
  # Slurm changes the excluded hosts of waiting jobs only. If that fails, the job stays held: it would come back for ever.
  scontrol requeuehold "$ME" && scontrol update "JobId=$ME" "ExcNodeList=$*" && scontrol release "$ME"
}

# leave_sick_hosts HOST…: if this job has some of these hosts, it goes back into the queue without them.
leave_sick_hosts() {
  local host excluded found='' known=()
  for host; do
    host=${host%%.*}
    scontrol show node "$host" >/dev/null 2>&1 || continue # of another cluster, where this run has been
    known+=("$host")
    scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -qx -- "$host" && found+=" $host"
  done
  [ -n "$found" ] || return 0
  complain "sick hosts, by run.dir/sick-hosts:$found: the job goes back into the queue, to start on others" \
    "(remove the lines of hosts that are well again)"
  excluded=$(scontrol show job "$ME" | sed -nE 's/.* ExcNodeList=([^ ]+).*/\1/p')
  [ "$excluded" != '(null)' ] || excluded=''
  requeue ${excluded:+"$excluded"} "${known[@]}" || {
    complain "Slurm did not take the list: scontrol update JobId=$ME ExcNodeList=…, then scontrol release"
    exit 70
  }
  exit 75
}

# prepare ARGUMENT…: sets PYTHON, looks for sick hosts, then runs the preflight. MINGPT_PYTHON may name a program, or the
# folder of a conda or virtual environment; otherwise recipes/setup.sh makes an environment on each node.
prepare() {
  local overrides=() word value=''
  refuse_one_run_for_all "$@"
  ONCE_A_NODE+=("${PYXIS[@]}")
  for word; do
    case $value$word in # set-up does not take the launcher's other options
      --config-dir | --config-name | --config-path | -cd | -cn | -cp) overrides+=("$word") value=value: ;;
      value:* | --config-*=* | [!-]*=* | '~'*) overrides+=("$word") value='' ;;
    esac
  done
  if [ -n "${MINGPT_CONTAINER:-}" ]; then
    PYTHON=("${WITHIN[@]}" "${MINGPT_PYTHON:-python3}")
  elif [ -n "${MINGPT_PYTHON:-}" ]; then
    PYTHON=("$MINGPT_PYTHON")
    [ ! -d "$MINGPT_PYTHON" ] || PYTHON=("$MINGPT_PYTHON/bin/python")
    [ -x "${PYTHON[0]}" ] || { complain "MINGPT_PYTHON=$MINGPT_PYTHON: there is no such program or environment"; exit 64; }
  else
    PYTHON=("$PWD/.venv/bin/python")
    # =0: each node finds a user error by itself. A signal to the others would give a higher code, which srun returns.
    "${ONCE_A_NODE[@]}" "${ALL[@]}" --kill-on-bad-exit=0 bash recipes/setup.sh "${overrides[@]}" || {
      local ended=$?
      [ $ended = 64 ] && code=64 || code=70
      complain "set-up failed (exit code $ended; the reason is above): correct that, or name an environment that is" \
        "ready: MINGPT_PYTHON"
      exit $code
    }
  fi
  export PYTHONUNBUFFERED=${PYTHONUNBUFFERED:-1} NCCL_DEBUG=${NCCL_DEBUG:-WARN}
  local sick
  # Its step must have ended before the next one begins: that would be told that the nodes are busy, and wait.
  read -r before sick <<<"$(look "$@")"
  before=${before:-unknown}
  # shellcheck disable=SC2086 # names of hosts
  leave_sick_hosts $sick
  [ "${MINGPT_PREFLIGHT:-1}" != 0 ] || return 0
  # =0: each node prints what it found, and has time limits of its own.
  "${ONCE_A_NODE[@]}" "${ALL[@]}" --kill-on-bad-exit=0 "${PYTHON[@]}" -m mingpt.preflight "$@" || {
    [ $? = 64 ] && code=64 || code=70
    complain "preflight: the nodes can't train as they are (MINGPT_PREFLIGHT=0 leaves this check out)"
    exit $code
  }
}

# run COMMAND…: runs srun and sets `code` to 0, 64, 70 or 75. srun itself returns the highest code of its tasks: 75 if one
# ended with 64 and the others were stopped because of that. So `judge` reads srun's messages about each task.
run() {
  local said interrupted
  [ -z "$warned" ] || { code=75; return; } # while the nodes were prepared
  exec {said}> >(judge)
  local judge=$!
  "$@" 2>&"$said" {said}>&- &
  step=$!
  [ -z "$warned" ] || kill -USR1 "$step"
  # A signal ends `wait`, but not the step.
  while :; do
    interrupted=$warned
    wait "$step"
    code=$?
    [ "$interrupted" != "$warned" ] || break
  done
  step=''
  exec {said}>&-
  wait "$judge"
  case $? in 1) code=70 ;; 2) code=64 ;; esac
  case $code in 0 | 64 | 70 | 75) ;; *) code=70 ;; esac
}

judge() {
  trap '' USR1
  local line crashed=0 mistake=0
  while IFS= read -r line; do
    printf '%s\n' "$line" >&2
    [[ $line =~ ^srun:\ error:\ .*\ tasks?\ [0-9,-]+:\ Exited\ with\ exit\ code\ (64|70)$ ]] || continue
    case ${BASH_REMATCH[1]} in 64) mistake=1 ;; 70) crashed=1 ;; esac
  done
  [ $mistake = 0 ] || return 2
  return $crashed
}

# finish ARGUMENT…: the job's end: `code`, or the queue again, where it was the time limit that stopped the run. The second
# time in a row that it came before a new snapshot (the first may have made the environment), going on is useless.
finish() {
  local fruitless=.no-step-$SLURM_JOB_ID now=unknown _
  if [ "$code" = 75 ] && [ -n "$warned" ]; then
    # none: the warning came before this job had looked. unknown: the store did not answer.
    [ "$before" = none ] || read -r now _ <<<"$(look "$@")"
    if [ "$before" != none ] && { [ "$before" = unknown ] || [ "${now:-unknown}" != "$before" ]; }; then
      rm -f "$fruitless"
    elif [ -e "$fruitless" ]; then
      rm -f "$fruitless"
      complain "the time limit came before the first new snapshot, twice: submit again with a longer --time (now" \
        "$(squeue -h -j "$ME" -o %l))"
      exit 64
    else
      : >"$fruitless"
    fi
    ! requeue || echo "slurm: stopped for the time limit; back in the queue, to go on from the snapshot"
  else
    rm -f "$fruitless"
  fi
  exit "$code"
}

# launch_on_all ARGUMENT…: runs mingpt.launch on each node, which starts one process per GPU.
launch_on_all() {
  names_run "$@" || set -- "$@" "${ITS_OWN[@]}"
  prepare "$@"
  run "${ONCE_A_NODE[@]}" "${ALL[@]}" "${PYTHON[@]}" -m mingpt.launch "$@"
  finish "$@"
}

# train_as_tasks ARGUMENT…: runs mingpt.train as each of the job's tasks, without torchrun.
train_as_tasks() {
  names_run "$@" || set -- "$@" "${ITS_OWN[@]}"
  prepare "$@"
  run srun --kill-on-bad-exit=1 "${PYXIS[@]}" ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
    "${PYTHON[@]}" -m mingpt.train "$@"
  finish "$@"
}

#!/bin/bash
# Trains on one node or many under Slurm, and goes on after the time limit, a crash or a lost node until the run is done.
#
#   sbatch --nodes=8 scripts/slurm/train.sh model=ngpt scale=1b data=openwebtext run.root=/shared/runs run.name=ngpt-1b
#
# Arguments are those of `train`. run.root and run.name are required, and every node must see run.root. Options of sbatch
# before the script replace the lines below. Variables that change what happens (sbatch --export=ALL,NAME=VALUE):
#
#   PYTHON         the interpreter, by default `python`
#   GPUS           processes on each node, by default Slurm's SLURM_GPUS_ON_NODE
#   CONTAINER      an image for pyxis; MOUNTS are its --container-mounts
#   MAX_RESTARTS   starts by torchrun after a crash, by default 3; MAX_REQUEUES by Slurm, by default 20
#
#SBATCH --job-name=ngpt
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -euo pipefail

value_of() { # KEY ARGUMENT...: the value of the last KEY=VALUE
  local key=$1 argument found=
  shift
  for argument in "$@"; do
    [[ $argument == "$key="* ]] && found=${argument#*=}
  done
  echo "$found"
}

root=$(value_of run.root "$@")
name=$(value_of run.name "$@")
if [[ -z $root || -z $name ]]; then
  echo "train.sh: give run.root=DIRECTORY, which all nodes see, and run.name=NAME: a job that starts again needs them" >&2
  exit 2
fi
end="${root/#\~/$HOME}/$name/exit.json"

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
gpus=${GPUS:-${SLURM_GPUS_ON_NODE:-1}}

# A new store for each start of the processes: gloo connects to the dead ones otherwise.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} PYTHONFAULTHANDLER=1
mkdir -p "${root/#\~/$HOME}"
export NGPT_TRAIN_END="${root/#\~/$HOME}/.end-of-job-$SLURM_JOB_ID.json"
export NCCL_DEBUG=${NCCL_DEBUG:-WARN} TORCH_NCCL_ASYNC_ERROR_HANDLING=1

step=(srun --kill-on-bad-exit=1 --ntasks-per-node=1)
if [[ -n ${CONTAINER:-} ]]; then
  step+=(--container-image="$CONTAINER" ${MOUNTS:+--container-mounts="$MOUNTS"})
fi
# After SIGTERM the ranks end their step and save: 240 seconds of the 300 that --signal leaves.
torchrun=("${PYTHON:-python}" -m torch.distributed.run
  --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$gpus"
  --rdzv-backend=c10d --rdzv-endpoint="$head:$port" --rdzv-id="slurm-$SLURM_JOB_ID"
  --max-restarts="${MAX_RESTARTS:-3}" --shutdown-timeout=240)

out_of_time=
stop() {
  out_of_time=yes
  echo "train.sh: the time limit is near; the run saves and goes on in the next start"
  # To the steps and not to this shell.
  scancel --signal=TERM "$SLURM_JOB_ID"
}
trap stop USR1

echo "train.sh: start $((${SLURM_RESTART_COUNT:-0} + 1)) of job $SLURM_JOB_ID on $SLURM_JOB_NUM_NODES nodes, $gpus processes each"
before=$(stat -c %Y.%i "$end" 2> /dev/null || true)
"${step[@]}" "${torchrun[@]}" -m ngpt_train train "$@" &
code=0
wait $! || code=$?
while [[ -n $out_of_time ]] && kill -0 $! 2> /dev/null; do # a signal ends `wait` before the step ends
  code=0
  wait $! || code=$?
done

# torchrun hides the exit codes of its processes. exit.json has the one that came first, and NGPT_TRAIN_END that of a
# start which ended before it had the run's directory.
ended='' reason=''
if [[ -f $NGPT_TRAIN_END ]]; then
  ended=$(sed -n 's/^ *"code": \([0-9]*\),*$/\1/p' "$NGPT_TRAIN_END")
  reason=$(sed -n 's/^ *"message": "\(.*\)",*$/\1/p' "$NGPT_TRAIN_END")
  rm -f "$NGPT_TRAIN_END"
elif [[ -f $end && $(stat -c %Y.%i "$end") != "$before" ]]; then
  ended=$(sed -n 's/^ *"code": \([0-9]*\),*$/\1/p' "$end")
  reason=$(sed -n 's/^ *"reason": "\(.*\)",*$/\1/p' "$end")
fi
if [[ $code == 0 && $reason != stopped* ]]; then
  echo "train.sh: ${reason:-nothing to do}"
  exit 0
fi
if [[ $ended == [234] ]]; then
  echo "train.sh: not started again, because it would end as before (exit code $ended): $reason" >&2
  exit "$ended"
fi
if [[ $ended == 0 && $reason == stopped* && $reason != *max_time* && -z $out_of_time ]]; then
  echo "train.sh: $reason, and not by the time limit; the same sbatch goes on"
  exit 0
fi
if ((${SLURM_RESTART_COUNT:-0} >= ${MAX_REQUEUES:-20})); then
  echo "train.sh: not queued again after ${SLURM_RESTART_COUNT} times (MAX_REQUEUES): ${reason:-no exit.json}" >&2
  exit 1
fi
echo "train.sh: queued again: ${reason:-the processes ended without a word (code $code)}"
scontrol requeue "$SLURM_JOB_ID"

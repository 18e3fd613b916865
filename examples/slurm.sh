#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
# A run of one task per GPU, that is queued again until it is done: sbatch slurm.sh python -m zstore train --save s3://bucket/run ...
#
# 120 seconds before the time is over, and before a preemption, this script gets SIGTERM and passes it on: all ranks save and
# stop with code 75. Then the job is queued again, up to 20 times after other ends. A second SIGTERM ends the ranks at once.
export WORLD_SIZE=$SLURM_NTASKS MASTER_PORT=${MASTER_PORT:-29500}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR

# With 0, a rank that is still saving is not killed since another one has ended.
srun --kill-on-bad-exit=0 bash -c \
  'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=${SLURM_TASKS_PER_NODE%%[^0-9]*} exec "$@"' rank "$@" &
ranks=$!
trap 'kill -TERM "$ranks"' TERM
wait "$ranks"
code=$?
# A signal interrupts `wait`, and srun goes on.
while kill -0 "$ranks" 2> /dev/null; do
  wait "$ranks"
  code=$?
done

# srun's code is the greatest of its tasks': 75 says that none failed.
if [ "$code" -eq 75 ] || { [ "$code" -ne 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; }; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"

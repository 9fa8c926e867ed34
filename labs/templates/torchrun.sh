#!/usr/bin/env bash
# One lab on all GPUs of this machine, or on several machines that can reach each other.
# Usage:
#   labs/templates/torchrun.sh baseline --scale gpu
#   NODES=4 NODE=0 MASTER=first-machine:29500 labs/templates/torchrun.sh muon --scale cluster      (on each, NODE=0..3)
#
# PROCESSES: processes on this machine (default: its number of GPUs, or 2 without one).
set -euo pipefail

if [ $# -lt 1 ] || [ "$1" = "-h" ] || [ "$1" = "--help" ]; then
  sed -n '2,7s/^# \{0,1\}//p' "$0"
  exit $(( $# < 1 ))
fi

cd "$(dirname "$0")/../.."
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
lab=$1
shift
if [ ! -f "labs/$lab/run.py" ]; then
  echo "error: there is no lab '$lab'; 'python -m labs list' shows the labs" >&2
  exit 2
fi

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
processes=${PROCESSES:-$(( gpus > 0 ? gpus : 2 ))}
if [ "${NODES:-1}" -gt 1 ]; then
  : "${NODE:?set NODE to this machine\'s number, 0 to NODES-1}" "${MASTER:?set MASTER to host:port of machine 0}"
  where=(--nnodes "$NODES" --node-rank "$NODE" --rdzv-backend static --master-addr "${MASTER%:*}" --master-port "${MASTER##*:}")
else
  where=(--standalone)
fi

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m torch.distributed.run "${where[@]}" --nproc-per-node "$processes" -m "labs.$lab.run" "$@"

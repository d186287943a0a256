#!/usr/bin/env bash
# The whole way on this machine's CPU: profile, solve, verify, train by the plan in four processes, and compare with one.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1

steps=${DEMO_STEPS:-30}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

run() {
  printf '\n$ %s\n' "$*"
  local started=$SECONDS
  "$@"
  printf '# %d s\n' $((SECONDS - started))
}

run planner profile examples/gpt/model.py --device cpu -o profiles/gpt.json
run planner solve --gpus 4 --profile profiles/gpt.json -o plan.py
run planner explain plan.py
run planner verify plan.py
run torchrun --nproc-per-node 4 examples/gpt/train.py --plan plan.py --steps "$steps" --losses "$work/plan.json"
run python examples/gpt/train.py --single --steps "$steps" --losses "$work/single.json"
run python examples/gpt/compare.py "$work/plan.json" "$work/single.json"

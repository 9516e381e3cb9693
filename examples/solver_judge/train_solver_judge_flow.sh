#!/usr/bin/env bash
# The solver-judge recipe with LoRA, in verl's spelling. More key=value arguments follow: bash train_solver_judge_flow.sh trainer.total_steps=50
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

"${PYTHON:-python3}" "$here/train_solver_judge_flow.py" \
    data.train_batch_size=16 \
    actor_rollout_ref.model.lora_rank=8 \
    actor_rollout_ref.model.lora_alpha=8 \
    actor_rollout_ref.model.target_modules=all-linear \
    actor_rollout_ref.rollout.n=4 \
    algorithm.adv_estimator=grpo \
    "$@"

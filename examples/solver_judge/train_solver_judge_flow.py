"""Train the solver-judge flow. Any `key=value` follows, in rllm's or verl's spelling:

python examples/solver_judge/train_solver_judge_flow.py actor_rollout_ref.model.lora_rank=32 trainer.total_steps=50
"""

from __future__ import annotations

import sys

from solver_judge_flow import DEFAULTS, solver_judge, solver_judge_evaluator, train_dataset, val_dataset

import rllm


def main() -> None:
    resolved = rllm.load_config(overrides=sys.argv[1:], defaults=DEFAULTS)
    rllm.AgentTrainer(
        agent_flow=solver_judge,
        evaluator=solver_judge_evaluator,
        config=resolved,
        train_dataset=train_dataset(resolved.config),
        val_dataset=val_dataset(resolved.config),
    ).train()


if __name__ == "__main__":
    rllm.run_cli(main)

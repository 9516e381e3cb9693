"""What verl's own functions answer on 1,000 random ragged batches, for `tests/algorithms/test_against_verl.py`.

Run in an environment that has verl (0.9.1 was used): ``python make_verl_reference.py`` writes `verl_outputs.npz` beside this
file. Only outputs are stored: inputs come from fixed seeds (`batches`), which the test draws again. All in float64, stored as float32.
Gradients are stored as their dot product with a random vector of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

OUTPUTS = Path(__file__).parent / "verl_outputs.npz"
N_BATCHES = 1000
ADVANTAGES = ("grpo", "grpo_no_std", "rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
LOSSES = ("ppo_clip", "gspo", "cispo", "dro", "reinforce")
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL = ("k1", "k2", "k3", "k1+", "k3+")


@dataclass(frozen=True)
class Batch:
    """Rows of several groups. All arrays are [rows] or [rows, width]; `mask` has holes, and `loss_mask` rows without a token too."""

    groups: np.ndarray
    rewards: np.ndarray
    mask: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    old: np.ndarray
    ref: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray | None
    probe: np.ndarray
    clip_low: float
    clip_high: float
    clip_c: float
    norm: float
    beta: float


def batches(n: int = N_BATCHES) -> Iterator[Batch]:
    """The same `n` batches every time."""
    for seed in range(n):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(1, 6, size=rng.integers(1, 5))
        if sizes.sum() < 2:
            sizes = np.array([2])
        groups = np.repeat(np.arange(len(sizes)), sizes)
        rows, width = len(groups), int(rng.integers(2, 9))
        kind = seed % 3
        rewards = (
            rng.integers(0, 2, rows).astype(float) if kind == 0 else rng.normal(size=rows) * 10.0 ** rng.integers(-2, 3)
        )
        if kind == 2:  # one group whose rewards are all equal
            rewards[groups == 0] = rewards[0]
        order = rng.permutation(rows)
        lengths = rng.integers(1, width + 1, rows)
        mask = (np.arange(width) < lengths[:, None]) & (rng.random((rows, width)) < 0.8)
        mask[np.arange(rows), lengths - 1] = True
        loss_mask = mask & (rng.random(rows) < 0.8)[:, None]
        loss_mask[0] = mask[0]
        old = -rng.exponential(1.5, (rows, width))
        jump = rng.choice([0.02, 0.3, 1.5])
        logprobs = old + np.clip(rng.normal(size=(rows, width)) * jump, -6, 6)
        yield Batch(
            groups=groups[order],
            rewards=rewards[order],
            mask=mask,
            loss_mask=loss_mask,
            logprobs=logprobs,
            old=old,
            ref=logprobs + np.clip(rng.normal(size=(rows, width)) * 0.7, -2, 2),
            advantages=np.repeat(rng.normal(size=(rows, 1)), width, axis=1),
            weights=rng.uniform(0, 2, (rows, width)) if seed % 2 else None,
            probe=rng.normal(size=(rows, width)),
            clip_low=float(rng.uniform(0.01, 0.4)),
            clip_high=float(rng.uniform(0.01, 0.4)),
            clip_c=float(rng.choice([1.5, 3.0, 10.0])),
            norm=float(rng.integers(1, 50)),
            beta=float(rng.uniform(0.01, 1.0)),
        )


def advantages_of(batch: Batch) -> dict[str, np.ndarray]:
    """One advantage a row [rows], by estimator."""
    import torch
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos

    mask = torch.tensor(batch.mask, dtype=torch.float64)
    last = batch.mask.shape[1] - 1 - np.argmax(batch.mask[:, ::-1], axis=1)
    rows = np.arange(len(last))
    result = {}
    for name in ADVANTAGES:
        rewards = torch.zeros_like(mask)
        rewards[rows, last] = torch.tensor(batch.rewards)
        more = {} if name == "reinforce_plus_plus" else {"index": batch.groups}
        if name.startswith("grpo"):
            more["norm_adv_by_std_in_grpo"] = name == "grpo"
        fn = core_algos.get_adv_estimator_fn(name.removesuffix("_no_std"))
        advantages, _ = fn(token_level_rewards=rewards, response_mask=mask, config=AlgoConfig(gamma=1.0), **more)
        result[name] = advantages.numpy()[rows, last]
        assert np.allclose(advantages.numpy(), result[name][:, None] * batch.mask), name
    return result


def losses_of(batch: Batch) -> np.ndarray:
    """(aggregated loss, probed gradient) [losses, aggregations, 2]."""
    import torch
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        use_dynamic_bsz=True,
        clip_ratio_low=batch.clip_low,
        clip_ratio_high=batch.clip_high,
        clip_ratio_c=batch.clip_c,
        policy_loss=PolicyLossConfig(dro_beta=batch.beta),
        global_batch_info={"loss_scale_factor": batch.norm},
    )
    mask, probe = torch.tensor(batch.loss_mask, dtype=torch.float64), torch.tensor(batch.probe)
    old, advantages = torch.tensor(batch.old), torch.tensor(batch.advantages)
    weights = None if batch.weights is None else torch.tensor(batch.weights)
    result = np.zeros((len(LOSSES), len(AGGREGATIONS), 2))
    for i, name in enumerate(LOSSES):
        fn = (
            core_algos.compute_policy_loss_reinforce
            if name == "reinforce"
            else core_algos.get_policy_loss_fn("vanilla" if name == "ppo_clip" else name)
        )
        for j, mode in enumerate(AGGREGATIONS):
            logprobs = torch.tensor(batch.logprobs, requires_grad=True)
            given = {"rollout_log_prob": old} if name == "reinforce" else {"old_log_prob": old}
            loss, _ = fn(
                **given,
                log_prob=logprobs,
                advantages=advantages,
                response_mask=mask,
                loss_agg_mode=mode,
                config=config,
                rollout_is_weights=weights,
            )
            (gradient,) = torch.autograd.grad(loss, logprobs)
            result[i, j] = loss.item(), (gradient * probe).sum().item()
    return result


def kl_of(batch: Batch) -> np.ndarray:
    """(sum over the mask, probed gradient) [KL, 2]."""
    import torch
    from verl.trainer.ppo import core_algos

    mask, probe, ref = torch.tensor(batch.mask), torch.tensor(batch.probe), torch.tensor(batch.ref)
    result = np.zeros((len(KL), 2))
    for i, name in enumerate(KL):
        logprobs = torch.tensor(batch.logprobs, requires_grad=True)
        total = (core_algos.kl_penalty(logprobs, ref, name) * mask).sum()
        (gradient,) = torch.autograd.grad(total, logprobs)
        result[i] = total.item(), (gradient * probe).sum().item()
    return result


def main() -> None:
    import verl

    drawn = list(batches())
    advantages = [advantages_of(batch) for batch in drawn]
    outputs = {f"advantages/{name}": np.concatenate([a[name] for a in advantages]) for name in ADVANTAGES}
    outputs["losses"] = np.stack([losses_of(batch) for batch in drawn])
    outputs["kl"] = np.stack([kl_of(batch) for batch in drawn])
    stored = {name: values.astype(np.float32) for name, values in outputs.items()}
    np.savez_compressed(OUTPUTS, version=np.array(verl.__version__), **stored)
    print(f"{OUTPUTS}: {OUTPUTS.stat().st_size / 1e3:.0f} kB from verl {verl.__version__}")


if __name__ == "__main__":
    main()

"""The reference cases: values worked out by hand or taken from public reports, each checked with our own function for its kind.

`RLLM_CASES` names another file of the same form. A kind without a function here fails.
"""

import json
import math
import os
import tempfile
from pathlib import Path

import pytest
import torch
from tiny_models import build, random_adapter
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import Qwen3Config, Qwen3ForCausalLM

import rllm
from rllm.algorithms.advantages import returns, whiten
from rllm.algorithms.datums import build_datums
from rllm.algorithms.grouping import Accounting, group_by_role, usable_trajectories
from rllm.algorithms.losses import Tokens, kl_terms, token_loss, token_weights
from rllm.algorithms.metrics import pass_at_k as unbiased_pass_at_k
from rllm.algorithms.spec import LossSpec
from rllm.backends.base import AdamParams, SamplingParams
from rllm.backends.local.learner import Learner
from rllm.backends.local.loading import load_decoder
from rllm.backends.local.model import FusedLinear
from rllm.backends.local.sampling import BatchParams, sample
from rllm.config.schema import LoraSettings
from rllm.errors import ConfigError
from rllm.lora.adapter import LoraAdapter
from rllm.lora.match import adapted_modules, match_modules
from rllm.types import Episode, Step, TerminationReason, Trajectory

FILE = Path(os.environ.get("RLLM_CASES") or Path(__file__).parent / "reference" / "cases.json")
CASES = json.loads(FILE.read_text())
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def std_of(given):
    if not given.get("normalize_std", True):
        return "none"
    return {1: "sample", 0: "population"}[given.get("ddof", 1)]


def advantages_of(given, roles):
    """(advantages by role, None where not trained; accounting) of one task whose trajectories have `roles`' rewards."""
    episodes = []
    for role, rewards in roles.items():
        for reward in rewards:
            step = Step(prompt_ids=[1], response_ids=[2], logprobs=[-1.0])
            trajectory = Trajectory(name=role, steps=[step], reward=reward)
            episodes.append(Episode("t:0", None, [trajectory], TerminationReason.ENV_DONE))
    account = Accounting()
    groups = group_by_role(usable_trajectories(episodes, account))
    build_datums(groups, account, estimator=given["estimator"], std=std_of(given))
    account.check()
    found = {role: [] for role in roles}
    for episode in episodes:
        found[episode.trajectories[0].role].append(episode.trajectories[0].steps[0].advantage)
    return found, account


def group_advantage(given):
    advantages, dropped, std = {}, {}, None
    for name, rewards in given["groups"].items():
        found, account = advantages_of(given, {name: rewards})
        advantages[name] = [value or 0.0 for value in found[name]]
        if account.failed["no_reward"] == len(rewards):
            dropped[name] = "all_failed"
        elif account.dropped:
            (dropped[name],) = account.dropped
        else:
            std = (rewards[0] - math.fsum(rewards) / len(rewards)) / (found[name][0] or math.nan)
    nan = any(math.isnan(a) for values in advantages.values() for a in values)
    return {"advantages": advantages, "dropped": dropped, "nan": nan, "std": std}


def role_advantage(given):
    roles = {}
    for episode in given["episodes"]:
        for role, rewards in episode.items():
            roles.setdefault(role, []).extend(rewards)
    return advantages_of(given, roles)[0]


def reward_compose(given):
    rewards = [rllm.combine_rewards(row, given["weights"]) for row in given["components"]]
    return {"rewards": rewards, "failed": [i for i, reward in enumerate(rewards) if reward is None]}


def discounted_return(given):
    return {"returns": returns(given["turn_rewards"], given["gamma"])}


def batch_whiten(given):
    return {"values": whiten(given["values"], std=std_of(given))}


def clip_spec(name, given):
    return LossSpec(name, given["eps_low"], given["eps_high"], given.get("dual_clip") or 0.0)


def ppo_clip(given):
    logprobs = doubles(given["ratio"]).log().requires_grad_()
    tokens = Tokens(logprobs, torch.zeros_like(logprobs), doubles(given["advantage"]), torch.arange(len(logprobs)))
    loss, statistics = token_loss(clip_spec("ppo_clip", given), tokens)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return {
        "loss": loss.tolist(),
        "grad_wrt_logp": gradient.tolist(),
        "clip_fraction": statistics["clip_fraction"].mean().item(),
    }


def gspo(given):
    rows = [i for i, seq in enumerate(given["seqs"]) for _ in seq["log_ratio"]]
    log_ratio = doubles([value for seq in given["seqs"] for value in seq["log_ratio"]])
    advantages = doubles([seq["advantage"] for seq in given["seqs"] for _ in seq["log_ratio"]])
    tokens = Tokens(log_ratio, torch.zeros_like(log_ratio), advantages, torch.tensor(rows))
    loss, statistics = token_loss(clip_spec("gspo", given), tokens)
    counts = [len(seq["log_ratio"]) for seq in given["seqs"]]
    first = [sum(counts[:i]) for i in range(len(counts))]
    per_seq = [part.mean().item() for part in loss.split(counts)]
    return {"ratio": statistics["ratio"][first].tolist(), "loss_per_seq": per_seq}


def aggregate(rows, norm, modes=AGGREGATIONS):
    """Token losses of each row, in every mode, as one number."""
    result = {}
    for mode in modes:
        weights = token_weights(LossSpec(aggregation=mode, norm=norm), [len(row) for row in rows])
        result[mode] = math.fsum(w * math.fsum(row) for w, row in zip(weights, rows, strict=True))
    return result


def loss_aggregate(given):
    masked = zip(given["token_loss"], given["mask"], strict=True)
    rows = [[value for value, m in zip(row, mask, strict=True) if m] for row, mask in masked]
    return aggregate(rows, given["norm_const"])


def grpo_loss_e2e(given):
    found, _ = advantages_of({"estimator": "grpo"} | given, {"r": given["rewards"]})
    rows = []
    for advantage, n in zip(found["r"], given["lengths"], strict=True):
        logprobs = torch.full((n,), math.log(given["ratio"]), dtype=torch.float64)
        tokens = Tokens(
            logprobs, torch.zeros_like(logprobs), torch.full_like(logprobs, advantage), torch.zeros(n).long()
        )
        rows.append(token_loss(LossSpec(), tokens)[0].tolist())
    return aggregate(rows, given["norm_const"])


def loss_with_kl(given):
    row = [pg + given["beta"] * kl for pg, kl in zip(given["pg"], given["kl"], strict=True)]
    return {"loss": aggregate([row], None, [given["mode"]])[given["mode"]]}


def kl_estimators(given):
    logprob, reference = doubles([given["logp"]]).requires_grad_(), doubles([given["ref_logp"]])
    values, gradients = {}, {}
    for name in ("k1", "k2", "k3"):
        term = kl_terms(logprob, reference, name)
        values[name] = term.item()
        gradients[name] = torch.autograd.grad(term.sum(), logprob)[0].item()
    return values | {"grad_wrt_logp": gradients}


def kl_expectation(given):
    policy, reference = doubles(given["policy"]), doubles(given["ref"])
    exact = torch.nn.functional.kl_div(reference.log(), policy, reduction="sum").item()
    means = {f"E_{k}": (policy * kl_terms(policy.log(), reference.log(), k)).sum().item() for k in ("k1", "k2", "k3")}
    return {"exact": exact} | means


def importance_weights(given):
    from rllm.algorithms import correction

    differences, cap = given["train_minus_rollout_logp"], given.get("cap") or given.get("high")

    def weights(level, mode, cap):
        return correction.importance_weights(differences, level=level, mode=mode, cap=cap, floor=given.get("low"))

    if "mode" in given:
        level, mode = given["mode"].split("_")
        found = weights(level, mode, cap)
        return {"weights": found, "loss_token_mean_A1_ratio1": -math.fsum(found) / len(found)}
    return {
        "sequence_product": weights("sequence", "truncate", math.inf)[0],
        "sequence_truncate": weights("sequence", "truncate", cap)[0],
        "sequence_mask": weights("sequence", "mask", cap)[0],
        "geometric_mean": weights("geometric", "truncate", math.inf)[0],
    }


def effective_sample_size(given):
    from rllm.algorithms import correction

    ess = correction.effective_sample_size(given["weights"])
    return {"ess": ess, "ess_fraction": ess / len(given["weights"])}


def temperature_logp(given):
    """The sampler's log-probability of the token that it draws."""
    logits = doubles([given["logits"]])
    below = torch.softmax(logits / given["temperature"], -1)[0, : given["token"]].sum()

    def logprob(temperature):
        params = BatchParams.of([SamplingParams(1, temperature=temperature)], len(given["logits"]), torch.device("cpu"))
        ids, logprobs = sample(logits, params, doubles([below.item() + 1e-6]))
        assert ids.item() == given["token"]
        return logprobs.item()

    tempered, plain = logprob(given["temperature"]), logprob(1.0)
    return {"logp_T": tempered, "logp_1": plain, "ratio_if_one_side_forgets": math.exp(plain - tempered)}


def token_stitch(given):
    try:
        steps = [Step(prompt_ids=t["prompt"], response_ids=t["completion"], logprobs=t["logp"]) for t in given["turns"]]
    except ValueError as error:
        return {"error": "logprob_length_mismatch" if "one log-probability per response token" in str(error) else error}
    account = Accounting()
    episode = Episode("t:0", None, [Trajectory(steps=steps, reward=1.0)], TerminationReason.ENV_DONE)
    groups = group_by_role(usable_trajectories([episode], account))
    rows = build_datums(groups, account, estimator="reinforce")
    account.check()
    return {
        "segments": [{"tokens": r.ids, "mask": r.mask, "logp": r.logprobs} for r in rows],
        "divergence": None if len(rows) <= 1 else len(rows),
        "trainable_tokens": sum(r.n_trained for r in rows),
        "reason": {"no_tokens": "empty_completion"}.get(next(iter(account.dropped), "")),
    }


def soft_overlong(given):
    from rllm.algorithms import filters

    return {"penalty": [filters.soft_overlong(n, given["max_len"], given["cache_len"]) for n in given["lengths"]]}


def pass_at_k(given):
    return {"pass_at_k": unbiased_pass_at_k(given["n"], given["correct"], given["k"])}


def grad_clip(given):
    """What AdamW is given to step with, in a real learner."""
    with tempfile.TemporaryDirectory() as folder:
        build("qwen3", Path(folder))
        decoder = load_decoder(Path(folder))
    adapter = random_adapter(decoder)
    first = next(iter(adapter.parameters()))
    first.grad = torch.zeros_like(first)
    entries = first.grad.view(-1)[: len(given["grads"])]
    entries.copy_(torch.tensor(given["grads"]))
    clipped = []
    hook = register_optimizer_step_pre_hook(lambda *_: clipped.extend(entries.tolist()))
    metrics = Learner(decoder, {"default": adapter}).optim_step(AdamParams(1e-3, grad_clip=given["max_norm"]))
    hook.remove()
    return {"reported_norm": metrics["grad_norm"], "clipped": clipped}


def one_layer(given):
    """(adapter over the single module ``m`` with the case's matrices, frozen linear layer)"""
    a, b = torch.tensor(given["A"]), torch.tensor(given["B"])
    shape = (a.shape[1], b.shape[0])
    adapter = LoraAdapter(
        {"m": shape}, ["m"], {(0, "m"): [("m", shape[1])]}, rank=given["r"], alpha=given["alpha"], seed=0
    )
    adapter.set_matrices("m", a, b, given["alpha"] / given["r"])
    linear = FusedLinear(shape[1], shape[0], False, torch.float32, "cpu")
    linear.weight.data = torch.tensor(given.get("W", torch.zeros(shape[1], shape[0]).tolist()))
    return adapter, linear


def lora_forward(given):
    adapter, linear = one_layer(given)
    x = torch.tensor([given["x"]])
    pair = adapter.pairs(torch.float32).pair(0, "m")
    assert pair is not None
    with torch.no_grad():
        sampled = linear(x, pair)[0].tolist()
    assert linear(x, pair)[0].tolist() == pytest.approx(sampled)  # training takes another way
    return {"scale": adapter.scales["m"], "y": sampled, "merged_W": (linear.weight + pair[1] @ pair[0]).tolist()}


def lora_grad(given):
    adapter, linear = one_layer(given)
    x = torch.tensor([given["x"]])
    y = linear(x, adapter.pairs(torch.float32).pair(0, "m"))
    y.backward(torch.tensor([given["dL_dy"]]))
    a, b = adapter.matrices("m")
    return {"dA": a.grad.tolist(), "dB": b.grad.tolist(), "delta_y": (y - linear(x))[0].tolist()}


def lora_scale(given):
    def scale(rank, alpha, rslora):
        layout = {(0, "m"): [("m", 2)]}
        return LoraAdapter({"m": (2, 2)}, ["m"], layout, rank=rank, alpha=alpha, seed=0, rslora=rslora).scales["m"]

    return {
        "alpha_over_r": [scale(rank, alpha, False) for rank, alpha in given["pairs"]],
        "rslora_alpha_over_sqrt_r": [scale(rank, alpha, True) for rank, alpha in given["pairs"]],
    }


def lora_param_count(given):
    config = Qwen3Config(
        hidden_size=given["hidden"],
        intermediate_size=given["intermediate"],
        num_hidden_layers=given["layers"],
        num_attention_heads=given["q_out"] // 128,
        num_key_value_heads=given["kv_out"] // 128,
        head_dim=128,
    )
    with torch.device("meta"):
        modules = dict(Qwen3ForCausalLM(config).named_modules())
    shapes = {name: (m.in_features, m.out_features) for name, m in modules.items() if isinstance(m, torch.nn.Linear)}
    counts = []
    for rank in given["ranks"]:
        adapted = adapted_modules(list(shapes), LoraSettings(rank=rank, target_modules=given["target"]))
        layout = {(i, "m"): [(name, shapes[name][1])] for i, name in enumerate(adapted)}
        counts.append(LoraAdapter(shapes, adapted, layout, rank=rank, alpha=8, seed=0).parameter_count())
    return {"trainable": counts}


def module_match(given):
    try:
        matched = match_modules(given["modules"], given["target_modules"], given["exclude_modules"])
    except ConfigError as error:
        text = str(error)
        named = [target for target in given["target_modules"] if repr(target) in text]
        return {
            "error": "unknown_target",
            "unknown": named,
            "suggest": text.partition("did you mean '")[2].partition("'")[0],
        }
    return {"matched": matched, "error": None}


KINDS = {
    fn.__name__: fn
    for fn in (
        *(group_advantage, role_advantage, reward_compose, discounted_return, batch_whiten),
        *(ppo_clip, gspo, loss_aggregate, grpo_loss_e2e, loss_with_kl, kl_estimators, kl_expectation),
        *(importance_weights, effective_sample_size, temperature_logp, token_stitch),
        *(soft_overlong, pass_at_k, grad_clip, lora_forward, lora_grad, lora_scale, lora_param_count, module_match),
    )
}


def check(found, expected, tolerance, where):
    """`found` has everything of `expected`; a key ``wrong_if_...`` holds what a common bug would give."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            if not key.startswith("wrong_if_"):
                check(found[key], value, tolerance, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), (where, found, expected)
        for i, value in enumerate(expected):
            check(found[i], value, tolerance, f"{where}[{i}]")
    elif isinstance(expected, float) or (isinstance(expected, int) and not isinstance(expected, bool)):
        assert abs(found - expected) <= tolerance, (where, found, expected)
    else:
        assert found == expected, (where, found, expected)


@pytest.mark.parametrize("case", [pytest.param(c, id=c["id"]) for c in CASES])
def test_case(case):
    assert case["kind"] in KINDS, f"no function for the kind {case['kind']!r}"
    check(KINDS[case["kind"]](case["input"]), case["expected"], case["tolerance"], case["id"])


def test_a_wrong_value_does_not_pass_the_check():
    for wrong in ({"a": [1.0, 2.1]}, {"a": [1.0]}, {"a": [1.0, math.nan]}):
        with pytest.raises(AssertionError):
            check(wrong, {"a": [1.0, 2.0]}, 1e-6, "case")

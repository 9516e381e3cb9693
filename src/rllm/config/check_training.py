"""Fields of the update, the filters and the end of a run that do not go together, and notes on what they cost or leave undone.

Knows the config tree only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rllm.config.names import GROUP_RELATIVE, LOSS_OPTIONS, WITHIN_GROUP
from rllm.config.schema import Config, EarlyStopConfig, OptimConfig
from rllm.config.schema_algorithm import (
    AlgorithmConfig,
    FilterConfig,
    RejectionSamplingConfig,
    RolloutCorrectionConfig,
)
from rllm.config.section import not_default

Refuse = Callable[[str, str], Exception]


def check_training(config: Config, refuse: Refuse) -> None:
    """Raise what `refuse(key, message)` makes of the first thing that cannot be done."""
    _check_start(config, refuse)
    _check_reference(config, refuse)
    _check_precomputed(config.algorithm, refuse)
    _check_steps(config.algorithm, refuse)
    _check_correction(config.algorithm, refuse)
    _check_lengths(config, refuse)
    _check_rewards(config, refuse)
    _check_early_stop(config, refuse)
    _check_overlap(config, refuse)


def _check_start(config: Config, refuse: Refuse) -> None:
    if config.lora.adapter_path and not config.lora.trains_adapters:
        raise refuse(
            "lora.adapter_path",
            f"lora.adapter_path={config.lora.adapter_path} with lora.rank=0: full fine-tuning has no adapter to go on from; set lora.rank to "
            "that of the adapter, or leave the path out (rllm merge makes a model of both)",
        )


def _check_reference(config: Config, refuse: Refuse) -> None:
    a = config.algorithm
    key = "algorithm.kl_beta" if a.kl_beta else "algorithm.kl_in_reward"
    weight = a.kl_beta or a.kl_in_reward
    if a.reference == "none" and weight:
        raise refuse(
            "algorithm.reference",
            f"algorithm.reference=none with {key}={weight:g}: a KL needs a reference policy; set it to base or initial_adapter, or "
            f"{key}=0",
        )
    if a.reference == "initial_adapter" and not config.lora.trains_adapters:
        raise refuse(
            "algorithm.reference",
            "algorithm.reference=initial_adapter with lora.rank=0: full fine-tuning has no adapter; base is the weights that training "
            "started from",
        )


def _check_precomputed(a: AlgorithmConfig, refuse: Refuse) -> None:
    """Where no advantage is made of a reward, what changes rewards or looks at them would do nothing, or throw away what teaches."""
    if a.adv_estimator != "precomputed":
        return
    why = "algorithm.adv_estimator=precomputed: no advantage is made from the reward"
    if a.kl_in_reward:
        raise refuse(
            "algorithm.kl_in_reward",
            f"algorithm.kl_in_reward={a.kl_in_reward:g} with {why}; use algorithm.kl_beta, the KL term of the loss",
        )
    if a.overlong_buffer:
        raise refuse(
            "algorithm.overlong_buffer",
            f"algorithm.overlong_buffer={a.overlong_buffer} with {why}; set it to 0, and take the penalty off Step.advantage",
        )
    if a.rejection_sampling.enable:
        raise refuse(
            "algorithm.rejection_sampling.enable",
            f"algorithm.rejection_sampling.enable=true with {why}, and it throws groups of equal rewards away; set it to false",
        )


def _check_steps(a: AlgorithmConfig, refuse: Refuse) -> None:
    """Steps that are rewarded one by one do not see what is taken off the reward of their trajectory."""
    changed = next((key for key in ("kl_in_reward", "overlong_buffer") if getattr(a, key)), None)
    if a.stepwise == "per_step" and changed:
        raise refuse(
            f"algorithm.{changed}",
            f"algorithm.{changed}={getattr(a, changed):g} with algorithm.stepwise=per_step: it changes the reward of whole trajectories, "
            f"and each step is compared by its own; set algorithm.stepwise=broadcast, or algorithm.{changed}=0",
        )
    if a.stepwise == "per_step" and a.rejection_sampling.enable:
        raise refuse(
            "algorithm.rejection_sampling.enable",
            "algorithm.rejection_sampling.enable=true with algorithm.stepwise=per_step: it keeps tasks by the rewards of whole "
            "trajectories, and each step is compared by its own; set algorithm.stepwise=broadcast, or it to false",
        )


def _check_correction(a: AlgorithmConfig, refuse: Refuse) -> None:
    c = a.rollout_correction
    if c.level != "none" and a.old_logprobs == "sampler":
        raise refuse(
            "algorithm.old_logprobs",
            f"algorithm.old_logprobs=sampler with algorithm.rollout_correction.level={c.level}: the weights are the trainer's "
            "probabilities over the sampler's, so the trainer's are needed; set algorithm.old_logprobs to auto or trainer",
        )
    if c.floor is not None and c.mode == "truncate":
        raise refuse(
            "algorithm.rollout_correction.floor",
            f"algorithm.rollout_correction.floor={c.floor:g} with mode=truncate: only weights above cap are changed; leave floor out, or "
            "set algorithm.rollout_correction.mode=mask",
        )
    floor = c.floor if c.floor is not None else 1.0 / c.cap
    if c.mode == "mask" and floor >= c.cap:
        raise refuse(
            "algorithm.rollout_correction.cap",
            f"algorithm.rollout_correction keeps weights from {floor:g} (floor) to {c.cap:g} (cap): none; raise cap or lower floor",
        )


def _check_lengths(config: Config, refuse: Refuse) -> None:
    """What is counted from a completion's limit (overlong shaping, sum-norm) must not count from one that no completion comes to."""
    d, own = config.data, config.rollout.max_tokens
    key, longest = (
        ("rollout.max_tokens", own) if own is not None else ("data.max_response_length", d.max_response_length)
    )
    room = config.model.max_model_len or d.max_prompt_length + d.max_response_length
    if longest >= room:
        raise refuse(
            key,
            f"{key}={longest}: prompt and completion have {room} tokens together (model.max_model_len, or "
            "data.max_prompt_length + data.max_response_length); lower it, or raise those",
        )


def _check_rewards(config: Config, refuse: Refuse) -> None:
    a = config.algorithm
    longest = config.rollout.max_tokens or config.data.max_response_length
    if a.overlong_buffer > longest:
        raise refuse(
            "algorithm.overlong_buffer",
            f"algorithm.overlong_buffer={a.overlong_buffer}: completions have at most {longest} tokens (rollout.max_tokens or "
            "data.max_response_length); the buffer is the last part of that",
        )
    if not a.rejection_sampling.enable:
        return
    if a.zero_std == "keep":
        raise refuse(
            "algorithm.zero_std",
            "algorithm.zero_std=keep with algorithm.rejection_sampling.enable=true: it samples until enough groups have rewards that "
            "differ, so those that do not are dropped; set algorithm.zero_std=drop",
        )
    if config.rollout.n < 2:
        raise refuse(
            "rollout.n",
            "rollout.n=1 with algorithm.rejection_sampling.enable=true: one reward never differs; set rollout.n to at least 2",
        )


def _check_early_stop(config: Config, refuse: Refuse) -> None:
    t, stop = config.trainer, config.trainer.early_stop
    if stop.metric is None:
        set_too = next((name for name in not_default(stop, EarlyStopConfig())), None)
        if set_too is not None:
            raise refuse(
                f"trainer.early_stop.{set_too}",
                f"trainer.early_stop.{set_too} does nothing without trainer.early_stop.metric; name a validation metric, e.g. "
                "val/countdown/judge_acc",
            )
    elif not t.test_freq:
        raise refuse(
            "trainer.early_stop.metric",
            f"trainer.early_stop.metric={stop.metric} with trainer.test_freq=0: nothing is validated during training; set "
            "trainer.test_freq to a number of steps",
        )


def _check_overlap(config: Config, refuse: Refuse) -> None:
    """A group can be trained before the others are there only where nothing it needs is known last."""
    a = config.algorithm
    if not config.trainer.overlap:
        return
    outside = sorted(a.estimators() - WITHIN_GROUP)
    for needs_all, key, value, why in (
        (makes_several_steps(config), "algorithm.mini_batch_size" if a.ppo_epochs == 1 else "algorithm.ppo_epochs",
         a.mini_batch_size if a.ppo_epochs == 1 else a.ppo_epochs, "it makes several optimizer steps of a step"),
        (bool(outside), "algorithm.adv_estimator", ", ".join(outside), "its advantages are known when all rewards of the step are"),
        (a.stepwise == "per_step", "algorithm.stepwise", a.stepwise, "steps are rewarded by what all trajectories of the step have"),
        (why_trainer_logprobs(config) is not None, "algorithm.old_logprobs", a.old_logprobs,
         f"log-probabilities are computed before the update ({why_trainer_logprobs(config)})"),
        (a.kl_in_reward > 0, "algorithm.kl_in_reward", a.kl_in_reward, "rewards are changed before the update; algorithm.kl_beta can be used"),
        (a.rejection_sampling.enable, "algorithm.rejection_sampling.enable", "true", "which tasks are trained is known last"),
        (config.distill.enabled, "distill", "on", "the teacher is asked when all episodes are there"),
    ):  # fmt: skip
        if needs_all:
            raise refuse("trainer.overlap", f"trainer.overlap=true with {key}={value}: {why}; leave one of them out")


def training_notes(config: Config) -> list[str]:
    """What is done because of these settings, and which of them do nothing."""
    a, o = config.algorithm, config.optim
    notes: list[str] = []
    why = why_trainer_logprobs(config)
    if why:
        notes.append(f"log-probabilities are computed once more before each update, a forward pass: {why}")
    if a.mini_batch_size is not None and a.mini_batch_size > config.data.train_batch_size:
        notes.append(
            f"algorithm.mini_batch_size={a.mini_batch_size} is more than the {config.data.train_batch_size} tasks of a step: each step "
            "is one mini-batch"
        )
    if a.reference == "initial_adapter" and not (a.kl_beta or a.kl_in_reward):
        notes.append("algorithm.reference=initial_adapter: there is no KL, so no reference policy is asked")
    if not a.filter.enable and list(not_default(a.filter, FilterConfig())):
        notes.append("algorithm.filter.*: nothing is filtered, as algorithm.filter.enable is false")
    if a.rollout_correction.level == "none":
        unused = not_default(a.rollout_correction, RolloutCorrectionConfig())
        notes += [f"algorithm.rollout_correction.{name} has no effect: level is none" for name in unused]
    notes += [*_unused(config), *_schedule_notes(config, o)]
    return notes


def _unused(config: Config) -> Iterator[str]:
    """Settings of the loss and the rewards that were changed and that nothing reads. A loss or estimator of the user's may read any."""
    a = config.algorithm
    losses, estimators = a.losses(), a.estimators()
    clips = losses & {"ppo_clip", "cispo", "gspo"} or not losses <= LOSS_OPTIONS.keys()
    dual = losses & {"ppo_clip", "gspo"} or not losses <= LOSS_OPTIONS.keys()
    divides = estimators - {"dr_grpo", "rloo", "opo", "reinforce", "precomputed"}
    compares = estimators & GROUP_RELATIVE
    named = {"loss": ", ".join(sorted(losses)), "adv_estimator": ", ".join(sorted(estimators))}
    for key, is_read, why in (
        ("clip_ratio_low", clips, f"algorithm.loss={named['loss']} does not clip"),
        ("clip_ratio_high", clips, f"algorithm.loss={named['loss']} does not clip"),
        ("clip_ratio_c", dual, f"algorithm.loss={named['loss']} has no dual clip"),
        ("loss_scale_factor", a.loss_agg_mode == "seq-mean-token-sum-norm", f"loss_agg_mode is {a.loss_agg_mode}"),
        ("grpo_std", divides, f"algorithm.adv_estimator={named['adv_estimator']} divides by no standard deviation"),
        ("zero_std", compares, f"algorithm.adv_estimator={named['adv_estimator']} does not compare inside groups"),
        ("kl_estimator", a.kl_beta, "algorithm.kl_beta is 0"),
        ("overlong_penalty", a.overlong_buffer, "algorithm.overlong_buffer is 0"),
    ):
        value = getattr(a, key)
        if not is_read and value != type(a).model_fields[key].default:
            yield f"algorithm.{key}={value} has no effect: {why}"
    if not a.rejection_sampling.enable:
        for key in not_default(a.rejection_sampling, RejectionSamplingConfig()):
            yield f"algorithm.rejection_sampling.{key} has no effect: algorithm.rejection_sampling.enable is false"


def _schedule_notes(config: Config, o: OptimConfig) -> Iterator[str]:
    if o.warmup_steps is not None and o.warmup_ratio:
        yield f"optim.warmup_ratio={o.warmup_ratio:g} has no effect: optim.warmup_steps={o.warmup_steps} wins"
    if o.schedule == "constant" and o.min_lr_ratio:
        yield f"optim.min_lr_ratio={o.min_lr_ratio:g} has no effect with optim.schedule=constant"
    total = config.trainer.total_steps
    for key in ("test_freq", "save_freq"):
        every = getattr(config.trainer, key)
        if total is not None and every > total:
            yield f"trainer.{key}={every} has no effect: the run has {total} steps"
    if total is not None and (o.warmup_steps or 0) >= total:
        yield f"optim.warmup_steps={o.warmup_steps}: the {total} steps of the run are all warm-up; optim.lr is never reached"


def makes_several_steps(config: Config) -> bool:
    """Whether a training step may make more than one optimizer step."""
    a = config.algorithm
    return a.ppo_epochs > 1 or (a.mini_batch_size or config.data.train_batch_size) < config.data.train_batch_size


def why_trainer_logprobs(config: Config) -> str | None:
    """Why the trainer's log-probabilities take the place of the sampler's in the loss, or None if they do not."""
    a = config.algorithm
    if a.rollout_correction.level != "none":
        return "algorithm.rollout_correction weighs by them"
    if a.old_logprobs == "trainer":
        return "algorithm.old_logprobs=trainer"
    if a.old_logprobs == "sampler" or not a.takes_ratio():
        return None
    if a.ppo_epochs > 1:
        return f"algorithm.ppo_epochs={a.ppo_epochs} trains each token more than once"
    if a.mini_batch_size is not None and a.mini_batch_size < config.data.train_batch_size:
        return f"algorithm.mini_batch_size={a.mini_batch_size} makes several optimizer steps of a step"
    return None

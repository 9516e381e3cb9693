"""verl's synchronous trainer with our accounts, advantages, proof of publish and adapter files.

Imported in processes of a run on verl only. verl owns the loop (`fit`); what a step compares, drops and counts is the very code that the
local backend runs.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.debug import marked_timer
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict

from rllm.algorithms.datums import check_role_names
from rllm.algorithms.grouping import Accounting
from rllm.algorithms.metrics import validation_metrics
from rllm.algorithms.schedules import warmup_length
from rllm.algorithms.spec import Datum
from rllm.backends.verl.install import VERSION
from rllm.cluster.actor import FlowActorWorker
from rllm.cluster.job import Job
from rllm.cluster.resume import CHECKPOINTS, saved_step
from rllm.cluster.rows import mini_batches
from rllm.collect import Collected
from rllm.errors import ModelError, RunError
from rllm.lora.checkpoint import fingerprint
from rllm.lora.files import CARD, CARD_FINGERPRINT, model_card
from rllm.rollouts.batch import check_failures
from rllm.tracking.run_folder import RunFolder
from rllm.update import adam_params, datums_of
from rllm.version import __version__

# Mean difference of log-probabilities between sampler and trainer that a run goes on with. Two engines compute the same policy, so it
# is that of the dtype; another policy than the trained one (the base without its adapter) is far above it once it has learned.
GAP = {"float32": 1e-3, "bfloat16": 5e-2}
# How often verl looks whether all episodes have ended; its own 2 s are longer than many a step.
POLL_S = 0.2
# How often the processes that run episodes are asked whether they live.
ALIVE_S = 5.0
# verl's names of what the local backend has under others.
_SAME = {
    "actor/loss": "actor/pg_loss",
    "actor/clip_fraction": "actor/pg_clipfrac",
    "timing_s/rollout": "timing_s/gen",
    "actor/clip_fraction_dual": "actor/pg_clipfrac_lower",
    "timing_s/publish": "timing_s/update_weights",
}
# What lies between the rollouts of a step and its end, all of it the update of the local backend.
_UPDATE = ("old_log_prob", "ref", "adv", "update_actor", "update_weights")


class FlowTrainer(PPOTrainerSync):
    """One step: verl samples through `FlowManager`; episodes are counted and grouped here; verl updates and publishes."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.replay_buffer.poll_interval = POLL_S
        self.job = Job.load(config.rllm.job)
        self.folder = RunFolder(self.job.folder, self.job.config.trainer.log_episodes)
        self.account = Accounting()
        self.completed = 0
        self.validations: dict[str, dict[str, float]] = {}
        self.started = time.monotonic()
        self.facts: dict[str, Any] = {}
        self._rows: dict[str, Datum] = {}
        self._tokens = 0
        self._rate: float | None = None  # that verl will have in the next update
        self._tasks, self._before, self._several = 0, 0, 1  # with rows to train; rows before padding; mini-batches
        self._told: dict[str, float] = {}
        self.notes: set[str] = set()
        self._validated: int | None = None

    # ---- start and end

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(FlowActorWorker)

    def init(self) -> None:
        super().init()
        self.facts = self.actor_rollout_wg.trained()[0]
        lora = self.job.config.lora
        if lora.trains_adapters and (not self.facts["adapters"] or self.facts["others"]):
            found = ", ".join(self.facts["others"]) or "no trainable parameter"
            raise RunError(
                f"lora.rank={lora.rank}, but verl trains {self.facts['adapters']} LoRA matrices and besides: {found}. This would be full "
                "fine-tuning; the run stops"
            )
        share = self.facts["trained"] / max(self.facts["total"], 1)
        what = f"{self.facts['adapters']} LoRA matrices" if lora.trains_adapters else "all weights"
        print(f"rllm: trains {self.facts['trained']:,} of {self.facts['total']:,} parameters ({share:.2%}): {what}")

    def fit(self, agent_loop_manager: Any) -> None:
        self.completed = self.global_steps  # above 0 where a run goes on
        begun, config = self.completed, self.job.config
        # verl's loggers write where their process happens to be, unless told.
        os.environ.setdefault("TENSORBOARD_DIR", str(self.job.folder / "tensorboard"))
        os.environ.setdefault("WANDB_DIR", str(self.job.folder))
        self._watch(agent_loop_manager)
        super().fit(agent_loop_manager)
        if self.job.validates and self.completed > begun and self._validated != self.completed:
            self.global_steps = self.completed  # verl has counted on
            self.logger.log(data=self._validate(), step=self.completed)
        adapter = None
        if config.lora.trains_adapters and not config.trainer.val_only:
            adapter = self._export(self.job.folder / "adapter").name
        saved = Path(CHECKPOINTS, f"global_step_{self.completed}", "actor", "huggingface")
        whole = any((self.job.folder / saved).glob("*.safetensors"))
        self.folder.write_result(
            {
                "val": self.validations,
                "steps": self.completed,
                "seconds": round(time.monotonic() - self.started, 2),
                "adapter": adapter,
                "model": str(saved) if whole else None,
                "state": CHECKPOINTS if saved_step(self.job.folder) is not None else None,
                "accounting": self.account.to_dict(),
                "parameters": {name: self.facts[name] for name in ("trained", "total", "adapters")},
                "interrupted": False,
            }
        )

    def _watch(self, manager: Any) -> None:
        """Let the waiting for rows, which has no end of its own, end where a process that owes some is dead."""
        look, asked = self.replay_buffer._sync_metadata_from_transfer_queue, time.monotonic()

        def looking() -> None:
            nonlocal asked
            if time.monotonic() - asked > ALIVE_S:
                asked = time.monotonic()
                manager.check_alive()
            look()

        self.replay_buffer._sync_metadata_from_transfer_queue = looking

    # ---- one step

    def _step_once(self, metrics: dict, timing_raw: dict, sample_batch_size: int) -> Any:
        with marked_timer("gen", timing_raw, color="red"):
            self.on_sample_begin()
            try:
                batch, _ = self.replay_buffer.sample(
                    global_steps=self.global_steps, partition_id="train", batch_size=sample_batch_size
                )
            except RuntimeError as error:  # verl's words for a batch without any row
                self._collect()  # tells what failed, where that is why
                raise RunError(f"step {self.global_steps}: no episode left a row to train ({error})") from error
            batch.extra_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
            self.on_sample_end()
        metrics |= self._collect()
        batch = self._balance_batch(self._trained_only(batch), metrics=metrics)
        with marked_timer("old_log_prob", timing_raw, color="blue"):
            batch = self._compute_old_log_prob(batch, metrics=metrics)
        if self.use_reference_policy:
            with marked_timer("ref", timing_raw, color="olive"):
                batch = self._compute_ref_log_prob(batch, metrics=metrics)
        with marked_timer("adv", timing_raw, color="brown"):
            batch = self._compute_advantage(batch, metrics=metrics)
        with marked_timer("update_actor", timing_raw, color="red"):
            batch = self._update_actor(batch, metrics=metrics)
        return batch

    def _collect(self) -> dict[str, float]:
        """Take the episodes of this step in, as the local backend does, and keep the rows to train by their first call."""
        config = self.job.config
        episodes, counts, notes = self.agent_loop_manager.take_episodes()
        for note in notes:
            if note not in self.notes:
                print(f"rllm: {note}")
        self.notes.update(notes)
        self.folder.write_episodes(self.global_steps, "train", episodes)
        check_failures(episodes, config.rollout.max_failed_fraction)
        self._tokens = sum(len(s.response_ids) for e in episodes for t in e.trajectories for s in t.steps)
        found = Collected()
        found.add(sorted(episodes, key=lambda episode: (episode.task_id, episode.rollout_idx)), config)
        if self.completed == 0:
            check_role_names(found.rewarded, config.algorithm.per_role, "algorithm.per_role")
        owners = {
            step.id: i for i, unit in enumerate(found.units) for g in unit for t in g.trajectories for step in t.steps
        }
        data = datums_of(found.groups, found.account, config)
        found.account.check()
        self.account.add(found.account)
        self._rows = {row.call: row for row in data}
        self._tasks = len({owners[row.call] for row in data})
        self._told = found.metrics(config) | found.account.to_metrics() | counts
        return dict(self._told)

    def _trained_only(self, batch: Any) -> Any:
        """`batch` without the rows that teach nothing: they would cost three passes, and a mini-batch of them alone has no loss. A step that
        trains nothing keeps them, for the proof of the publish."""
        if not self._rows:
            return batch
        fields = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["call"])
        calls = dict(zip(batch.keys, list(fields["call"]), strict=True))
        idle = [key for key, call in calls.items() if call not in self._rows]
        if not idle:
            return batch
        tq.kv_clear(keys=idle, partition_id=batch.partition_id)
        return batch.select_keys([key for key in batch.keys if calls[key] in self._rows])

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Rows are padded to what can be shared out: the same number of mini-batches on every rank."""
        self._several = mini_batches(self._several, self._before, dp_size)
        return dp_size * self._several

    def _balance_batch(self, batch: Any, metrics: dict, **_: Any) -> Any:
        size = self.job.config.algorithm.mini_batch_size
        self._several = 1 if size is None else max(math.ceil(self._tasks / size), 1)
        self._before = len(batch)
        batch = super()._balance_batch(batch, metrics=metrics)
        metrics["train/padding_rows"] = float(len(batch) - self._before)
        return batch

    def _compute_old_log_prob(self, batch: Any, metrics: dict) -> Any:
        """The trainer's log-probabilities, and with them the proof of the publish before: the sampler had the policy that is trained."""
        batch = super()._compute_old_log_prob(batch, metrics=metrics)
        fields = ["old_log_probs", "rollout_log_probs", "response_mask"]
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=fields
        ).to_padded_tensor()
        gaps = (data["old_log_probs"] - data["rollout_log_probs"]).abs()[data["response_mask"].bool()]
        mean, most = (float(gaps.mean()), float(gaps.max())) if gaps.numel() else (0.0, 0.0)
        metrics |= {"publish/gap_mean": mean, "publish/gap_max": most}
        merged = (
            self.config.actor_rollout_ref.model.lora.merge
        )  # merged weights go to the sampler in bfloat16, whatever is trained
        dtype = "bfloat16" if merged else str(self.config.actor_rollout_ref.rollout.dtype)
        allowed = self.job.config.trainer.publish_tolerance or GAP.get(dtype, GAP["bfloat16"])
        check_gap(self.global_steps, mean, most, allowed)
        return batch

    def _compute_advantage(self, batch: Any, metrics: dict) -> Any:
        """Ours, by the call that each row began with. What is not trained has mask 0 and so counts in no mean."""
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["call", "response_mask", "input_ids"]
        )
        masks = list(data["response_mask"].unbind())
        lengths = data["input_ids"].offsets().diff().tolist()
        advantages, trained = [], []
        for call, mask, length, tag in zip(list(data["call"]), masks, lengths, batch.tags, strict=True):
            row = None if tag.get("is_padding") else self._rows.get(call)
            if row is None:
                advantages.append(torch.zeros(len(mask)))
                trained.append(torch.zeros_like(mask))
                continue
            if len(row.ids) != length:
                raise AssertionError(f"row of call {call}: {length} tokens were written and {len(row.ids)} are trained")
            advantages.append(torch.tensor(row.advantages[-len(mask) :]))
            trained.append(torch.tensor(row.mask[-len(mask) :], dtype=mask.dtype))
        fields = {name: _nested(values) for name, values in (("advantages", advantages), ("returns", advantages))}
        fields |= {name: _nested(trained) for name in ("response_mask", "loss_mask")}
        written = TensorDict(fields, batch_size=len(batch))
        self._trained_rows = sum(bool(mask.any()) for mask in trained)
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=written)

    def _update_actor(self, batch: Any, metrics: dict) -> Any:
        """As verl does it, but in the mini-batches that our config asks for: `verl` counts prompts times n, and has rows of many roles."""
        metrics["train/optimizer_steps"] = 0.0
        if not self._trained_rows:
            metrics["train/skipped_steps"] = 1.0
            return batch
        actor, several = self.config.actor_rollout_ref.actor, self._several
        batch.extra_info.update(
            {
                "calculate_entropy": actor.calculate_entropy or actor.entropy_coeff != 0.0,
                "distillation_use_topk": False,
                "distillation_only": False,
                # What the seq-mean losses divide by: rows that are trained, not padding.
                "global_batch_size": max(self._trained_rows / several, 1),
                "mini_batch_size": len(batch) // several,
                "epochs": actor.ppo_epochs,
                "seed": actor.data_loader_seed,
                "dataloader_kwargs": {"shuffle": several > 1},
                "temperature": self.config.actor_rollout_ref.rollout.temperature,
            }
        )
        output = rename_dict(self.actor_rollout_wg.update_actor(batch)["metrics"], "actor/")
        output["perf/mfu/actor"] = output.pop("actor/mfu")
        metrics |= reduce_metrics(output)
        metrics["train/optimizer_steps"] = float(several * actor.ppo_epochs)
        # verl tells the rate that the next step will have.
        metrics["actor/lr"], self._rate = self._rate_now(), metrics["actor/lr"]
        return batch

    def _rate_now(self) -> float:
        """The learning rate of this step: what the last update left, or, before any in this process, that of the schedule."""
        if self._rate is not None:
            return self._rate
        o, total = self.job.config.optim, self.total_training_steps
        if self.global_steps == 1 and warmup_length(total, o.warmup_steps, o.warmup_ratio) >= 1:
            return 0.0  # as verl begins a warm-up
        return adam_params(self.job.config, self.global_steps, total).lr

    # ---- what is told and kept

    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: dict, global_steps: int, epoch: int) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        metrics |= self._told  # verl's critic/score counts rows; ours, of the same name, trajectories
        metrics |= {ours: metrics[theirs] for ours, theirs in _SAME.items() if theirs in metrics}
        metrics |= {
            "timing_s/update": sum(metrics.get(f"timing_s/{part}", 0.0) for part in _UPDATE),
            "perf/generated_tokens": float(self._tokens),
            "perf/tokens_per_s": self._tokens / max(metrics["timing_s/step"], 1e-9),
            "perf/rollout_tokens_per_s": self._tokens / max(metrics["timing_s/rollout"], 1e-9),
        }
        metrics["policy_version"] = float(global_steps)
        self.completed = global_steps
        line = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, (int, float)) or hasattr(value, "item")
        }
        self.folder.write_metrics(line | {"step": float(global_steps), "seconds": time.monotonic() - self.started})

    def _validate(self) -> dict[str, float]:
        """All validation tasks through the flow; metrics of episodes, under the names of the local backend."""
        n = self.job.config.rollout.n_val
        episodes = self.agent_loop_manager.validate(self.val_dataset.tasks, n, self.global_steps)
        self.folder.write_episodes(self.global_steps, "val", episodes)
        check_failures(episodes, self.job.config.rollout.max_failed_fraction)
        metrics = validation_metrics(episodes, sorted({1, n}))
        self.validations["after" if self.global_steps else "before"] = metrics
        self._validated = self.global_steps
        return metrics

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()
        if self.job.config.lora.trains_adapters:
            self._export(self.job.folder / f"adapter-step-{self.global_steps}")

    def _export(self, path: Path) -> Path:
        """The adapter as a PEFT folder with tokenizer files and a model card, checked by reading it back."""
        part, config = path.with_name(path.name + ".part"), self.job.config
        folder = Path(self.config.actor_rollout_ref.model.path)
        base = str(folder) if config.model.path == "default" else config.model.path
        shutil.rmtree(part, ignore_errors=True)
        written = next(w for w in self.actor_rollout_wg.export_adapter(str(part), base) if w)
        if not (written["same"] and written["finite"] and written["tensors"]):
            raise ModelError(
                f"adapter not saved in {path}: {written['tensors']} tensors, read back the same: {written['same']}, finite: {written['finite']}"
            )
        self.tokenizer.save_pretrained(part)
        rows = {
            "base": base,
            # Of a model of the hub that each machine fetched for itself there is no one folder.
            **({CARD_FINGERPRINT: fingerprint(folder)} if folder.is_dir() else {}),
            "rank": config.lora.rank,
            "alpha": f"{config.lora.alpha:g} (scale alpha / rank)",
            "trainable parameters": f"{self.facts['trained']:,}",
            "step": self.completed if path.name == "adapter" else self.global_steps,
            "check": "tensors read back and equal",
            "versions": f"rllm {__version__}, verl {VERSION}",
        }
        told = {f"validation {when}": values for when, values in self.validations.items()}
        (part / CARD).write_text(model_card(base, "LoRA adapter trained with rllm", rows, told), encoding="utf-8")
        shutil.rmtree(path, ignore_errors=True)
        part.rename(path)
        return path


def check_gap(step: int, mean: float, most: float, allowed: float) -> None:
    """Raise a `RunError` where log-probabilities of sampler and trainer differ by more than the policy they share explains."""
    if not math.isfinite(mean):
        raise RunError(
            f"step {step}: log-probabilities of sampled tokens are not finite; the weights have probably diverged: lower optim.lr"
        )
    if mean > allowed:
        raise RunError(
            f"step {step}: the sampler does not run the policy that is trained: log-probabilities of the same tokens "
            f"differ by {mean:.2e} on average (largest {most:.2e}, allowed mean {allowed:.0e}: trainer.publish_tolerance)"
        )


def _nested(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


class FlowTaskRunner(TaskRunnerV1.__ray_metadata__.modified_class):  # pyright: ignore[reportAttributeAccessIssue]
    """verl's runner with `FlowTrainer` as its synchronous trainer."""

    def run(self, config: Any) -> None:
        TRAINER_REGISTRY["sync"] = FlowTrainer
        super().run(config)

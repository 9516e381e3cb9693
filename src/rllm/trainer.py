"""The training loop: tasks -> episodes -> groups -> advantages -> rows -> backend -> publish -> next tasks.

Knows the order of things; how each is done lives one call down.
"""

from __future__ import annotations

import importlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rllm import checkpoint
from rllm.algorithms.datums import check_role_names
from rllm.algorithms.distillation import TokenAdvantages
from rllm.algorithms.grouping import Accounting
from rllm.algorithms.metrics import validation_metrics
from rllm.backends.base import (
    DEFAULT_ADAPTER,
    INITIAL_ADAPTER,
    Backend,
    Datum,
    Losses,
    LossSpec,
    OverlappingBackend,
    refuse_impossible,
)
from rllm.collect import Collected, collect, dataset_of, task_batches, total_steps
from rllm.config.load import Resolved, load_config
from rllm.config.schema import Config
from rllm.data.dataset import Dataset
from rllm.distill import Distiller
from rllm.early_stop import EarlyStop, check_early_stop
from rllm.errors import ConfigError, DataError, ModelError, RunError
from rllm.interrupts import interrupts_kill, interrupts_wait
from rllm.overlap import TrainAhead
from rllm.rollouts.batch import Rollouts, refuse_running_loop
from rllm.tracking.run_folder import RunFolder
from rllm.tracking.trackers import make_trackers
from rllm.update import PolicyUpdate, datums_of

# Where the class of each backend is: what a run does not use is not imported.
BACKENDS = {
    "local": ("rllm.backends.local.backend", "LocalBackend"),
    "tinker": ("rllm.backends.tinker.backend", "TinkerBackend"),
}


class AgentTrainer:
    """Trains a flow (or workflow) on the backend that the config names.

    Give `agent_flow` with an `evaluator`, or `workflow_class` (with `workflow_args`). `config` is what `load_config` returns, a
    `Config`, a dict or an OmegaConf tree. Datasets may be given here or named by ``data.train_files`` and ``data.val_files``.
    """

    def __init__(
        self,
        *,
        agent_flow: Any = None,
        workflow_class: type | None = None,
        workflow_args: dict[str, Any] | None = None,
        evaluator: Any = None,
        config: Any = None,
        train_dataset: Dataset | Sequence[Any] | None = None,
        val_dataset: Dataset | Sequence[Any] | None = None,
        backend: str | Backend | None = None,
    ):
        if (agent_flow is None) == (workflow_class is None):
            raise ConfigError("AgentTrainer: give exactly one of agent_flow and workflow_class")
        if agent_flow is not None and evaluator is None:
            raise ConfigError("AgentTrainer: agent_flow needs an evaluator (a function decorated with @rllm.evaluator)")
        overrides = [f"backend={backend}"] if isinstance(backend, str) else []
        self.resolved = (
            config if isinstance(config, Resolved) and not overrides else load_config(base=config, overrides=overrides)
        )
        self.config: Config = self.resolved.config
        if backend is None or isinstance(backend, str):
            refuse_impossible(self.config, self.resolved.provenance)
        self.flow, self.workflow_class, self.workflow_args = agent_flow, workflow_class, workflow_args or {}
        self.evaluator = evaluator
        self.train_dataset = dataset_of(train_dataset, self.config.data.train_files, "train", self.config)
        self.val_dataset = dataset_of(val_dataset, self.config.data.val_files, "val", self.config)
        self._given_backend = backend if backend is not None and not isinstance(backend, str) else None

    def train(self) -> dict[str, Any]:
        """Run to the end (or to Ctrl-C, which saves first) and return what `result.json` holds."""
        refuse_running_loop("trainer.train")
        if self.train_dataset is None and not self.config.trainer.val_only:
            raise DataError("no training tasks: give train_dataset=, or data.train_files=<file or built-in name>")
        if self.val_dataset is None and self.config.trainer.val_only:
            raise DataError(
                "trainer.val_only=true: there are no validation tasks; give val_dataset=, or data.val_files=<file or built-in name>"
            )
        total = total_steps(self.train_dataset, self.config)
        check_early_stop(self.config, self.val_dataset, total)
        if self.config.backend == "verl" and self._given_backend is None:  # verl owns the loop
            from rllm.cluster.start import Parts, train_on_verl

            parts = Parts(self.flow, self.workflow_class, self.workflow_args, self.evaluator)
            return train_on_verl(self.resolved, parts, self.train_dataset, self.val_dataset, total)
        started = time.monotonic()
        resumed = checkpoint.resumed(self.config, self.train_dataset, total)
        backend = self._given_backend or create_backend(self.config)
        runner_parts = (self.flow, self.workflow_class, self.workflow_args, self.evaluator)
        try:
            if resumed is not None:
                backend.load_state(resumed.state)
            facts = backend.describe()  # the last that can refuse: a server makes its training runs for it
            # Not before there is a backend: what is refused leaves no folder, and `latest` where it was.
            folder = RunFolder.create(self.resolved) if resumed is None else None
            distiller = Distiller.of(self.config, backend)
            with Rollouts(backend, self.config, *runner_parts) as rollouts:
                if folder is None:  # only now, since what does not fit must change nothing
                    assert resumed is not None
                    folder = RunFolder.reopen(resumed.run, self.resolved, resumed.progress.step)
                run = _Run(self, folder, backend, rollouts, started, distiller)
                if resumed is not None:
                    run.go_on_after(resumed.progress)
                return run.run(facts)
        finally:
            if self._given_backend is None:
                backend.close()


@dataclass
class _Run:
    """One run of the loop: what it has counted so far."""

    trainer: AgentTrainer
    folder: RunFolder
    backend: Backend
    rollouts: Rollouts
    started: float
    distiller: Distiller | None = None
    account: Accounting = field(default_factory=Accounting)
    step: int = 0
    completed: int = 0
    last_rewards: dict[str, float] = field(default_factory=dict)
    validations: dict[str, dict[str, float]] = field(default_factory=dict)
    interrupted: bool = False
    # Steps done before this process; batches of tasks drawn in all, and until the last finished step.
    begun: int = 0
    drawn: int = 0
    drawn_then: int = 0

    def __post_init__(self) -> None:
        config = self.trainer.config
        self.trackers = make_trackers(config, self.folder)
        self.total = 0 if config.trainer.val_only else total_steps(self.trainer.train_dataset, config)
        self.batches = task_batches(self.trainer.train_dataset, config) if self.trainer.train_dataset else iter(())
        self.update = PolicyUpdate(self.backend, config, loss_spec(config), self.total)
        self.early_stop = EarlyStop(config.trainer.early_stop)

    def go_on_after(self, progress: checkpoint.Progress) -> None:
        """Be where a run was after its last saved step; the backend is."""
        self.step = self.completed = self.begun = progress.step
        self.drawn = self.drawn_then = progress.batches
        self.account = Accounting.of_counts(progress.account)
        self.validations = dict(progress.validations)
        self.early_stop.restore(progress.early_stop)
        for _ in range(self.drawn):
            next(self.batches)

    def run(self, facts: dict[str, Any]) -> dict[str, Any]:
        """To the end; `facts` are what the backend says of itself."""
        config = self.trainer.config
        total, validated = self.total, {}
        notes = [*self.trainer.resolved.notes, *self.rollouts.runner.notes]
        facts = facts | {"notes": [*notes, self.distiller.note] if self.distiller else notes}
        for tracker in self.trackers:
            tracker.start(facts, total)
        try:
            if self.begun:
                self._say(f"goes on after step {self.begun} of {total}")
            wants_before = (config.trainer.val_before_train or config.trainer.val_only) and not self.begun
            if wants_before and (total == 0 or not config.lora.trains_adapters):
                self._validate_before(DEFAULT_ADAPTER)
            if total:
                self._prove_publish()
            for step in range(self.begun + 1, total + 1):
                self.step = step
                validated = self._train_step()
                # With LoRA the starting policy stays at hand, so the first step need not wait for its validation.
                if self.step == 1 and wants_before and config.lora.trains_adapters:
                    self._validate_before(INITIAL_ADAPTER)
                if self.early_stop.reason:
                    self._say(f"stopped after step {self.step}: {self.early_stop.reason}")
                    break
            if total:
                self.validations["after"] = validated or self._validate_after()
        except KeyboardInterrupt:
            self.interrupted = True
            with interrupts_kill():
                return self._finish()
        except (RunError, ConfigError) as error:
            raise self._saved_first(error) from error
        return self._finish()

    def _saved_first(self, error: RunError | ConfigError) -> RunError | ConfigError:
        """`error`, after what was learned until then is on disk."""
        if not self.completed:
            return error
        try:
            path = self._save(self.folder.path / "adapter-at-stop")
        except ModelError as unsaved:
            return type(error)(f"{error}\nwhat was learned could not be saved: {unsaved}")
        except RunError as lost:  # what holds the weights is gone: that is why, and it says how to go on
            return lost
        return type(error)(f"{error}\nwhat was learned in {self.completed} steps is saved in {path}")

    def _train_step(self) -> dict[str, float]:
        """One step, from tasks to a published policy; returns the metrics of the validation after it, if there was one."""
        config, clock = self.trainer.config, time.monotonic()
        found, ahead, metrics = self._collect()
        self.folder.write_episodes(self.step, "train", found.episodes)
        self.drawn += found.batches
        rolled_out = time.monotonic()
        metrics |= found.metrics(config)
        if self.step == 1:
            check_role_names(found.rewarded, config.algorithm.per_role, "algorithm.per_role")
            check_role_names(found.rewarded, config.distill.roles or (), "distill.roles")
        taught = None
        if self.distiller is not None:
            taught, told = self.distiller.run(found)
            metrics |= told
        validated: dict[str, float] = {}
        try:
            with interrupts_wait():  # weights, counts and lines that are saved must be of the same steps
                metrics |= self._learn(found, taught, ahead)
                updated = time.monotonic()
                tokens = sum(len(s.response_ids) for e in found.episodes for t in e.trajectories for s in t.steps)
                metrics |= {
                    "timing_s/rollout": rolled_out - clock,
                    "timing_s/update": updated - rolled_out,
                    "timing_s/step": updated - clock,
                    "perf/generated_tokens": float(tokens),
                    "perf/tokens_per_s": tokens / max(updated - clock, 1e-9),
                    "perf/rollout_tokens_per_s": tokens / max(rolled_out - clock, 1e-9),
                    "policy_version": float(self.backend.policy_version),
                }
                self.last_rewards = {name: value for name, value in metrics.items() if name.endswith("/mean")}
                self.completed, self.drawn_then = self.step, self.drawn
            if config.trainer.test_freq and self.step % config.trainer.test_freq == 0:
                validated = self._validate()
                if self.early_stop.see(self.step, validated):
                    self._save_best()
        finally:
            if self.completed == self.step:
                self._report(metrics | validated)
        if config.trainer.save_freq and self.step % config.trainer.save_freq == 0:
            self._save(self.folder.path / f"adapter-step-{self.step}")
            self._save_state()
        return validated

    def _collect(self) -> tuple[Collected, list[Datum], dict[str, float]]:
        """The step's episodes; the rows that ``trainer.overlap`` had trained meanwhile, and how long that took."""
        config, version = self.trainer.config, self.backend.policy_version
        if not config.trainer.overlap:
            return collect(self.rollouts, self.batches, config, self.step, version), [], {}
        if not isinstance(self.backend, OverlappingBackend):
            raise ConfigError("trainer.overlap=true: this backend cannot train while it samples; leave it out")
        ahead = TrainAhead(self.update, self.backend, config, version)
        try:
            found = collect(self.rollouts, self.batches, config, self.step, version, ahead.watch)
            return found, ahead.finish(), {"timing_s/ahead": ahead.seconds}
        except BaseException:
            ahead.stop()
            raise

    def _learn(self, found: Collected, taught: TokenAdvantages | None, ahead: list[Datum]) -> dict[str, float]:
        """The update from what was collected, published and counted."""
        config, account = self.trainer.config, found.account
        groups, metrics = self.update.with_kl_in_reward(found, self.step)
        data = datums_of(groups, account, config, taught)
        metrics |= self.update.run(data, found, account, self.step, ahead)
        if metrics["train/optimizer_steps"]:
            metrics |= self._publish()
        account.check()
        self.account.add(account)
        return metrics | account.to_metrics() | self.rollouts.gateway.take_counts()

    def _publish(self) -> dict[str, float]:
        clock = time.monotonic()
        self.backend.publish()
        published = time.monotonic()
        metrics = self._prove_publish() | {"publish/bytes": float(self.backend.published_bytes)}
        return metrics | {"timing_s/publish": published - clock, "timing_s/probe": time.monotonic() - published}

    def _prove_publish(self) -> dict[str, float]:
        """The sampler must now run what the trainer has: otherwise nothing that follows means anything, and the run stops."""
        try:
            probe = self.backend.probe()
        except FloatingPointError as error:
            raise RunError(f"step {self.step}: {error}") from error
        if not probe.passed:
            raise RunError(
                f"step {self.step}: the sampler does not run the policy that was trained. Policy version: sampler "
                f"{probe.sampler_version}, trainer {probe.trainer_version}; same adapter weights: {'yes' if probe.same_weights else 'no'}; "
                f"log-probabilities of the same tokens differ by up to {probe.gap_max:.2e} (mean {probe.gap_mean:.2e}, allowed "
                f"{probe.tolerance:.0e}: trainer.publish_tolerance)"
            )
        return {"publish/gap_max": probe.gap_max, "publish/gap_mean": probe.gap_mean}

    def _validate_before(self, adapter: str) -> None:
        self._say_validating("before")
        self.validations["before"] = self._validate(adapter)
        if self.trainer.val_dataset is not None:
            self.early_stop.check_name(self.validations["before"])

    def _validate_after(self) -> dict[str, float]:
        self._say_validating("after")
        return self._validate()

    def _validate(self, adapter: str = DEFAULT_ADAPTER) -> dict[str, float]:
        dataset = self.trainer.val_dataset
        if dataset is None:
            return {}
        episodes = self.rollouts.run(
            list(dataset), n=self.trainer.config.rollout.n_val, validation=True, adapter=adapter
        )
        self.folder.write_episodes(self.step, "val", episodes)
        ks = sorted({1, self.trainer.config.rollout.n_val})
        return validation_metrics(episodes, ks)

    def _say_validating(self, when: str) -> None:
        if self.trainer.val_dataset is not None:
            self._say(f"validating on {len(self.trainer.val_dataset)} tasks {when} training")

    def _say(self, text: str) -> None:
        for tracker in self.trackers:
            tracker.say(text)

    def _report(self, metrics: dict[str, float]) -> None:
        line: dict[str, float] = {"step": float(self.step), "seconds": time.monotonic() - self.started} | metrics
        self.folder.write_metrics(line)
        for tracker in self.trackers:
            tracker.step(line)

    def _save(self, path: Path) -> Path:
        facts: dict[str, Any] = {"step": self.completed, "seed": self.trainer.config.trainer.seed}
        facts |= {f"validation {when}": values for when, values in self.validations.items()}
        self.backend.export_adapter(path, facts | {"last training step": self.last_rewards})
        return path

    def _save_state(self) -> None:
        """Of the steps that were finished."""
        assert self.trainer.train_dataset is not None
        facts = checkpoint.facts_of(self.trainer.config, self.trainer.train_dataset)
        early, found = self.early_stop.state(), self.validations
        progress = checkpoint.Progress(self.completed, self.drawn_then, self.account.counts(), found, early, facts)
        checkpoint.save(self.folder.path, self.backend, progress)

    def _save_best(self) -> None:
        """Keep what did best in validation, in place of what did before."""
        path = self.folder.path / self._best_name()
        new = path.with_name(path.name + ".new")
        self._save(new)
        if path.exists():
            shutil.rmtree(path)
        new.rename(path)

    def _best_name(self) -> str:
        return "adapter-best" if self.trainer.config.lora.trains_adapters else "model-best"

    def _finish(self) -> dict[str, Any]:
        config = self.trainer.config
        name = "adapter" if config.lora.trains_adapters else "model"
        saved = self._save(self.folder.path / name) if not config.trainer.val_only else None
        # Of all weights a state is three copies in float32, so it is written only where states were asked for.
        if self.completed and (config.lora.trains_adapters or config.trainer.save_freq or self.interrupted):
            self._save_state()
        result: dict[str, Any] = {
            "val": self.validations,
            "steps": self.completed,
            "seconds": round(time.monotonic() - self.started, 2),
            "adapter": name if saved and config.lora.trains_adapters else None,
            "model": name if saved and not config.lora.trains_adapters else None,
            "accounting": self.account.to_dict(),
            "state": checkpoint.STATE if checkpoint.state_of(self.folder.path) else None,
            "interrupted": self.interrupted,
        }
        if config.trainer.early_stop.metric is not None:
            kept = self._best_name() if self.early_stop.best_step else None
            result["early_stop"] = self.early_stop.to_dict() | {"kept": kept}
        self.folder.write_result(result)
        for tracker in self.trackers:
            tracker.finish(result)
        return result


def create_backend(config: Config) -> Backend:
    """The backend that ``config.backend`` names, with its model loaded."""
    refuse_impossible(config, training=False)
    if config.backend == "verl":
        raise ConfigError(
            "backend=verl: verl trains and has nothing else to offer; use backend=local for everything but training"
        )
    module, name = BACKENDS[config.backend]
    return getattr(importlib.import_module(module), name).create(config)


def loss_spec(config: Config) -> Losses:
    """The loss of all rows; one for each role, "" for the others, where ``algorithm.per_role`` names any."""
    a, r = config.algorithm, config.rollout
    loss = LossSpec(
        name=a.loss,
        clip_low=a.clip_ratio_low,
        clip_high=a.clip_ratio_high,
        clip_c=a.clip_ratio_c,
        aggregation=a.loss_agg_mode,
        norm=a.loss_scale_factor or float(r.max_tokens or config.data.max_response_length),
        kl_beta=a.kl_beta,
        kl_estimator=a.kl_estimator,
        entropy_coeff=a.entropy_coeff,
        options=a.loss_options,
    )
    own = {role: replace(loss, name=settings.loss) for role, settings in a.per_role.items() if settings.loss}
    return {"": loss} | own if own else loss

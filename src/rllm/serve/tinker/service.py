"""What the API does, apart from HTTP: sessions, training runs in order, checkpoints, samplers.

Lives in the server's event loop; work on the model goes to the scheduler's thread and to the engine.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from rllm.backends.base import AdamParams
from rllm.backends.local.backend import LocalBackend
from rllm.lora.adapter import LowRankPairs
from rllm.lora.checkpoint import fingerprint
from rllm.serve.tinker import bodies
from rllm.serve.tinker.bodies import digest_of
from rllm.serve.tinker.errors import ApiError, OperationError
from rllm.serve.tinker.extension import alpha_of
from rllm.serve.tinker.futures import Failure, Futures, PendingResult, Result
from rllm.serve.tinker.losses import LossError, check_inputs, check_settings
from rllm.serve.tinker.runs import AdapterSpec, TrainingRun, read_pairs
from rllm.serve.tinker.samplers import Samplers
from rllm.serve.tinker.sampling import AdapterPool, Sampler, adapter_bytes
from rllm.serve.tinker.scheduler import Scheduler
from rllm.serve.tinker.store import HIDDEN, SCHEME, Checkpoint, Store, check_name
from rllm.serve.tinker.wire import TrainRequest

logger = logging.getLogger(__name__)
# A session is over when nothing was heard of it for so long; clients send a heartbeat every 10 s.
SESSION_SILENCE_S = 600.0
SWEEP_S = 30.0
MOST_RUNS = 256
# Unnamed sampler weights that a run keeps in any case, and for how long an older one stays after its last use.
UNNAMED_KEPT = 16
UNNAMED_IDLE_S = 600.0


class TinkerService:
    """One base, many runs and samplers. `name`: what clients call the base; `alpha`: of every adapter made here."""

    def __init__(
        self,
        backend: LocalBackend,
        store: Store,
        *,
        name: str,
        alpha: float = 32.0,
        max_rank: int = 512,
        session_silence_s: float = SESSION_SILENCE_S,
    ):
        self.backend, self.store, self.name, self.alpha, self.max_rank = backend, store, name, alpha, max_rank
        self.session_silence_s = session_silence_s
        self.base = {"base": name, "fingerprint": fingerprint(backend.folder)}
        self.scheduler = Scheduler()
        self.futures = Futures()
        self.pool = AdapterPool(backend.engine, self._read_adapter, adapter_bytes(backend.model.device))
        self.sampler = Sampler(backend.engine, self.pool, self.scheduler)
        self.samplers = Samplers(self)
        self.runs: dict[str, TrainingRun] = {}
        self._seen: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """After the event loop has ended."""
        self.scheduler.close()
        self.pool.clear()
        self.store.close()

    # Sessions

    def create_session(self, body: bodies.CreateSession) -> str:
        return self.store.add_session(body.model_dump())

    def open_session(self, session: str) -> None:
        """Note that something was heard of it. Raises `ApiError` if it is over or never was."""
        found = self.store.session(session)
        if found is None:
            raise ApiError(f"there is no session {session[:200]!r}; make one with create_session", 404)
        if found["finished"]:
            raise ApiError(f"session {session} has ended; make a new one", 410)
        self.store.see_session(session)

    async def finish_session(self, session: str, why: Mapping[str, Any]) -> None:
        """Its runs are let go and its unnamed sampler weights deleted; checkpoints stay."""
        if self.store.session(session) is None:
            raise ApiError(f"there is no session {session[:200]!r}", 404)
        self.store.finish_session(session, why)
        for run in [run for run in self.runs.values() if run.session == session]:
            del self.runs[run.id]
            self._seen.pop(run.id, None)
        self.scheduler.forget(session)
        await self._sweep()

    async def watch(self) -> None:
        """End sessions that fell silent and delete what has expired, for ever."""
        while True:
            for session in self.store.silent_sessions(time.time() - self.session_silence_s):
                logger.warning("session %s was silent for %g s and is ended", session, self.session_silence_s)
                await self.finish_session(session, {"type": "silent"})
            await self._sweep()
            await asyncio.sleep(min(SWEEP_S, self.session_silence_s))

    async def _sweep(self) -> None:
        for path in self.store.sweep():
            await self.pool.drop(path)

    # Training runs

    def create_model(self, body: bodies.CreateModel) -> PendingResult:
        self.open_session(body.session_id)
        lora = body.lora_config or bodies.LoraBody(rank=32)
        self.check_base(body.base_model)
        _check_optimizer(body.optimizer_config)
        if not 1 <= lora.rank <= self.max_rank:
            raise ApiError(f"lora_config.rank: {lora.rank}; this server takes 1 to {self.max_rank} (--max-rank)")
        if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
            raise ApiError(
                "lora_config: train_attn, train_mlp and train_unembed are all off, so nothing would be trained"
            )
        # Without a seed the n-th run of a session starts as every n-th run does, so that a script run twice is the same run.
        seed = self.backend.config.trainer.seed + body.model_seq_id if lora.seed is None else lora.seed
        alpha = alpha_of(body.user_metadata) or self.alpha
        spec = AdapterSpec(lora.rank, alpha, seed % 2**63, lora.train_attn, lora.train_mlp, lora.train_unembed)
        return self._new_run(body.session_id, body.model_seq_id, spec, body.user_metadata, body)

    def load_weights(self, body: bodies.LoadWeights) -> PendingResult:
        """Into a new run (session_id and model_seq_id), or into one there is (model_id)."""
        _check_optimizer(body.optimizer_config)
        if body.session_id is not None:
            if body.model_seq_id is None:
                raise ApiError("model_seq_id is missing; it goes with session_id")
            self.open_session(body.session_id)
            if body.base_model is not None:
                self.check_base(body.base_model)
            found = self._loadable(body.path, body.optimizer)
            spec, about = AdapterSpec.of(found.about), body.user_metadata or found.about.get("run_metadata")
            return self._new_run(body.session_id, body.model_seq_id, spec, about, body, found, body.optimizer)
        if body.model_id is None:
            raise ApiError("session_id and model_seq_id, or model_id, must say what to load into")
        run = self.run(body.model_id)

        def work() -> Result:
            found = self._loadable(body.path, body.optimizer)
            run.spec = AdapterSpec.of(found.about)
            run.start(found.folder, body.optimizer)
            self.store.describe_run(run.id, {**run.spec.__dict__, **self.base, "user_metadata": body.user_metadata})
            return {"path": found.path, "model_id": run.id, "type": "load_weights"}

        return self._in_turn(run, body.seq_id, digest_of(body), lambda future: work)

    def _new_run(
        self,
        session: str,
        number: int,
        spec: AdapterSpec,
        user_metadata: Mapping[str, Any] | None,
        body: Any,
        checkpoint: Checkpoint | None = None,
        optimizer: bool = False,
    ) -> PendingResult:
        run_id, digest = f"{session}:train:{number}", digest_of(body)
        if known := self.futures.known(run_id, digest):
            return known
        if self.store.run(run_id) is not None:
            raise ApiError(f"model_seq_id {number} was used before in session {session}")
        self.scheduler.check_room()
        if len(self.runs) >= MOST_RUNS:
            raise ApiError(
                f"{len(self.runs)} training runs are open, the most there may be; finish a session first", 429
            )
        base = str(self.backend.folder) if self.backend.model_name == "default" else self.backend.model_name
        run = TrainingRun(run_id, session, self.backend.model, base, spec)
        future = self.futures.create(run_id, digest, model_id=run_id)

        def work() -> Result:
            try:
                run.start(checkpoint.folder if checkpoint else None, optimizer)
            except BaseException:
                self.runs.pop(run_id, None)
                raise
            told: dict[str, Any] = {"model_id": run_id, "type": "create_model"}
            return told if checkpoint is None else {**told, "path": checkpoint.path, "type": "load_weights"}

        about = {**spec.__dict__, **self.base, "user_metadata": user_metadata}
        self.store.add_run(run_id, session, about)
        self.runs[run_id] = run
        self._submit(session, future, work)
        return future

    def run(self, model_id: str) -> TrainingRun:
        """An open run. Raises `ApiError` that says why there is none."""
        run = self.runs.get(model_id)
        if run is not None:
            self.open_session_of(run)
            return run
        known = self.store.run(model_id)
        if known is None:
            raise ApiError(f"there is no training run {model_id[:200]!r}", 404)
        saved = [c.path for c in self.store.checkpoints(model_id)[0] if c.kind == "weights"]
        ended = (self.store.session(known["session"]) or {}).get("finished")
        raise ApiError(
            f"training run {model_id} is not open: its session {'has ended' if ended else 'is of an earlier start of this server'}; "
            + (f"go on from {saved[-1]}" if saved else "it saved no state to go on from"),
            410 if ended else 404,
        )

    def open_session_of(self, run: TrainingRun) -> None:
        """As `open_session`, not more often than every few seconds."""
        now = time.monotonic()
        if now - self._seen.get(run.id, -math.inf) > 5.0:
            self.open_session(run.session)
            self.store.see_run(run.id)
            self._seen[run.id] = now

    def train(self, request: TrainRequest) -> PendingResult:
        run = self.run(request.model_id)
        if request.seq_id is not None and (known := self.futures.known((run.id, request.seq_id), request.digest)):
            return known
        settings = self._check_training(request)

        def work() -> Result:
            return run.train(request.rows, request.loss_fn, settings, request.forward_only)

        return self._in_turn(run, request.seq_id, request.digest, lambda future: work)

    def _check_training(self, request: TrainRequest) -> dict[str, float]:
        if not request.rows:
            raise ApiError("data is empty; give at least one datum")
        vocab, longest = self.backend.model.config.vocab_size, self.backend.max_model_len
        try:
            settings = check_settings(request.loss_fn, request.settings)
        except LossError as error:
            raise ApiError(str(error)) from error
        for i, row in enumerate(request.rows):
            if not 1 <= len(row.ids) <= longest:
                raise ApiError(
                    f"data[{i}].model_input: {len(row.ids)} tokens; this server takes 1 to {longest} (--set model.max_model_len=...)"
                )
            try:
                check_inputs(request.loss_fn, len(row.ids), row.inputs)
            except LossError as error:
                raise ApiError(f"data[{i}].{error}") from error
            targets = row.inputs["target_tokens"]
            if targets.dtype.kind != "i":
                raise ApiError(
                    f"data[{i}].loss_fn_inputs: target_tokens must be whole numbers (int64), not {targets.dtype}"
                )
            for what, ids in (("model_input", row.ids), ("target_tokens", targets)):
                if ids.min() < 0 or ids.max() >= vocab:
                    odd = int(ids[(ids < 0) | (ids >= vocab)].ravel()[0])
                    raise ApiError(f"data[{i}].{what}: token {odd} is outside of the vocabulary of {vocab}")
        return dict(settings)

    def optim_step(self, body: bodies.OptimStep) -> PendingResult:
        run, adam = self.run(body.model_id), body.adam_params
        params = AdamParams(
            adam.learning_rate, adam.beta1, adam.beta2, adam.eps, adam.weight_decay, adam.grad_clip_norm
        )
        return self._in_turn(run, body.seq_id, digest_of(body), lambda future: lambda: run.optim_step(params))

    def save_weights(self, body: bodies.SaveWeights) -> PendingResult:
        run, name = self.run(body.model_id), check_name(f"{body.seq_id or 0:06d}" if body.path is None else body.path)

        def make(future: PendingResult) -> Callable[[], Result]:
            told = {"path": f"{SCHEME}{run.id}/weights/{name}", "type": "save_weights"}
            return lambda: self._save(run, "weights", name, body, told, future, overwrite=body.overwrite)

        return self._in_turn(run, body.seq_id, digest_of(body), make)

    def save_external(self, body: bodies.SaveExternal) -> PendingResult:
        if body.age_encryption_recipients:
            raise ApiError("age_encryption_recipients: files are not encrypted here; leave it out")
        run, name = self.run(body.model_id), check_name(body.path)

        def make(future: PendingResult) -> Callable[[], Result]:
            told = {"path": f"{SCHEME}{run.id}/external_weights/{name}", "type": "save_weights_external"}
            return lambda: self._save(run, "external_weights", name, body, told, future)

        return self._in_turn(run, body.seq_id, digest_of(body), make)

    def save_for_sampler(self, body: bodies.SaveForSampler) -> PendingResult:
        """Under a name; or, without one, for a sampler that ends with the session."""
        run = self.run(body.model_id)
        if body.path is not None:
            name, kind, sampler = check_name(body.path), "sampler_weights", None
        else:
            number = body.sampling_session_seq_id
            if number is None:
                raise ApiError("path, or sampling_session_seq_id for a sampler without a name, is missing")
            # All inflight samplers of a run share one set of weights, which the newest save replaces.
            name, kind = ("inflight" if body.kind == "inflight" else f"s{number}"), HIDDEN
            sampler = f"{run.session}:sample:{number}"
        path = f"{SCHEME}{run.id}/{kind}/{name}"
        told: dict[str, Any] = {"sampling_session_id": sampler} if sampler else {"path": path}
        told["type"] = "save_weights_for_sampler"

        saved: list[LowRankPairs] = []

        def make(future: PendingResult) -> Callable[[], Result]:
            def work() -> Result:
                pairs = run.snapshot()
                result = self._save(run, kind, name, body, told, future, overwrite=kind == HIDDEN)
                if sampler:
                    self.store.add_sampler(sampler, run.session, path)
                saved.append(pairs)
                return result

            return work

        async def hold() -> None:
            await self.pool.put(path, saved[0])
            if kind == HIDDEN:
                await self._trim(run.id)

        return self._in_turn(run, body.seq_id, digest_of(body), make, hold)

    async def _trim(self, run: str) -> None:
        """Delete unnamed weights of a run that are neither among its newest nor were used lately: each step of RL leaves some."""
        now = time.monotonic()
        for old in self.store.hidden(run)[:-UNNAMED_KEPT]:
            if not self.pool.in_use(old) and now - self.samplers.last_used.get(old, -math.inf) > UNNAMED_IDLE_S:
                self.samplers.last_used.pop(old, None)
                await self.delete(old)

    def _save(
        self,
        run: TrainingRun,
        kind: str,
        name: str,
        body: Any,
        told: dict[str, Any],
        future: PendingResult,
        overwrite: bool = False,
    ) -> dict[str, Any]:
        optimizer = kind == "weights"
        metadata = (self.store.run(run.id) or {}).get("user_metadata")
        about = {**run.spec.__dict__, **self.base, "optimizer": optimizer, "run_metadata": metadata}
        about["user_metadata"] = getattr(body, "user_metadata", None)
        self.store.save(
            run.id,
            kind,
            name,
            lambda folder: run.write(folder, optimizer),
            about,
            ttl_s=body.ttl_seconds,
            overwrite=overwrite,
            request=(future.id, told),
        )
        return told

    def refused(self, model_id: Any, seq_id: Any) -> None:
        """A request to a run was refused: those after it must not wait for it."""
        run = self.runs.get(model_id) if isinstance(model_id, str) else None
        if run is not None and type(seq_id) is int:
            run.lane.skip(seq_id)

    def _in_turn(
        self,
        run: TrainingRun,
        seq_id: int | None,
        digest: str,
        make: Callable[[PendingResult], Callable[[], Result]],
        after: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> PendingResult:
        """The future of a request to a run, done after those with lower numbers; `after` is awaited before it is told."""
        key = (run.id, seq_id) if seq_id is not None else None
        if key is not None and (known := self.futures.known(key, digest)):
            return known
        self.scheduler.check_room()
        future = self.futures.create(key, digest, model_id=run.id)
        work = make(future)
        try:
            run.lane.enter(seq_id, lambda: self._submit(run.session, future, work, after))
        except ApiError:
            self.futures.drop(future)
            raise
        return future

    def _submit(
        self,
        tenant: str,
        future: PendingResult,
        work: Callable[[], Result],
        after: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        submitted = self.scheduler.submit(tenant, work)

        async def wait() -> Result:
            result = await asyncio.wrap_future(submitted)
            if after is not None:
                await after()
            return result

        self.follow(future, wait())

    def follow(self, future: PendingResult, work: Coroutine[Any, Any, Result]) -> None:
        """Run `work` and let its outcome be the future's result."""

        async def run() -> None:
            try:
                result = await work
            except asyncio.CancelledError:
                result = Failure("the request was cancelled, or its session has ended", "user")
            except (ApiError, OperationError, ValueError, FloatingPointError) as error:
                result = Failure(str(error), "user")
            except Exception as error:
                logger.exception("a request failed")
                result = Failure(f"{type(error).__name__}: {error}", "server")
            self.futures.finish(future, result)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        future.cancel = task.cancel

    def unload(self, model_id: str) -> PendingResult:
        """Let a run go; its checkpoints stay."""
        run = self.run(model_id)
        future = self.futures.create()

        def work() -> Result:
            self.runs.pop(run.id, None)
            return {"model_id": run.id, "type": "unload_model"}

        self._submit(run.session, future, work)
        return future

    async def result(self, request_id: str) -> Result | None:
        """Of a request: None as long as there is none. That of a save is known after a restart too."""
        try:
            return await self.futures.fetch(request_id)
        except ApiError:
            kept = self.store.result(request_id)
            if kept is None:
                raise
            return kept

    def info(self, model_id: str) -> dict[str, Any]:
        known = self.store.run(model_id)
        if known is None:
            raise ApiError(f"there is no training run {model_id[:200]!r}", 404)
        return {
            "type": "get_info",
            "model_id": model_id,
            "model_name": self.name,
            "model_data": self.model_data(),
            "is_lora": True,
            "lora_rank": known["rank"],
            "lora_alpha": known["alpha"],
        }

    def model_data(self) -> dict[str, Any]:
        """A local folder is told by its path, so that a client on this machine loads the tokenizer without the hub."""
        local = Path(self.backend.model_name).expanduser().exists() or self.backend.model_name == "default"
        tokenizer = str(self.backend.folder.resolve()) if local else self.backend.model_name
        return {"arch": "decoder", "model_name": self.name, "tokenizer_id": tokenizer}

    # Checkpoints

    def check_base(self, name: str) -> None:
        """Raises `ApiError` for another base than the one served."""
        if name not in (self.name, self.backend.model_name):
            raise ApiError(f"base_model: {name[:200]!r} is not served here; this server has {self.name!r}")

    def of_this_base(self, path: str) -> Checkpoint:
        """The checkpoint of a path, if it is one of the base that is served."""
        found = self.store.get(path)
        if found.about["fingerprint"] != self.base["fingerprint"]:
            raise ApiError(
                f"{path} was trained on {found.about['base']!r}, another base than the {self.name!r} served here"
            )
        return found

    def _loadable(self, path: str, optimizer: bool) -> Checkpoint:
        found = self.of_this_base(path)
        if optimizer and not found.about["optimizer"]:
            raise ApiError(
                f"{path} has no optimizer state; give a path of save_state (.../weights/...), or load without it"
            )
        return found

    def _read_adapter(self, path: str) -> LowRankPairs:
        found = self.of_this_base(path)
        return read_pairs(self.backend.model, AdapterSpec.of(found.about), found.folder)

    async def delete(self, path: str) -> None:
        self.store.delete(path)
        await self.pool.drop(path)


def _check_optimizer(config: Mapping[str, Any] | None) -> None:
    if config is not None and config.get("type", "adamw") != "adamw":
        raise ApiError(f"optimizer_config: type {str(config['type'])[:100]!r} is not served here; there is adamw")

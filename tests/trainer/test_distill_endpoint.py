"""A teacher behind an endpoint: ours tells what the model behind it says, others are read in both forms, and every way in which one fails
is a failed sample with its reason."""

from __future__ import annotations

import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_distill import CPU, sampled

from rllm.backends.base import BASE
from rllm.backends.local.backend import LocalBackend
from rllm.config.schema import Config
from rllm.distill import Distiller
from rllm.errors import RunError, UserError
from rllm.gateway.server import Gateway
from rllm.teacher import EndpointTeacher


def test_an_endpoint_teaches_what_the_model_behind_it_does(student: LocalBackend, teacher: Path) -> None:
    serving = LocalBackend.create(
        Config.model_validate(
            {
                "model": CPU,
                "lora": {
                    "rank": 4,
                    "alpha": 8,
                    "adapter_path": str(teacher),
                    "target_modules": ["q_proj", "o_proj", "down_proj"],
                },
            }
        )
    )
    local = Distiller.of(student.config, student)
    with Gateway(serving, models={"adapter": "default", "default": "base"}) as gateway:
        config = Config.model_validate({"model": CPU, "distill": {"base_url": f"{gateway.url}/v1", "model": "adapter"}})
        remote = Distiller.of(config, student)
        assert local is not None and remote is not None and "adapter at http" in remote.note
        found = sampled(student, 8)
        (ours, ours_metrics), (theirs, their_metrics) = local.run(found), remote.run(found)
        assert ours.values.keys() == theirs.values.keys()
        for key, values in ours.values.items():
            assert theirs.values[key] == pytest.approx(values, abs=1e-5)
        assert their_metrics["distill/kl"] == pytest.approx(ours_metrics["distill/kl"], abs=1e-5)
        with pytest.raises(RunError, match=r"teacher_temperature.*sampled at temperature 0\.5"):
            remote.run(sampled(student, 2, temperature=0.5))
    serving.close()


class Endpoint(ThreadingHTTPServer):
    """A completions endpoint that answers with the student's own log-probabilities, or badly, as `how` says of each request."""

    def __init__(self, backend: LocalBackend, form: str = "echo"):
        self.backend, self.form, self.how, self.asked = backend, form, "well", 0
        self.headers: list[Any] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        found = self.path.startswith("/v1/")
        self.send(200 if found else 404, {"data": [{"id": "big"}]} if found else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.headers.append(self.headers)
        how, ids = self.server.how, body["prompt"]
        self.server.asked += 1
        if how == "slow":
            time.sleep(1.0)
        if how in ("busy", "busy once"):
            self.server.how = "well" if how == "busy once" else how
            return self.send(503, {"error": {"message": "too busy"}}, {"retry-after": "0"})
        if how == "busy for long":
            return self.send(503, {}, {"retry-after": "5"})
        if how == "nested":
            return self.send(200, "[" * 5_000)
        if how == "refuses":
            return self.send(404, {"error": {"message": "no such model"}})
        if how == "wants to sample" and body["max_tokens"] == 0:
            return self.send(400, {"error": "max_tokens must be at least 1"})
        if how == "html":
            return self.send(200, None)
        values: list[float | None] = [None, *self.server.backend.score(ids, BASE).logprobs]
        tokens = [self.server.backend.tokenizer.decode([i]) for i in ids]
        if how == "wants to sample":
            values, tokens = [*values, -0.1], [*tokens, "x"]
        if how in ("-inf", "nan", "-9999"):
            values[-2] = {"-inf": -math.inf, "nan": math.nan, "-9999": -9999.0}[how]
        if how in ("above 0", "far above 0"):
            values[-2] = 0.7 if how == "above 0" else 10**400
        if how == "short":
            values, tokens = values[:-1], tokens[:-1]
        if how == "holes":
            values[-1] = None
        if how == "another tokenizer":
            tokens = [*tokens[:-3], "Paris", *tokens[-2:]]
        choice: dict[str, Any] = {"text": "", "logprobs": {"token_logprobs": values, "tokens": tokens}}
        if self.server.form == "vllm":
            named = [
                None if v is None else {str(i): {"logprob": v}, "7777": {"logprob": -0.01}}
                for i, v in zip(ids, values, strict=False)
            ]
            choice = {"text": "", "logprobs": None, "prompt_logprobs": named}
        if how == "no logprobs":
            choice = {"text": "", "logprobs": None}
        self.send(200, {"choices": [choice]})

    def send(self, status: int, data: Any, more: dict[str, str] | None = None) -> None:
        text = b"<html>" if data is None else data.encode() if isinstance(data, str) else json.dumps(data).encode()
        self.send_response(status)
        for name, value in ({"content-length": str(len(text))} | (more or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def endpoint(student: LocalBackend):
    made: list[Endpoint] = []

    def make(form: str = "echo") -> Endpoint:
        made.append(Endpoint(student, form))
        return made[-1]

    yield make
    for server in made:
        server.shutdown()
        server.server_close()


def distiller_of(student: LocalBackend, url: str, share: float = 0.5, **more: Any) -> Distiller:
    settings = {"model": CPU, "distill": {"base_url": url} | more, "rollout": {"max_failed_fraction": share}}
    made = Distiller.of(Config.model_validate(settings), student)
    assert made is not None
    return made


@pytest.mark.parametrize("form", ["echo", "vllm"])
@pytest.mark.parametrize("how", ["well", "wants to sample", "busy once"])
def test_both_forms_of_answers_are_read(
    form: str, how: str, student: LocalBackend, endpoint: Any, monkeypatch: Any
) -> None:
    server = endpoint(form)
    server.how = how
    monkeypatch.setenv("TEACHER_KEY", "secret")
    found = sampled(student, 4)
    distiller = distiller_of(student, server.url, api_key_env="TEACHER_KEY")
    advantages, metrics = distiller.run(found)
    # the fresh adapter of the student says what the base says
    assert max(abs(v) for values in advantages.values.values() for v in values) < 1e-4
    assert found.account.failed.total() == 0 and metrics["distill/tokens"] == 4 * 9 + 6
    assert all(headers["authorization"] == "Bearer secret" for headers in server.headers)


FAULTS = {
    "slow": ("teacher_timeout", r"no answer within 0\.3 s \(distill\.timeout_s\)"),
    "busy for long": ("teacher_timeout", r"distill\.timeout_s\); before that: status 503"),
    "nested": ("teacher_error", "no completion"),
    "above 0": ("teacher_error", r"0\.7 is no log-probability: it is above 0"),
    "far above 0": ("teacher_error", "1000000.* is no log-probability: it is above 0"),
    "busy": ("teacher_error", "status 503: too busy"),
    "refuses": ("teacher_error", "status 404: no such model"),
    "html": ("teacher_error", "no completion: <html>"),
    "no logprobs": ("teacher_no_logprobs", "no log-probabilities of the prompt"),
    "holes": ("teacher_no_logprobs", "lacks the log-probability of a token"),
    "short": ("teacher_length", r"it tells \d+ log-probabilities for \d+ tokens"),
    "-inf": ("teacher_not_finite", "log-probability -inf"),
    "-9999": ("teacher_not_finite", "log-probability -inf"),
    "nan": ("teacher_not_finite", "log-probability nan"),
}


@pytest.mark.parametrize("how", FAULTS)
def test_what_the_teacher_does_not_score_is_a_failed_sample(how: str, student: LocalBackend, endpoint: Any) -> None:
    server, (reason, detail) = endpoint(), FAULTS[how]
    seconds = 0.3 if reason == "teacher_timeout" else 20.0
    distiller = distiller_of(student, server.url, share=1.0, timeout_s=seconds, max_concurrency=8)
    found = sampled(student, 6)
    server.how = how
    advantages, metrics = distiller.run(found)
    assert found.account.failed == {reason: 6} and found.units == [] and advantages.values == {}
    assert metrics["distill/tokens"] == 0 and "distill/kl" not in metrics
    found.account.check()
    with pytest.raises(
        RunError, match=rf"did not score 4 of 4 trajectories.*max_failed_fraction=0\.5.*\n?.*{reason}.*{detail}"
    ):
        halved = distiller.config.model_copy(update={"rollout": Config().rollout})
        Distiller(distiller.teacher, halved).run(sampled(student, 4))


def test_some_rows_failing_leave_the_others_trained(student: LocalBackend, endpoint: Any, monkeypatch: Any) -> None:
    server = endpoint()
    distiller = distiller_of(student, server.url)
    found = sampled(student, 6)
    gone = found.units[0][0].trajectories[0]
    told = distiller.teacher.logprobs

    def one_lost(rows: Any) -> Any:
        values = told(rows)
        values[0] = [math.nan] * len(rows[0].ids)
        return values

    monkeypatch.setattr(distiller.teacher, "logprobs", one_lost)
    advantages, _ = distiller.run(found)
    left = [t for group in found.groups for t in group.trajectories]
    assert len(left) == 5 and all(t is not gone for t in left)
    assert set(advantages.values) == {id(s) for t in left for s in t.steps}
    assert found.account.failed == {"teacher_not_finite": 1}


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("no logprobs", "it cannot teach: the answer has no log-probabilities.*Needed is a completions route"),
        ("refuses", "it cannot teach: status 404: no such model"),
        ("another tokenizer", "has another tokenizer than model.path: token .* is 'Paris' there"),
    ],
)
def test_an_endpoint_that_cannot_teach_is_told_at_the_start(
    how: str, says: str, student: LocalBackend, endpoint: Any
) -> None:
    server = endpoint()
    server.how = how
    with pytest.raises(RunError, match=says):
        distiller_of(student, server.url)


def test_an_endpoint_that_is_not_there_or_has_another_model(student: LocalBackend, endpoint: Any) -> None:
    server = endpoint()
    with pytest.raises(UserError, match=r"distill.base_url=http.*404.*give the URL up to and with /v1"):
        distiller_of(student, server.url.removesuffix("/v1"))
    with pytest.raises(UserError, match=r"distill.model='small': http.* serves big"):
        distiller_of(student, server.url, model="small")
    distiller = distiller_of(student, server.url)
    server.shutdown()
    server.server_close()
    with pytest.raises(UserError, match=r"distill.base_url=http.*nothing answers there"):
        distiller_of(student, server.url)
    assert isinstance(distiller.teacher, EndpointTeacher)
    distiller.teacher.timeout_s = 0.5
    with pytest.raises(RunError, match=r"teacher_(unreachable|timeout)"):
        distiller.run(sampled(student, 4))

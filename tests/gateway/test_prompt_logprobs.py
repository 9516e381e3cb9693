"""What the completions route says of a prompt itself, from the real default model: held against transformers in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch

from rllm.backends.local.backend import LocalBackend
from rllm.backends.local.loading import DEFAULT_MODEL
from rllm.config.schema import Config
from rllm.gateway.server import Gateway

TEXT = "<|im_start|>user\nUsing the numbers [3, 5, 7], make 26.<|im_end|>\n"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[httpx.Client, LocalBackend]]:
    config = Config.model_validate({"model": {"device": "cpu", "dtype": "float32", "max_model_len": 64}})
    backend = LocalBackend.create(config)
    models = {"default": "base", "adapter": "default"}
    with Gateway(backend, models=models, max_prompt_length=40) as gateway, httpx.Client(base_url=gateway.url) as client:
        yield client, backend
    backend.close()


@pytest.fixture(scope="module")
def expected(served: Any) -> tuple[list[int], torch.Tensor]:
    """(the text's tokens, log-probabilities [n - 1, vocab] of transformers in float64)"""
    from transformers import AutoModelForCausalLM

    ids = served[1].tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float64)
    with torch.no_grad():
        return ids, model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


def ask(client: httpx.Client, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == status, answer.text
    return answer.json() if status != 200 else answer.json()["choices"][0]


def test_an_echo_tells_the_log_probabilities_of_given_tokens(served: Any, expected: Any) -> None:
    client, backend = served
    ids, logprobs = expected
    own = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    for prompt in (ids, TEXT):
        choice = ask(client, prompt=prompt, echo=True, max_tokens=0, logprobs=1)
        told = choice["logprobs"]
        assert choice["text"] == "".join(told["tokens"]) == TEXT and choice["finish_reason"] == "length"
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        torch.testing.assert_close(torch.tensor(told["token_logprobs"][1:]).double(), own, atol=1e-5, rtol=0)
        texts = [backend.tokenizer.decode([int(i)]) for i in logprobs.argmax(-1)]
        for best, text, entry, token in zip(
            logprobs.max(-1).values, texts, told["top_logprobs"][1:], told["tokens"][1:], strict=True
        ):
            assert set(entry) == {text, token} and entry[text] == pytest.approx(float(best), abs=1e-5)
        only_own = ask(client, prompt=prompt, echo=True, max_tokens=0, logprobs=0)["logprobs"]
        assert only_own == told | {"top_logprobs": None}


def test_vllms_prompt_logprobs_name_the_tokens_and_their_ranks(served: Any, expected: Any) -> None:
    client, _ = served
    ids, logprobs = expected
    choice = ask(client, prompt=ids, max_tokens=2, prompt_logprobs=1, temperature=0)
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == len(ids)
    for token, row, entry in zip(ids[1:], logprobs, choice["prompt_logprobs"][1:], strict=True):
        rank = int((row > row[token]).sum()) + 1
        assert entry[str(token)]["rank"] == rank
        assert entry[str(token)]["logprob"] == pytest.approx(float(row[token]), abs=1e-5)
        assert set(entry) == {str(token), str(int(row.argmax()))}
    plain = ask(client, prompt=ids, max_tokens=2, temperature=0)
    assert choice["text"] == plain["text"] and plain.get("prompt_logprobs") is None
    assert [set(e) for e in ask(client, prompt=ids, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"][1:]] == [
        {str(token)} for token in ids[1:]
    ]


def test_an_echo_with_sampled_tokens_tells_both_and_records_what_was_sampled(served: Any) -> None:
    _, backend = served
    with Gateway(backend) as gateway:
        session = gateway.open_session("s")
        url = gateway.agent_config(session).base_url
        openai_client = openai.OpenAI(base_url=url, api_key="x", max_retries=0)
        answer = openai_client.completions.create(model="x", prompt=TEXT, echo=True, max_tokens=3, logprobs=1)
        (call,) = session.recorded().values()
        told = answer.choices[0].logprobs
        assert told is not None and told.token_logprobs is not None and told.top_logprobs is not None
        assert told.token_logprobs[-len(call.output.completion_ids) :] == call.output.logprobs
        assert told.top_logprobs[-len(call.output.completion_ids) :] == [None] * len(call.output.completion_ids)
        assert answer.choices[0].text == TEXT + call.output.content
        openai_client.completions.create(model="x", prompt=TEXT, echo=True, max_tokens=0, logprobs=1)
        assert len(session.recorded()) == 1  # nothing was sampled


def test_the_named_model_is_the_one_asked(served: Any, expected: Any) -> None:
    client, backend = served
    adapter = backend.adapters["default"]
    with torch.no_grad():
        for name in adapter.modules_adapted:
            adapter.matrices(name)[1].fill_(0.02)
    ids, _ = expected
    base, tuned = (
        ask(client, prompt=ids, model=name, echo=True, max_tokens=0, logprobs=0)["logprobs"]["token_logprobs"][1:]
        for name in ("default", "adapter")
    )
    assert base == pytest.approx(backend.score(ids, "base").logprobs) and base != pytest.approx(tuned, abs=1e-3)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"echo": True, "stream": True}, "echo cannot be streamed"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs cannot be streamed"),
        ({"echo": True, "logprobs": 5}, "logprobs must be 0 or 1"),
        ({"prompt_logprobs": 2}, "prompt_logprobs must be 0 or 1"),
        ({"prompt_logprobs": True}, "prompt_logprobs must be 0 or 1"),
        ({"echo": "yes"}, "echo must be true or false"),
        ({"max_tokens": 0}, "max_tokens must be a whole number from 1"),
        ({"echo": True, "max_tokens": -1}, "max_tokens must be a whole number from 1"),
        ({"prompt": [5] * 41, "echo": True, "max_tokens": 1}, "at most 40 are allowed"),
        ({"prompt": [5] * 65, "echo": True, "max_tokens": 0}, "at most 64 are allowed (the model's length)"),
    ],
)
def test_what_cannot_be_told_is_refused(served: Any, body: dict[str, Any], says: str) -> None:
    assert says in ask(served[0], status=400, **({"prompt": TEXT} | body))["error"]["message"]


def test_a_prompt_as_long_as_the_model_can_be_scored_and_one_of_one_token_says_nothing(served: Any) -> None:
    client, _ = served
    assert len(ask(client, prompt=[5] * 64, echo=True, max_tokens=0, logprobs=1)["logprobs"]["tokens"]) == 64
    one = ask(client, prompt=[5], echo=True, max_tokens=0, logprobs=1, prompt_logprobs=0)
    assert one["logprobs"]["token_logprobs"] == [None] == one["prompt_logprobs"]


def test_the_chat_route_does_not_echo(served: Any) -> None:
    for extra in ({"echo": True}, {"prompt_logprobs": 1}):
        body = {"messages": [{"role": "user", "content": "hi"}]} | extra
        assert served[0].post("/v1/chat/completions", json=body).status_code == 400

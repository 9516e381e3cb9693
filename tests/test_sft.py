"""SFT trains the assistant's tokens, all of them and nothing else, and its errors name file and line."""

import json

import pytest

from rllm.backends.local.loading import DEFAULT_MODEL, load_tokenizer
from rllm.errors import ConfigError, DataError
from rllm.sft import SftConfig, _optimise, batches, encode_chat, encode_files, run_sft


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEFAULT_MODEL)


def chat(*texts):
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 5, texts, strict=False)]


def test_exactly_the_answers_and_their_end_of_turn_are_trained(tokenizer):
    ids, mask = encode_chat(tokenizer, chat("Hello", "Hi there.", "What is 2 + 3?", "5"), "x")
    trained = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert trained == "Hi there.<|im_end|>5<|im_end|>"
    assert ids == tokenizer.apply_chat_template(chat("Hello", "Hi there.", "What is 2 + 3?", "5"), return_dict=False)


def test_an_answer_that_stands_in_the_question_too_is_not_mistaken(tokenizer):
    ids, mask = encode_chat(tokenizer, chat("say yes", "yes"), "x")
    assert sum(mask) == len(tokenizer("yes")["input_ids"]) + 1
    assert mask[: len(ids) // 2] == [0] * (len(ids) // 2)


def test_a_template_that_rewrites_history_is_an_error(tokenizer, monkeypatch):
    template = (
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(DataError, match=r"f\.jsonl:3: the chat template renders"):
        encode_chat(tokenizer, chat("a", "b", "c", "d"), "f.jsonl:3")


def test_a_chat_that_the_template_refuses_is_named(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"f\.jsonl:3: the chat template cannot render .*roles must alternate"):
        encode_chat(tokenizer, chat("a", "b"), "f.jsonl:3")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"c\.jsonl:2: not valid JSON"),
        ("{}", r"c\.jsonl:2: field 'messages': found None"),
        ('{"messages": [{"role": "user", "content": null}]}', r"c\.jsonl:2: messages\[0\]"),
        ('{"messages": [{"role": "user", "content": "x"}]}', r"c\.jsonl:2: no assistant message"),
        (
            '{"messages": [{"role": "assistant", "content": "x"}]}',
            r"c\.jsonl:2: messages\[0\]: an assistant message without",
        ),
        (
            json.dumps({"messages": chat("a<|im_end|>", "b")}),
            r"c\.jsonl:2: messages\[0\]: the content has the chat marker '<\|im_end\|>'",
        ),
        (
            json.dumps(
                {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "weight": 0}]}
            ),
            r"c\.jsonl:2: no assistant message, or none of weight 1",
        ),
        (
            json.dumps(
                {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "weight": 0.5}]}
            ),
            r"c\.jsonl:2: messages\[1\]: weight=0\.5; allowed: 0 ",
        ),
        (
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": "x"},
                        {"role": "assistant", "content": None, "tool_calls": [{}]},
                    ]
                }
            ),
            r"c\.jsonl:2: field 'tool_calls': the chat template writes no tool calls",
        ),
        ('{"messages": [{"role": 5, "content": "x"}]}', r"c\.jsonl:2: messages\[0\]: found .* must have a role"),
        (
            '{"messages": [{"role": "user", "content": "\\ud800"}]}',
            r"c\.jsonl:2: messages\[0\]: the content is no valid text",
        ),
        (json.dumps({"messages": chat("a", "b"), "tools": "f"}), r"c\.jsonl:2: field 'tools': found 'f'"),
        (
            json.dumps({"messages": chat("a", "b"), "tools": [{"name": "f"}]}),
            r"c\.jsonl:2: field 'tools': the chat template writes",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    good = json.dumps({"messages": chat("a", "b")})
    (tmp_path / "c.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(DataError, match=message):
        encode_files([str(tmp_path / "c.jsonl")], DEFAULT_MODEL)


def test_missing_and_empty_files_are_named(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        encode_files([str(tmp_path / "no.jsonl")], DEFAULT_MODEL)
    (tmp_path / "c.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no chats"):
        encode_files([str(tmp_path / "c.jsonl")], DEFAULT_MODEL)
    with pytest.raises(ConfigError, match=r"data\.train_files"):
        run_sft(SftConfig())
    with pytest.raises(ConfigError, match=r"trainer\.out: .*c\.jsonl is a file"):
        run_sft(SftConfig.model_validate({"data": {"train_files": "x"}, "trainer": {"out": str(tmp_path / "c.jsonl")}}))


def test_tools_reach_a_template_that_writes_them(tokenizer, monkeypatch):
    monkeypatch.setattr(
        tokenizer, "chat_template", "{% for t in tools or [] %}{{ t.name }};{% endfor %}" + tokenizer.chat_template
    )
    ids, mask = encode_chat(tokenizer, chat("a", "b"), "x", [{"name": "add"}])
    assert tokenizer.decode(ids).startswith("add;")
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "b<|im_end|>"


def test_calls_of_tools_are_trained_where_the_template_writes_them(tokenizer, monkeypatch):
    written = tokenizer.chat_template.replace(
        "message['content']", "message['content'] ~ (message.tool_calls or [''])[0]"
    )
    assert written != tokenizer.chat_template
    monkeypatch.setattr(tokenizer, "chat_template", written)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": ["add"]}]
    ids, mask = encode_chat(tokenizer, messages, "x")
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "add<|im_end|>"


def test_an_answer_of_weight_0_is_read_and_not_trained(tokenizer):
    messages = chat("a", "b", "c", "d")
    messages[1]["weight"] = 0
    ids, mask = encode_chat(tokenizer, messages, "x")
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "d<|im_end|>"
    assert ids == encode_chat(tokenizer, chat("a", "b", "c", "d"), "x")[0]


def test_a_folder_that_cannot_be_made_is_told_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    given = {"data": {"train_files": "x"}, "trainer": {"out": str(tmp_path / "file" / "out")}}
    with pytest.raises(ConfigError, match=r"trainer\.out: .*give a folder that can be written"):
        run_sft(SftConfig.model_validate(given))


@pytest.mark.parametrize("batch_tokens", [1, 3, 7, 1000])
def test_epochs_are_whole_passes_over_the_chats_whatever_the_batches(batch_tokens):
    seen = []

    class Learner:
        def forward_backward(self, batch, loss):
            seen.extend(datum.ids[0] for datum in batch)
            return {"loss": 1.0}

        def optim_step(self, params):
            return {"grad_norm": 1.0}

    config = SftConfig.model_validate({"data": {"batch_tokens": batch_tokens}, "trainer": {"total_epochs": 3}})
    _optimise(
        config, Learner(), [([i, *[0] * (i % 4 + 1)], [0] + [1] * (i % 4 + 1)) for i in range(11)], lambda line: None
    )
    assert sorted(seen) == sorted([*range(11)] * 3)


def test_every_chat_is_in_every_epoch_once():
    chats = [([i, 0], [0, 1]) for i in range(10)]
    stream = batches(chats, batch_tokens=6, seed=0)
    epochs = [[datum.ids[0] for _ in range(4) for datum in next(stream)] for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2 and epochs[0] != epochs[1]


@pytest.mark.parametrize(
    ("optim", "rates"),
    [
        # warm-up over a fifth of the steps, then half a cosine to a tenth of the rate
        ({"warmup_ratio": 0.2, "min_lr_ratio": 0.1}, [1e-3, 0.5, 1.0, 0.965746, 0.868198, 0.722208, 0.55]),
        ({"warmup_steps": 4, "schedule": "linear"}, [1e-3, 0.25, 0.5, 0.75, 1.0, 5 / 6, 4 / 6]),
        ({"schedule": "constant", "warmup_ratio": 0.0}, [1.0] * 7),
    ],
)
def test_the_rate_rises_then_follows_its_schedule(optim, rates):
    seen = []

    class Learner:
        def forward_backward(self, batch, loss):
            return {"loss": 1.0}

        def optim_step(self, params):
            seen.append(params.lr)
            return {"grad_norm": 1.0}

    config = SftConfig.model_validate({"optim": {"lr": 2.0} | optim, "trainer": {"total_steps": 10}})
    _optimise(config, Learner(), [([1, 2], [0, 1])], lambda line: None)
    assert len(seen) == 10 and seen[:7] == pytest.approx([2.0 * rate for rate in rates], abs=1e-5)


@pytest.mark.parametrize("rank", [0, 8])
def test_four_chats_are_learnt_by_heart(tmp_path, rank):
    answers = ("blue fox", "7 * 8 = 56", "none of them", "Goodbye!")
    rows = [{"messages": chat(f"Question {i}", answer)} for i, answer in enumerate(answers)]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = SftConfig.model_validate(
        {
            "data": {"train_files": str(tmp_path / "c.jsonl")},
            "lora": {"rank": rank},
            "optim": {"lr": 1e-2 if rank else 3e-3},
            "trainer": {"total_steps": 60, "out": str(tmp_path / "out")},
        }
    )
    lines: list[str] = []
    result = run_sft(config, lines.append)
    first = float(lines[1].split("nll ")[1].split()[0])
    assert first > 6.0 and result["nll"] < (1.5 if rank else 0.3)
    assert (tmp_path / "out" / ("adapter_config.json" if rank else "model.safetensors")).is_file()
    saved = json.loads((tmp_path / "out" / "result.json").read_text())
    assert saved["steps"] == 60 and (not rank or saved["peft_logit_gap"] < 1e-4)

"""On-policy distillation with real models: the KL to the teacher falls, and a teacher that cannot teach is told at the start."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI
from test_trainer import lines

import rllm
from rllm.algorithms.datums import build_datums
from rllm.algorithms.grouping import group_by_role
from rllm.backends.base import BASE, TEACHER, AdamParams, Datum, LossSpec
from rllm.backends.local.backend import LocalBackend
from rllm.backends.local.loading import DEFAULT_MODEL
from rllm.collect import Collected
from rllm.config.schema import Config
from rllm.distill import Distiller
from rllm.errors import ConfigError, ModelError
from rllm.types import Step, Trajectory

CPU = {"device": "cpu", "dtype": "float32"}
TASKS = [{"id": str(i), "question": f"Using the numbers [{i + 2}, 5, 7], make {20 + i}."} for i in range(8)]


@rllm.rollout(name="solver")
async def flow(task: rllm.Task, config: rllm.AgentConfig) -> rllm.Episode:
    async with AsyncOpenAI(base_url=config.base_url, api_key="x", max_retries=0) as client:
        chat: Any = [{"role": "user", "content": task.instruction}]
        answer = await client.chat.completions.create(model=config.model, messages=chat, max_tokens=24)
        chat += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": "Again."},
        ]
        again = await client.chat.completions.create(model=config.model, messages=chat, max_tokens=8)
    return rllm.Episode(
        trajectories=[
            rllm.Trajectory(name="solver", steps=[rllm.Step(id=answer.id), rllm.Step(id=again.id)]),
        ]
    )


@rllm.evaluator
def no_reward(task: rllm.Task, episode: rllm.Episode) -> float:
    return 0.0


def train(
    tmp_path: Path, steps: int = 1, evaluator: Any = no_reward, **sections: dict[str, Any]
) -> list[dict[str, Any]]:
    config: dict[str, Any] = {
        "model": CPU,
        "data": {"train_batch_size": 4, "max_prompt_length": 128, "max_response_length": 32},
        "rollout": {"n": 4},
        "lora": {"rank": 8, "alpha": 16},
        "optim": {"lr": 1e-2},
        "trainer": {"total_steps": steps, "run_dir": str(tmp_path), "logger": [], "log_episodes": False},
    }
    for name, values in sections.items():
        config[name] = config.get(name, {}) | values
    rllm.AgentTrainer(agent_flow=flow, evaluator=evaluator, config=config, train_dataset=TASKS).train()
    return lines(tmp_path / "latest" / "metrics.jsonl")


@pytest.fixture
def astray(tmp_path: Path) -> Path:
    """An adapter that was fine-tuned to give one answer to everything."""
    backend = LocalBackend.create(Config.model_validate({"model": CPU, "lora": {"rank": 4, "alpha": 8}}))
    answer = backend.tokenizer("5 + 7 = 12\nBut 12 is not it.<|im_end|>", add_special_tokens=False)["input_ids"]
    rows = []
    for task in TASKS:
        chat = [{"role": "user", "content": task["question"]}]
        prompt = backend.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        weights = [0] * len(prompt) + [1] * len(answer)
        rows.append(Datum([*prompt, *answer], weights, [float(w) for w in weights], [0.0] * len(weights)))
    for _ in range(12):
        backend.forward_backward(rows, LossSpec("cross_entropy"))
        backend.optim_step(AdamParams(3e-3))
    folder = backend.export_adapter(tmp_path / "astray")["default"]
    backend.close()
    return folder


def test_the_kl_to_the_teacher_falls_without_any_reward(tmp_path: Path, astray: Path) -> None:
    metrics = train(
        tmp_path,
        steps=6,
        distill={"teacher": "default"},
        lora={"rank": 4, "alpha": 8, "adapter_path": str(astray)},
        optim={"lr": 4e-3},
    )
    for name in ("distill/kl", "distill/kl_k3"):
        kl = [m[name] for m in metrics]
        assert kl[0] > 1.5 and sum(kl[-2:]) < 0.3 * sum(kl[:2]), kl
    for m in metrics:  # all rewards are equal, and nothing is dropped for that
        assert (m["samples/generated"], m["samples/trained"], m["critic/score/mean"]) == (16, 16, 0.0)
        assert m["distill/tokens"] == m["actor/tokens"] and m["publish/gap_max"] < 1e-4


def test_added_to_rewards_over_several_steps(tmp_path: Path, teacher: Path) -> None:
    (m,) = train(
        tmp_path,
        distill={"adapter": str(teacher), "mode": "add", "coef": 0.5, "gamma": 0.9},
        algorithm={"loss": "cispo", "loss_agg_mode": "seq-mean-token-sum", "ppo_epochs": 2, "mini_batch_size": 2},
        rollout={"n": 2},
    )
    assert m["samples/trained"] == 8 and m["actor/grad_norm"] > 0 and math.isfinite(m["actor/loss"])
    assert m["train/optimizer_steps"] == 4


def sampled(backend: LocalBackend, n: int = 6, temperature: float = 1.0, role: str = "solver") -> Collected:
    """`n` trajectories of two steps in one row, with the log-probabilities that the student has now."""
    generator = torch.Generator().manual_seed(n)

    def integers(k: int) -> list[int]:
        return torch.randint(5, 200, (k,), generator=generator).tolist()

    items = []
    for k in range(n):
        prompt, first, tool, second = integers(6), integers(5 + k), integers(3), integers(4)
        row = Datum(
            prompt + first + tool + second, [0] * 6 + [1] * (5 + k) + [0] * 3 + [1] * 4, temperature=temperature
        )
        (values,) = backend.logprobs([row], trained_only=True)
        one = Step(prompt_ids=prompt, response_ids=first, logprobs=values[6 : 11 + k], temperature=temperature)
        two = Step(prompt_ids=prompt + first + tool, response_ids=second, logprobs=values[-4:], temperature=temperature)
        items.append((f"task-{k // 2}", Trajectory(name=role, steps=[one, two], reward=0.0)))
    found = Collected(units=[[group] for group in group_by_role(items)])
    found.account.generated = n
    return found


@pytest.mark.parametrize("loss", ["ppo_clip", "importance_sampling", "cispo", "gspo", "dro", "reinforce"])
def test_every_loss_takes_the_advantages_of_tokens(loss: str, student: LocalBackend) -> None:
    distiller, found = Distiller.of(student.config, student), sampled(student)
    assert distiller is not None
    taught, _ = distiller.run(found)
    rows = build_datums(found.groups, found.account, estimator="grpo", token_advantages=taught)
    student.forward_backward(rows, LossSpec(loss, options={"beta": 0.05}))
    found_gradients = [p.grad.clone() for p in student.learner.trainable() if p.grad is not None]
    student.discard_gradients()
    # on-policy, with one advantage a token, all of them have the gradient of the mean of -A logp; gspo's weighs by rows
    student.forward_backward(rows, LossSpec("reinforce"))
    for ours, parameter in zip(found_gradients, student.learner.trainable(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(ours, parameter.grad, atol=1e-6, rtol=2e-3)
    student.discard_gradients()
    found.account.check()


def test_advantages_are_what_transformers_and_peft_say_in_float64(student: LocalBackend, teacher: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float64)
    tuned = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float64), teacher
    ).double()
    distiller = Distiller.of(student.config, student)
    assert distiller is not None
    for temperature in (1.0, 0.7):
        found = sampled(student, temperature=temperature)
        trajectories = [t for g in found.groups for t in g.trajectories]
        advantages, metrics = distiller.run(found)
        gaps = []
        for trajectory in trajectories:
            for step in trajectory.steps:
                ids = torch.tensor([step.prompt_ids + step.response_ids])
                with torch.no_grad():
                    ours, theirs = (
                        (model(ids).logits[0, :-1] / temperature).log_softmax(-1) for model in (base, tuned)
                    )
                at = range(len(step.prompt_ids) - 1, ids.shape[1] - 1)
                expected = [float(theirs[i, ids[0, i + 1]] - ours[i, ids[0, i + 1]]) for i in at]
                assert advantages.values[id(step)] == pytest.approx(expected, abs=2e-4)
                gaps += expected
        assert (
            metrics["distill/kl"] == pytest.approx(-sum(gaps) / len(gaps), abs=1e-4)
            and abs(metrics["distill/kl"]) > 0.05
        )


def test_the_weights_of_one_model_are_shared_with_its_teacher(
    student: LocalBackend, teacher: Path, tmp_path: Path
) -> None:
    held = student.learner.teacher
    assert held is not None and held[0] is student.model and "teacher" not in student.describe()["memory_bytes"]
    copied = tmp_path / "copy"
    copied.symlink_to(DEFAULT_MODEL)
    for d, shared, rank in (
        ({"teacher": "default"}, True, 4),
        ({"teacher": str(copied)}, True, 4),
        ({"teacher": "default"}, False, 0),  # full fine-tuning changes them, so the teacher has its own
    ):
        backend = LocalBackend.create(Config.model_validate({"model": CPU, "lora": {"rank": rank}, "distill": d}))
        assert backend.learner.teacher is not None
        assert (backend.learner.teacher[0] is backend.model) == shared
        assert ("teacher" in backend.describe()["memory_bytes"]) != shared
        row = Datum([5, 6, 7], [0, 1, 1])
        adapter = BASE if rank else None
        assert backend.logprobs([row], TEACHER) == backend.logprobs([row], adapter)
        backend.close()


def changed(tmp_path: Path, change: Any) -> Path:
    """The default model with another tokenizer or config."""
    folder = tmp_path / "other"
    folder.mkdir()
    for file in DEFAULT_MODEL.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    change(folder)
    return folder


def _rename_a_token(folder: Path) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = data["model"]["vocab"]
    name = next(token for token, i in vocabulary.items() if i == 40)
    vocabulary["never"] = vocabulary.pop(name)
    data["model"]["merges"] = [m for m in data["model"].get("merges", ()) if name not in "".join(m) and name not in m]
    (folder / "tokenizer.json").write_text(json.dumps(data))


def _other_end(folder: Path) -> None:
    data = json.loads((folder / "tokenizer_config.json").read_text())
    data["eos_token"] = "<|im_start|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(data))
    (folder / "generation_config.json").unlink()


def _shorter(folder: Path) -> None:
    data = json.loads((folder / "config.json").read_text())
    data["max_position_embeddings"] = 100
    (folder / "config.json").write_text(json.dumps(data))


def _broken(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"nothing")


def _no_model(folder: Path) -> None:
    (folder / "config.json").unlink()


def _no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE", "vocab": 3}}')


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            _rename_a_token,
            "distill.teacher: .* has another tokenizer than model.path: token 40 is 'never' there and .* here",
        ),
        (_other_end, r"distill.teacher: .* ends a turn with token \d+ \(<\|im_start\|>\)"),
        (_shorter, "distill.teacher: it reads at most 100 tokens, a row may have 128.*set model.max_model_len=100"),
        (_no_model, "distill.teacher: .* has no config.json"),
        (_no_tokenizer, "distill.teacher: the tokenizer of .* cannot be read: .*"),
        (_broken, "distill.teacher: .*model.safetensors cannot be read"),
    ],
)
def test_a_model_that_cannot_teach_is_told_at_the_start(change: Any, says: str, tmp_path: Path) -> None:
    folder = changed(tmp_path, change)
    config = Config.model_validate({"model": CPU | {"max_model_len": 128}, "distill": {"teacher": str(folder)}})
    with pytest.raises((ModelError, ConfigError), match=says) as error:
        LocalBackend.create(config)
    assert "\n" not in str(error.value)


def test_an_adapter_that_is_none_is_told_under_its_key(tmp_path: Path, teacher: Path) -> None:
    for path, says in ((tmp_path, "distill.adapter: .* has no adapter_config.json"),):
        with pytest.raises(ModelError, match=says):
            LocalBackend.create(Config.model_validate({"model": CPU, "distill": {"adapter": str(path)}}))
    for role in ("a", "b"):
        (tmp_path / role).symlink_to(teacher)
    with pytest.raises(ModelError, match=r"distill.adapter: .* an adapter for each role \(a, b\)"):
        LocalBackend.create(Config.model_validate({"model": CPU, "distill": {"adapter": str(tmp_path)}}))


def test_another_model_beside_the_student_teaches(tmp_path: Path) -> None:
    def louder(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"] *= 1.5
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    folder = changed(tmp_path, louder)
    backend = LocalBackend.create(Config.model_validate({"model": CPU, "distill": {"teacher": str(folder)}}))
    alone = LocalBackend.create(Config.model_validate({"model": CPU | {"path": str(folder)}}))
    row = Datum([5, 6, 7, 8], [0, 1, 1, 1], temperature=0.8)
    assert backend.logprobs([row], TEACHER) == alone.logprobs([row], BASE) != backend.logprobs([row], BASE)
    assert backend.describe()["memory_bytes"]["teacher"] == alone.model.nbytes
    backend.close()
    alone.close()


def test_a_role_that_no_trajectory_has_and_a_backend_without_the_teacher(tmp_path: Path, teacher: Path) -> None:
    with pytest.raises(ConfigError, match=r"distill.roles: no trajectory has the role 'slover'.*did you mean 'solver'"):
        train(tmp_path, distill={"adapter": str(teacher), "roles": ["slover"]})
    backend = LocalBackend.create(Config.model_validate({"model": CPU}))
    config = {"model": CPU, "distill": {"teacher": "default"}, "trainer": {"run_dir": str(tmp_path), "logger": []}}
    with pytest.raises(ConfigError, match="the given backend was made without it"):
        rllm.AgentTrainer(
            agent_flow=flow, evaluator=no_reward, config=config, train_dataset=TASKS, backend=backend
        ).train()
    backend.close()

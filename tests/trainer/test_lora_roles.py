"""Training with one adapter per role: flows and workflows, what is saved, what is told when the adapter of a role is not used."""

import json

import pytest
from solver_judge_flow import SolverJudgeWorkflow, solver_judge, solver_judge_evaluator
from test_trainer import lines, settings, train

import rllm
from rllm.backends.local.backend import LocalBackend
from rllm.data.countdown import countdown
from rllm.errors import RunError
from rllm.evaluation import evaluate

ROLES = {"lora": {"per_role": {"solver": {"rank": 4}, "judge": {"rank": 2}}}}


def steps(folder, split):
    episodes = [e for e in lines(folder / "episodes.jsonl") if e["split"] == split]
    return [(t["name"], s["adapter"]) for e in episodes for t in e["trajectories"] for s in t["steps"]]


def test_each_role_samples_trains_and_saves_its_own_adapter(tmp_path):
    result = train(tmp_path, **ROLES)
    folder = tmp_path / "runs" / "latest"
    assert set(steps(folder, "train")) == {("solver", "solver"), ("judge", "judge")}
    assert result["adapter"] == "adapter" and result["accounting"]["failed"] == {}
    for role, rank in (("solver", 4), ("judge", 2)):
        config = json.loads((folder / "adapter" / role / "adapter_config.json").read_text())
        assert config["r"] == rank
        assert "## validation after" in (folder / "adapter" / role / "README.md").read_text()
    before = [s for s in steps(folder, "val") if s[1].startswith("initial")]
    assert set(before) == {("solver", "initial:solver"), ("judge", "initial:judge")}
    assert all(m["publish/gap_max"] < 1e-4 for m in lines(folder / "metrics.jsonl"))
    again = evaluate(
        agent_flow=solver_judge,
        evaluator=solver_judge_evaluator,
        config=settings(tmp_path),
        dataset=countdown("val", 4),
        adapter=str(folder / "adapter"),
    )
    assert again["failed"] == 0


def test_a_workflow_names_the_role_of_its_calls(tmp_path):
    result = rllm.AgentTrainer(
        workflow_class=SolverJudgeWorkflow,
        config=settings(tmp_path, **ROLES, trainer={"total_steps": 1}),
        train_dataset=countdown("train", 4),
    ).train()
    assert set(steps(tmp_path / "runs" / "latest", "train")) == {("solver", "solver"), ("judge", "judge")}
    assert result["accounting"]["failed"] == {}


async def call(config, model):
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=config.base_url, api_key="x", max_retries=0) as client:
        answer = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "hi"}], max_tokens=4
        )
    return answer.id


def flow_with(role, model_of):
    @rllm.rollout(name="f")
    async def flow(task, config):
        return rllm.Trajectory(name=role, steps=[rllm.Step(id=await call(config, model_of(config)))])

    return flow


@rllm.evaluator
def by_chance(task, episode):
    return float(int(episode.id[-1]) % 2)


@pytest.mark.parametrize(
    ("role", "model_of", "message"),
    [
        (
            "solver",
            lambda config: config.model,
            "there is no adapter for a call that names no role: lora.per_role has judge, solver",
        ),
        ("solver", lambda config: "gpt-4o", "call with model=config.model_for\\(role\\)"),
        ("solver", lambda config: config.model_for("judge"), "sampled with the adapter 'judge', its role has 'solver'"),
        ("critic", lambda config: config.model_for("solver"), "there is no adapter for the role 'critic'"),
    ],
)
def test_a_role_that_does_not_use_its_adapter_stops_the_run_with_the_fix(tmp_path, role, model_of, message):
    with pytest.raises(RunError, match=message):
        train(tmp_path, flow_with(role, model_of), by_chance, val=0, **ROLES)


def test_a_default_role_stands_for_all_that_are_not_named(tmp_path):
    both = {"lora": {"per_role": {"solver": {}, "default": {"rank": 2}}}}
    train(tmp_path, flow_with("critic", lambda config: "gpt-4o"), by_chance, val=0, trainer={"total_steps": 1}, **both)
    folder = tmp_path / "runs" / "latest"
    assert set(steps(folder, "train")) == {("critic", "default")}
    assert {p.name for p in (folder / "adapter").iterdir()} == {"solver", "default"}


def test_a_run_whose_sampler_keeps_an_old_policy_stops_and_says_both_versions(tmp_path, monkeypatch):
    def forgets(self):
        if self.policy_version == 0:
            publish(self)

    publish = LocalBackend._publish_to_engine
    monkeypatch.setattr(LocalBackend, "_publish_to_engine", forgets)
    with pytest.raises(
        RunError, match=r"step 1: .* sampler 0, trainer 1; same adapter weights: no; .*publish_tolerance"
    ):
        train(tmp_path, val=0)


def test_a_tolerance_can_be_set_and_stops_the_run(tmp_path):
    with pytest.raises(RunError, match=r"allowed 1e-12: trainer\.publish_tolerance"):
        train(tmp_path, val=0, trainer={"publish_tolerance": 1e-12})


def test_weights_that_diverge_stop_the_run_with_the_step_and_the_cure(tmp_path):
    with pytest.raises(
        RunError, match=r"step 1: the model gave logits that are not finite .*try a lower learning rate"
    ):
        train(tmp_path, val=0, optim={"lr": 1e30})


def test_what_was_learned_before_a_run_stops_is_saved(tmp_path):
    count = iter(range(1000))

    @rllm.evaluator
    def breaks_later(task, episode):
        if next(count) >= 8:
            raise ValueError("no more")
        return float(int(episode.id[-1]) % 2)

    with pytest.raises(RunError, match=r"(?s)no more.*what was learned in 1 steps is saved in .*adapter-at-stop"):
        train(tmp_path, flow_with("f", lambda config: config.model), breaks_later, val=0)
    assert (tmp_path / "runs" / "latest" / "adapter-at-stop" / "adapter_config.json").is_file()


def test_roles_with_adapters_save_adapters_whatever_the_shared_rank_says(tmp_path):
    result = train(tmp_path, lora={"rank": 0} | ROLES["lora"], trainer={"total_steps": 1}, val=0)
    assert (result["adapter"], result["model"]) == ("adapter", None)
    assert (tmp_path / "runs" / "latest" / "adapter" / "judge" / "adapter_config.json").is_file()

"""Fifty configs as people get them wrong: each ends with exit code 2 and one line that names the fix, before anything heavy is imported."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from rllm.cli import main

FLOW = Path(__file__).parents[2] / "examples" / "solver_judge" / "solver_judge_flow.py"
VERL = "actor_rollout_ref"

# argument -> what the line must say
MISSPELT = {
    # keys
    "lora.rnak=8": "did you mean 'lora.rank'?",
    "lora.ranks=8": "did you mean 'lora.rank'?",
    "lora_rank=8": "did you mean 'lora.rank'?",
    "LORA.RANK=8": "did you mean 'lora.rank'?",
    "lora.apha=8": "did you mean 'lora.alpha'?",
    "lora_alpha=8": "did you mean 'lora.alpha'?",
    "lora.target_module=all-linear": "did you mean 'lora.target_modules'?",
    "lora.exclude_module=[lm_head]": "did you mean 'lora.exclude_modules'?",
    "lora.droput=0.1": "did you mean 'lora.dropout'?",
    "modle.path=default": "did you mean 'model.path'?",
    "model.pth=default": "did you mean 'model.path'?",
    "model_name=default": "did you mean 'model.path'?",
    "data.train_file=x.jsonl": "did you mean 'data.train_files'?",
    "data.batch_size=8": "did you mean 'data.train_batch_size'?",
    "batch_size=8": "did you mean 'data.train_batch_size'?",
    "data.max_respons_length=8": "did you mean 'data.max_response_length'?",
    "rollout.temprature=1": "did you mean 'rollout.temperature'?",
    "temperature=1": "did you mean 'rollout.temperature'?",
    "num_generations=4": "did you mean 'rollout.n'?",
    "group_size=4": "did you mean 'rollout.n'?",
    "lr=1e-5": "did you mean 'optim.lr'?",
    "optim.learning_rate=1e-5": "did you mean 'optim.lr'?",
    "optm.lr=1e-5": "did you mean 'optim.lr'?",
    "optim.weight_decy=0": "did you mean 'optim.weight_decay'?",
    "max_grad_norm=1": "did you mean 'optim.grad_clip'?",
    "algorithm.adv_estimater=grpo": "did you mean 'algorithm.adv_estimator'?",
    "algorithm.clip_ratio_hihg=0.28": "did you mean 'algorithm.clip_ratio_high'?",
    "trainer.total_step=5": "did you mean 'trainer.total_steps'?",
    "trainer.max_steps=5": "did you mean 'trainer.total_steps'?",
    "trainer.eval_freq=5": "did you mean 'trainer.test_freq'?",
    "trainer.loger=console": "did you mean 'trainer.logger'?",
    "gateway.prot=8000": "did you mean 'gateway.port'?",
    "distill.techer=default": "did you mean 'distill.teacher'?",
    f"{VERL}.model.lora_rnak=8": f"did you mean '{VERL}.model.lora_rank'?",
    f"{VERL}.actor.optim.learning_rate=1e-5": "did you mean 'optim.lr'?",
    f"{VERL}.rollout.temprature=1": f"did you mean '{VERL}.rollout.temperature'?",
    # values
    "lora.rank=-1": "lora.rank=-1: input should be greater than or equal to 0; allowed: whole number",
    "lora.rank=8x": "lora.rank=8x: input should be a valid integer",
    "lora.rank=1.5": "allowed: whole number",
    "lora.alpha=0": "lora.alpha=0: input should be greater than 0",
    'lora.target_modules=["all-linear"]': "write target_modules=all-linear",
    "optim.lr=fast": "optim.lr=fast: input should be a valid number",
    "optim.lr=1e-5,1e-4": "optim.lr=1e-5,1e-4: input should be a valid number",
    "rollout.n=1": "set rollout.n to at least 2, or algorithm.adv_estimator",
    "rollout.top_p=0.9": "set rollout.top_p=1",
    "rollout.temperature=0": "use a temperature above 0",
    "algorithm.adv_estimator=grop": "did you mean 'grpo'?",
    "algorithm.grpo_std=pop": "allowed: sample | population | none",
    "backend=tinkr": "backend=tinkr",
    "model.dtype=fp16": "allowed: auto | float32 | bfloat16",
    "trainer.seed=one": "trainer.seed=one: input should be a valid integer",
    "trainer.logger=[wandbb]": "did you mean 'wandb'?",
    "optim.beta2=1": "optim.beta2=1: input should be less than 1",
    "rollout.temperature=1e-6": "input should be 0 (greedy) or at least 1e-05",
    "lora.rank=&a [*a]": "the value holds itself",
    "data.shuffle=perhaps": "data.shuffle=perhaps: input should be a valid boolean",
    # forms
    "--lora.rank=8": "settings are written without dashes: lora.rank=8",
    "lora.rank": "expected key=value",
    "~lora.rank": "keys cannot be removed",
}
SAMPLE = [*list(MISSPELT)[::7], "rollout.n=1", "--lora.rank=8"]
AS_PROCESSES = [*SAMPLE, *(pytest.param(one, marks=pytest.mark.slow) for one in MISSPELT if one not in SAMPLE)]


def said(code, text):
    assert code == 2, text
    assert text.startswith("error: ") and text.count("\n") == 1 and text.endswith("\n"), text
    return text


def test_there_are_fifty():
    assert len(MISSPELT) >= 50 and len(SAMPLE) >= 10


@pytest.mark.parametrize("argument", MISSPELT)
def test_a_mistake_is_exit_code_2_and_one_line_with_the_fix(argument, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rllm", "train", str(FLOW), argument])
    with pytest.raises(SystemExit) as end:
        main()
    assert MISSPELT[argument] in said(end.value.code, capsys.readouterr().err)


@pytest.mark.parametrize("argument", AS_PROCESSES)
def test_as_a_process_it_takes_less_than_a_second_of_work_and_no_torch(argument, tmp_path):
    script = (
        "import sys, time\n"
        "from rllm.cli import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    heavy = {'torch', 'transformers', 'peft', 'openai', 'fastapi'} & set(sys.modules)\n"
        "    print(sorted(heavy), time.process_time())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "train", str(FLOW), argument], capture_output=True, text=True, cwd=tmp_path
    )
    assert MISSPELT[argument] in said(done.returncode, done.stderr)
    heavy, _, seconds = done.stdout.rpartition(" ")
    # the flow's own module may bring an estimator of that name, so it was run, and imports the client
    assert heavy == ("['openai']" if "adv_estimator=grop" in argument else "[]") and float(seconds) < 1.0
    assert not (tmp_path / "runs").exists()


def test_the_command_itself_answers_within_a_second():
    def seconds():
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "rllm.cli", "train", str(FLOW), "lora.rnak=8"], capture_output=True, text=True
        )
        said(done.returncode, done.stderr)
        return time.monotonic() - started

    assert min(seconds() for _ in range(5)) < 1.0


def test_names_that_the_flows_own_module_may_define_are_judged_after_it_ran(tmp_path, monkeypatch, capsys):
    flow = tmp_path / "a_flow_that_brings_an_estimator.py"
    flow.write_text("print('user code ran')\nimport rllm\n")
    for argument, ran in (
        ("algorithm.adv_estimator=my_own", True),
        ("algorithm.per_role={judge: my_own}", True),
        ("algorithm.per_role={judge: {loss: my_own}}", True),
        ("rollout.n=1", False),
    ):
        monkeypatch.setattr(sys, "argv", ["rllm", "train", str(flow), argument])
        with pytest.raises(SystemExit):
            main()
        assert ("user code ran" in capsys.readouterr().out) == ran


def test_an_estimator_and_a_loss_of_one_role_may_come_from_the_flows_own_module(tmp_path):
    flow = tmp_path / "brings_both.py"
    flow.write_text(
        "import rllm\n\n"
        "@rllm.register_advantage('brought')\ndef brought(groups):\n    raise AssertionError\n\n"
        "@rllm.register_loss('brought_too')\ndef brought_too(*given):\n    raise AssertionError\n\n"
        "@rllm.rollout\nasync def flow(task, config):\n    pass\n\n"
        "@rllm.evaluator\ndef evaluate(task, episode):\n    return 0.0\n"
    )
    for names, code in (("adv_estimator: brought, loss: brought_too", 0), ("adv_estimator: bruoght", 2)):
        argument = f"algorithm.per_role={{judge: {{{names}}}}}"
        command = [sys.executable, "-m", "rllm.cli", "train", str(flow), argument, "--show-config"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        if code:
            assert "per_role.judge.adv_estimator=bruoght: unknown (did you mean 'brought'?)" in said(2, done.stderr)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lora:\n  rnak: 8\n", "my.yaml: unknown key 'lora.rnak'; did you mean 'lora.rank'?"),
        ("lora:\n  rank: eight\n", "my.yaml: lora.rank=eight: input should be a valid integer"),
        ("lora: {rank: 8\n", "my.yaml: not valid YAML"),
        ("lora: 8\n", "my.yaml: lora=8: lora is a section"),
        ("rollout: {n: 1}\n", "my.yaml: rollout.n=1"),
        ("data: {val_size: '${data.batch}'}\n", "there is no key 'data.batch'"),
        ("- lora\n", "my.yaml: found list"),
    ],
)
def test_a_mistake_in_a_file_names_the_file(text, says, tmp_path, monkeypatch, capsys):
    (tmp_path / "my.yaml").write_text(text)
    monkeypatch.setattr(sys, "argv", ["rllm", "train", str(FLOW), "--config", str(tmp_path / "my.yaml")])
    with pytest.raises(SystemExit) as end:
        main()
    assert says in said(end.value.code, capsys.readouterr().err)

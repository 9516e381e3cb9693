"""The command line says what is wrong in one line, exits with 2, and shows no traceback."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOW = ROOT / "examples" / "solver_judge" / "solver_judge_flow.py"


def rllm(*arguments, **more):
    return subprocess.run(
        [sys.executable, "-m", "rllm.cli", *map(str, arguments)], capture_output=True, text=True, timeout=120, **more
    )


def refused(*arguments, **more):
    done = rllm(*arguments, **more)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_version_and_help_list_every_key():
    assert rllm("--version").stdout.startswith("rllm 0.")
    text = rllm("train", "--help").stdout
    assert "lora.rank=8" in text and "trainer.total_steps=null" in text and "Rank of the adapter" in text


def test_an_unknown_key_is_refused_before_anything_loads():
    started = time.monotonic()
    assert "did you mean 'lora.rank'" in refused("train", FLOW, "lora.rnak=8")
    assert time.monotonic() - started < 10


def test_a_refused_run_leaves_no_folder(tmp_path):
    assert "model.path" in refused("train", FLOW, "model.path=./nothing", cwd=tmp_path)
    assert "experiment_name" in refused("train", FLOW, "trainer.experiment_name=../x", "--show-config", cwd=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("x = 1", "expected one function decorated with @rllm.rollout"),
        ("import rllm\n@rllm.rollout\nasync def f(task, config): pass\n", "needs exactly one @rllm.evaluator"),
    ],
)
def test_a_target_that_cannot_be_run_is_explained(tmp_path, text, message):
    file = tmp_path / "my_flow.py"
    if text is not None:
        file.write_text(text)
    assert message in refused("train", file)


def test_missing_model_and_missing_data_are_explained(tmp_path):
    assert "no folder './nowhere'" in refused("train", FLOW, "model.path=./nowhere", cwd=tmp_path)
    assert "does not exist" in refused("train", FLOW, "data.train_files=nothing.jsonl", cwd=tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    assert "no rows" in refused("train", FLOW, "data.train_files=empty.jsonl", cwd=tmp_path)
    assert "--k '0'" in refused("eval", FLOW, "--k", "0")
    assert "at most 10,000" in refused("eval", FLOW, "--k", "1,99999999999")
    assert f"--out {tmp_path}: it is a folder" in refused("eval", FLOW, "--out", tmp_path)
    assert "has no adapter_config.json" in refused("eval", FLOW, "--adapter", tmp_path)


def test_show_config_prints_values_and_sources_and_trains_nothing(tmp_path):
    done = rllm("train", FLOW, "--show-config", "actor_rollout_ref.model.lora_rank=32", cwd=tmp_path)
    assert done.returncode == 0 and not (tmp_path / "runs").exists()
    assert "lora.rank=32" in done.stdout and "argument (as actor_rollout_ref.model.lora_rank)" in done.stdout


def test_importing_rllm_takes_less_than_half_a_second():
    def seconds():
        started = time.monotonic()
        subprocess.run([sys.executable, "-c", "import rllm"], check=True)
        return time.monotonic() - started

    assert min(seconds() for _ in range(5)) < 0.5


def test_eval_prints_json_with_pass_at_k(tmp_path):
    out = tmp_path / "result.json"
    done = rllm(
        "eval", FLOW, "--k", "1,2", "--out", out, "data.val_size=4", "data.max_response_length=32", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads(out.read_text())
    assert result["tasks"] == 4 and result["episodes"] == 8 and result["failed"] == 0
    assert {"val/countdown/pass@1", "val/countdown/pass@2", "val/countdown/solver_acc"} <= set(result["metrics"])


def test_sft_writes_an_adapter_from_a_chat_file(tmp_path):
    chats = [{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]}] * 8
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    done = rllm("sft", "chats.jsonl", "trainer.out=out", "trainer.total_steps=2", "lora.rank=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert json.loads((tmp_path / "out" / "result.json").read_text())["steps"] == 2
    assert "unknown key" in refused("sft", "chats.jsonl", "optim.lrr=1", cwd=tmp_path)

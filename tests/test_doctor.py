"""`rllm doctor` says what is there, and what keeps the default backend from running with the line that mends it."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from dataclasses import fields

import pytest
import torch

from rllm import doctor
from rllm.backends.base import CAPABILITIES, Capabilities
from rllm.backends.local.backend import LocalBackend
from rllm.errors import ModelError


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "rllm.cli", "doctor", *arguments], capture_output=True, text=True)


def test_a_machine_that_can_run_is_ready_and_the_report_is_the_same_in_json_and_text():
    done = run("--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["can_run"] and report["packages"]["torch"]["installed"] == torch.__version__
    assert report["model"]["parameters"] > 10**6 and report["model"]["sampled_tokens"] >= 1
    assert report["devices"]["cpu"]["cores"] >= 1 and report["devices"]["cpu"]["memory_bytes"] > 10**8
    assert set(report["backends"]) == set(CAPABILITIES)
    assert set(report["backends"]["local"]) == {column.name for column in fields(Capabilities)}
    assert report["model"]["path"].startswith("own decoder")
    text = run().stdout
    assert "ready: the local backend runs here" in text and torch.__version__ in text
    for name in (*report["packages"], *report["backends"]["local"]):
        assert name in text


def without(name):
    version = importlib.metadata.version

    def missing(asked):
        if asked == name:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(asked)

    return missing


def test_a_missing_package_is_told_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", without("transformers"))
    report = doctor.examine()
    assert not report.can_run and report.model == {}
    assert [(p.what, p.fix) for p in report.problems] == [
        ("transformers is not installed (needed: >=5.9)", "pip install 'transformers>=5.9'")
    ]
    assert "PROBLEM: transformers is not installed" in doctor.as_text(report)
    assert "not ready" in doctor.as_text(report)


def test_a_package_that_is_too_old_is_told(monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.1+cu128" if name == "torch" else version(name))
    assert [p.what for p in doctor.examine().problems] == ["torch 2.9.1+cu128 is too old (needed: >=2.11)"]


def test_an_optional_package_that_is_missing_is_no_problem(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", without("tensorboard"))
    report = doctor.examine()
    assert report.can_run and report.extras["tensorboard"]["tensorboard"]["installed"] is None
    assert "pip install 'rllm[tensorboard]'" in doctor.as_text(report)


def test_a_package_of_which_one_version_is_needed_is_told_when_it_is_another(monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.8.0" if name == "verl" else version(name))
    report = doctor.examine()
    assert report.can_run and report.extras["verl"]["verl"] == {"installed": "0.8.0", "needed": "==0.9.1", "ok": False}
    assert re.search(r"verl +0\.8\.0 +optional, needed ==0\.9\.1: pip install 'rllm\[verl\]'", doctor.as_text(report))


def test_a_backend_that_cannot_load_its_model_is_a_problem_with_the_reason_and_the_command_exits_with_1(monkeypatch):
    def refuse(config):
        raise ModelError("model.path: weights are gone")

    monkeypatch.setattr(LocalBackend, "create", refuse)
    report = doctor.examine()
    assert not report.can_run and "weights are gone" in report.problems[0].what
    from typer.testing import CliRunner

    from rllm.cli.commands import app

    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1 and "weights are gone" in done.output


def test_a_gpu_that_torch_cannot_see_is_noted_and_blocks_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    report = doctor.examine()
    assert report.can_run and ["sees no CUDA device" in p.what for p in report.problems] == [True]


def test_a_full_disk_and_a_read_only_folder_are_told(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "_try_backend", lambda report, model: None)
    monkeypatch.setattr(doctor, "LEAST_FREE_BYTES", 10**18)
    assert "are free in" in doctor.examine().problems[0].what
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    report = doctor.examine()
    assert not report.can_run and "read-only" in report.problems[0].what


@pytest.mark.parametrize(
    ("version", "numbers"), [("2.13.0+cpu", (2, 13, 0)), ("5.17", (5, 17)), ("2.11.0rc1", (2, 11, 0))]
)
def test_versions_are_compared_by_their_numbers(version, numbers):
    assert doctor._numbers(version) == numbers

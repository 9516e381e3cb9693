"""What `rllm train TARGET` finds in a file or module, and how it says what is missing."""

import random
import sys
from pathlib import Path

import pytest

from rllm.cli.target import load_target, peek_defaults
from rllm.errors import UserError

FLOW = """
import rllm

@rllm.rollout
async def {name}(task, config):
    return None
"""
EVALUATOR = """
@rllm.evaluator
def judge(task, episode):
    return 1.0
"""
WORKFLOW = """
import rllm

class {name}(rllm.Workflow):
    async def run(self, task, uid, **kwargs):
        return None
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a flow file. Import state is put back afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))

    def write(text, name="a_flow_for_this_test.py") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def test_a_file_gives_its_flow_evaluator_defaults_and_datasets(write):
    more = "DEFAULTS = {'lora.rank': 4}\ndef train_dataset(config): return [1]\ndef val_dataset(config): return [2]\n"
    target = load_target(str(write(FLOW.format(name="solve") + EVALUATOR + more)))
    assert target.flow is not None and target.flow.name == "solve" and target.workflow_class is None
    assert target.evaluator is not None and target.defaults == {"lora.rank": 4}
    assert target.train_dataset is not None and target.train_dataset(None) == [1]
    assert target.val_dataset is not None and target.val_dataset(None) == [2]


def test_one_of_several_flows_is_chosen_by_name(write):
    file = write(FLOW.format(name="first") + FLOW.format(name="second") + EVALUATOR)
    target = load_target(f"{file}:second")
    assert target.flow is not None and target.flow.name == "second"
    with pytest.raises(UserError, match=r"found first, second; say which: .*:first"):
        load_target(str(file))
    with pytest.raises(UserError, match="no flow or workflow called 'third'; it has first, second"):
        load_target(f"{file}:third")


def test_a_workflow_class_needs_no_evaluator_and_a_flow_beside_it_comes_first(write):
    target = load_target(str(write(WORKFLOW.format(name="MyWorkflow"))))
    assert target.flow is None and target.evaluator is None
    assert target.workflow_class is not None and target.workflow_class.__name__ == "MyWorkflow"
    both = write(WORKFLOW.format(name="MyWorkflow") + FLOW.format(name="solve") + EVALUATOR, "both_for_this_test.py")
    assert load_target(str(both)).flow is not None
    chosen = load_target(f"{both}:MyWorkflow").workflow_class
    assert chosen is not None and chosen.__name__ == "MyWorkflow"


def test_an_evaluator_under_two_names_is_one_evaluator(write):
    assert load_target(str(write(FLOW.format(name="solve") + EVALUATOR + "again = judge\n"))).evaluator is not None


def test_a_module_on_the_path_is_found_by_its_dotted_name(write):
    file = write(FLOW.format(name="solve") + EVALUATOR, "a_module_for_this_test.py")
    sys.path.insert(0, str(file.parent))
    assert load_target("a_module_for_this_test").flow is not None
    with pytest.raises(UserError, match="no module 'nowhere_at_all'"):
        load_target("nowhere_at_all")


def test_a_file_may_import_its_neighbours(write):
    write("ANSWER = 42\n", "a_neighbour_for_this_test.py")
    text = "from a_neighbour_for_this_test import ANSWER\n" + FLOW.format(name="solve") + EVALUATOR
    assert load_target(str(write(text))).flow is not None


def test_a_flow_named_like_a_standard_module_does_not_take_its_place(write):
    assert load_target(str(write(FLOW.format(name="solve") + EVALUATOR, "random.py"))).flow is not None
    assert sys.modules["random"] is random


def test_an_error_in_the_users_own_file_keeps_its_traceback(write):
    with pytest.raises(ZeroDivisionError):
        load_target(str(write("1 / 0\n")))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("DEFAULTS = {'lora.rank': 4, 'optim': {'lr': 1e-3}}\n", {"lora.rank": 4, "optim": {"lr": 1e-3}}),
        ("x = 1\n", {}),
        ("DEFAULTS = make()\n", None),
        ("DEFAULTS = {'lora.rank': RANK}\n", None),
        ("DEFAULTS = {}\nDEFAULTS['lora.rank'] = 4\n", None),
        ("from elsewhere import DEFAULTS\n", None),
        ("from elsewhere import *\n", None),
        ("if True:\n    DEFAULTS = {}\n", None),
        ("DEFAULTS = [1]\n", None),
        ("def broken(:\n", None),
    ],
)
def test_defaults_are_read_without_running_the_file_where_that_is_sure(write, text, found):
    file = write(text + "import surely_no_such_module\n")
    assert peek_defaults(f"{file}:name") == found
    assert peek_defaults("a.module") is None and peek_defaults("nowhere.py") is None

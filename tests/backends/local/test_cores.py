"""Threads that computed let go of their workers when their turn ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, torch
from rllm.backends.local import cores
torch.set_num_threads(2)
count = lambda: len(os.listdir("/proc/self/task"))
x = torch.ones(2**22)
cores.release()
before = count()
with cores.turn():
    x.exp()
    during = count()
after = count()
x.exp()
print(during - before, after - before, count() - before, cores._pause() is not None)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux shows them")
def test_a_turn_leaves_no_workers_and_the_next_gets_new_ones():
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=True)
    during, after, again, known = done.stdout.split()
    if known == "False":
        pytest.skip("torch computes with another OpenMP than GNU's")
    assert (during, after, again) == ("1", "0", "1")

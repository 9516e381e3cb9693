"""``python -m rllm.cli``: the same as `rllm`."""

from rllm.cli import main

main()

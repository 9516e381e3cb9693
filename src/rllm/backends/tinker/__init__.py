"""Training through Tinker's API: the official SDK as client of the hosted service or of ``rllm serve``."""

from conftest_tinker import backend, client, sdk, served, training  # noqa: F401 - fixtures

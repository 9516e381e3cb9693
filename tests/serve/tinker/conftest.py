from tinker_server import backend, client, sdk, served, training  # noqa: F401 - fixtures

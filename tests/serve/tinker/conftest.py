from tinker_server import backend, client, no_session_left, sdk, served, training  # noqa: F401 - fixtures

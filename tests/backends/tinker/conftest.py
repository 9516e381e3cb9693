from tinker_server import backend, no_session_left, sdk, served  # noqa: F401 - fixtures

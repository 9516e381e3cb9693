from tinker_server import backend, sdk, served  # noqa: F401 - fixtures

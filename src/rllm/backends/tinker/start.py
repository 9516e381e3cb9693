"""What a config says in the service's words before a run is made: base model, layers, alpha, tokenizer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from rllm.backends.local.loading import DEFAULT_MODEL, load_tokenizer
from rllm.backends.tinker.connection import Connection, Server
from rllm.config.schema import Config, LoraConfig, LoraSettings
from rllm.errors import ConfigError
from rllm.lora.groups import module_groups

HOSTED_ALPHA = 32.0


def base_model(config: Config) -> str:
    """The service's name of the model: ``model.path`` as it is."""
    return config.model.path


def longest(config: Config, connection: Connection, base: str) -> int:
    """Longest sequence: what the config says, or prompt + response limits; never more than the server says of the model, nor, where there
    is a KL, than can be asked of the reference: the API scores a text only with room for one token more."""
    rest = partial(connection.sdk.RestClient, base_url=connection.server.url, api_key=connection.server.key)
    try:
        told = connection.begin(lambda: rest().get_server_capabilities(), "asking which models there are")
        able = next((m.max_context_length for m in told.supported_models if m.model_name == base), None)
    except ConfigError:
        able = None  # not every server has that route, and nothing else depends on it
    why, a = "", config.algorithm
    if able is not None and (a.kl_beta or a.kl_in_reward):
        able, why = able - 1, " with a KL, whose reference is asked for one more than it scores"
    wanted, usual = config.model.max_model_len, config.data.max_prompt_length + config.data.max_response_length
    if wanted is not None and able is not None and wanted > able:
        raise ConfigError(
            f"model.max_model_len={wanted}: {base} on {connection.server.url} can do at most {able} tokens{why}"
        )
    return wanted or min(able or usual, usual)


def lora_flags(settings: LoraSettings) -> dict[str, bool]:
    """``train_attn``, ``train_mlp`` and ``train_unembed`` of an adapter. Raises `ConfigError` where they leave nothing."""
    groups = module_groups(settings.target_modules)
    assert groups is not None  # others are refused before
    flags = {
        "train_attn": groups.attention and settings.train_attn,
        "train_mlp": groups.mlp and settings.train_mlp,
        "train_unembed": groups.head or settings.train_unembed,
    }
    if not any(flags.values()):
        raise ConfigError(
            f"lora.target_modules={settings.target_modules!r} with train_attn={settings.train_attn}, train_mlp={settings.train_mlp}, "
            f"train_unembed={settings.train_unembed} leaves no module to train"
        )
    return flags


def check_project(config: Config, server: Server) -> None:
    """Raise `ConfigError` where a project is named to a server that has none."""
    if server.about is not None and config.tinker.project is not None:
        raise ConfigError(
            f"tinker.project={config.tinker.project}: {server.url} is rllm serve, which has no projects; leave it out"
        )


def check_alpha(lora: LoraConfig, server: Server) -> None:
    """Raise `ConfigError` where an alpha is asked for that the server does not take."""
    if server.about is not None:
        return
    for name, settings in lora.adapters().items():
        if settings.alpha == HOSTED_ALPHA:
            continue
        key = "lora.alpha" if lora.per_role == "shared" else f"lora.per_role.{name}.alpha"
        given = "" if {"alpha", "per_role"} & lora.model_fields_set else " (the default)"
        raise ConfigError(
            f"{key}={settings.alpha:g}{given}: the hosted service takes no alpha, it has 32, so at lora.rank={settings.rank} an update is "
            f"scaled by 32 / {settings.rank} = {HOSTED_ALPHA / settings.rank:g} where {settings.alpha / settings.rank:g} is asked for; set "
            "lora.alpha=32 to say so (docs/tinker.md: scale and learning rate)"
        )


def load_tokenizer_of(config: Config, sampler: Any) -> Any:
    """The tokenizer: ``tinker.tokenizer``, else that of a model folder on this machine, else the one that the server names."""
    if config.tinker.tokenizer is not None:
        return load_tokenizer(Path(config.tinker.tokenizer), "tinker.tokenizer")
    local = DEFAULT_MODEL if config.model.path == "default" else Path(config.model.path).expanduser()
    if local.is_dir():
        return load_tokenizer(local)
    try:
        tokenizer = sampler.get_tokenizer()
    except Exception as error:  # the hub client raises many kinds
        raise ConfigError(
            f"model.path={config.model.path}: its tokenizer cannot be had ({type(error).__name__}: {str(error).splitlines()[0]}); name a "
            "folder with tinker.tokenizer="
        ) from error
    if not tokenizer.chat_template or tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model.path={config.model.path}: its tokenizer has no chat template or no eos_token; name another with tinker.tokenizer="
        )
    return tokenizer

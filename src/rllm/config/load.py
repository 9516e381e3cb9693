"""From files, dicts and `key=value` arguments to a checked config that remembers where each value came from.

Knows the schema and the alias tables; loads no model.
"""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from rllm.config.aliases import ALIASES, SPREAD, no_effect_reason
from rllm.config.schema import Config
from rllm.errors import ConfigError

M = TypeVar("M", bound=BaseModel)

FULL_FINETUNING_LR = 2e-6
LORA_BATCH_CAP = 64
# Values that verl knows and that are planned here: refused by name, not as typos.
KNOWN_ESTIMATORS = ("rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae", "remax", "opo", "prpo")
KNOWN_AGGREGATIONS = ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "sum-norm")
KNOWN_LOSSES = ("importance_sampling", "cispo", "gspo", "dro", "reinforce", "vanilla", "cross_entropy")


@dataclass
class Resolved(Generic[M]):
    """A config and its history: `provenance` says for each key that is not a default where it came from."""

    config: M
    provenance: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def load_config(
    files: Sequence[str | Path] = (),
    overrides: Sequence[str] = (),
    base: Any = None,
    defaults: Mapping[str, Any] | None = None,
) -> Resolved[Config]:
    """The training config. Later wins: built-in defaults, `defaults` (dotted keys), `base` (dict, `Config`, OmegaConf tree or what
    this function returned), files, overrides."""
    resolved = load_model(Config, files, overrides, base, defaults, aliases=True)
    resolved.notes += check(resolved.config)
    return resolved


def load_model(
    kind: type[M],
    files: Sequence[str | Path] = (),
    overrides: Sequence[str] = (),
    base: Any = None,
    defaults: Mapping[str, Any] | None = None,
    aliases: bool = False,
) -> Resolved[M]:
    """The same for any config tree."""
    known = dict(leaves(kind))
    values: dict[str, Any] = {}
    provenance: dict[str, str] = {}
    spelled: dict[str, tuple[str, Any, str]] = {}
    notes: list[str] = []
    for source, key, value in _sources(files, overrides, base, defaults):
        for name in _fields_of(key, value, source, known, aliases, notes):
            earlier = spelled.get(name)
            if earlier and earlier[2] == source and earlier[0] != key and earlier[1] != value:
                raise ConfigError(
                    f"{source}: {earlier[0]}={earlier[1]!r} and {key}={value!r} both set {name}, differently; give one"
                )
            spelled[name] = (key, value, source)
            values[name] = value
            provenance[name] = source if key == name else f"{source} (as {key})"
    if isinstance(base, Resolved):
        provenance = {k: base.provenance.get(k, v) if v == "config object" else v for k, v in provenance.items()}
        notes = [*base.notes, *notes]
    try:
        config = kind.model_validate(_nest(values))
    except ValidationError as error:
        raise ConfigError(_explain(error, spelled, known)) from None
    return Resolved(config, provenance, list(dict.fromkeys(notes)))


def check(config: Config) -> list[str]:
    """Errors between fields, and notes worth a line at the start."""
    a, notes = config.algorithm, []
    _one_of("algorithm.adv_estimator", a.adv_estimator, ("grpo", "reinforce"), KNOWN_ESTIMATORS)
    _one_of("algorithm.loss", a.loss, ("ppo_clip",), KNOWN_LOSSES)
    _one_of("algorithm.loss_agg_mode", a.loss_agg_mode, ("token-mean",), KNOWN_AGGREGATIONS)
    if a.kl_beta > 0:
        raise ConfigError(f"algorithm.kl_beta={a.kl_beta:g}: the KL term is not built yet; leave it at 0")
    if a.adv_estimator == "grpo" and config.rollout.n < 2 and not config.trainer.val_only:
        raise ConfigError(
            "rollout.n=1 with algorithm.adv_estimator=grpo: a group of one has nothing to compare with, so nothing would be "
            "trained; set rollout.n to at least 2, or algorithm.adv_estimator=reinforce"
        )
    if not config.trainer.val_only:
        if config.rollout.top_p != 1.0:
            raise ConfigError(
                f"rollout.top_p={config.rollout.top_p:g}: the log-probabilities trained on would not be those sampled from; "
                "set rollout.top_p=1"
            )
        if config.rollout.temperature == 0:
            raise ConfigError("rollout.temperature=0: greedy samples are all the same; use a temperature above 0")
    for name in config.trainer.logger:
        _one_of("trainer.logger", name, ("console", "tensorboard"), ("wandb", "mlflow", "swanlab"))
    if config.lora.rank and config.optim.lr <= FULL_FINETUNING_LR:
        notes.append(
            f"optim.lr={config.optim.lr:g} is a rate for full fine-tuning; LoRA usually wants about 10x: {10 * config.optim.lr:g}"
        )
    if config.lora.rank and config.data.train_batch_size > LORA_BATCH_CAP:
        notes.append(
            f"data.train_batch_size={config.data.train_batch_size}: LoRA is said to tolerate large batches less; 32 to 64 is common"
        )
    return notes


def leaves(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, pydantic field) of every leaf of a config tree."""
    for name, info in kind.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from leaves(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def reference(kind: type[BaseModel] = Config) -> list[tuple[str, str, str]]:
    """(key, default, description) of every key, for help and docs."""
    rows = []
    for key, info in leaves(kind):
        default = info.get_default(call_default_factory=True)
        rows.append((key, "null" if default is None else _show(default), info.description or ""))
    return rows


def show_config(resolved: Resolved[Any]) -> str:
    """Every key with its value and where it came from."""
    flat = dict(_flatten(resolved.config.model_dump()))
    width = max(len(f"{key}={_show(value)}") for key, value in flat.items())
    lines = [
        f"{f'{key}={_show(value)}':<{width}}  # {resolved.provenance.get(key, 'default')}" for key, value in flat.items()
    ]
    return "\n".join([*lines, *(f"# note: {note}" for note in resolved.notes)])


def to_yaml(config: BaseModel) -> str:
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _sources(
    files: Sequence[str | Path], overrides: Sequence[str], base: Any, defaults: Mapping[str, Any] | None
) -> Iterator[tuple[str, str, Any]]:
    """(source, key, value) in rising precedence."""
    for key, value in (defaults or {}).items():
        yield "example default", key, value
    if base is not None:
        for key, value in _flatten(_as_mapping(base)):
            yield "config object", key, value
    for name in files:
        for key, value in _flatten(_read_yaml(Path(name))):
            yield str(name), key, value
    for override in overrides:
        yield "argument", *_parse_override(override)


def _as_mapping(base: Any) -> Mapping[str, Any]:
    if isinstance(base, Resolved):
        base = base.config
    if isinstance(base, BaseModel):
        return base.model_dump()
    if type(base).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        base = OmegaConf.to_container(base, resolve=True)
    if not isinstance(base, Mapping):
        raise ConfigError(f"config: found {type(base).__name__}; give a dict, a Config, an OmegaConf tree or load_config(...)")
    return base


def _read_yaml(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise ConfigError(f"config file {str(path)!r} does not exist")
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: found {type(tree).__name__}; the file must hold key: value pairs")
    return {str(key): value for key, value in tree.items()}


def _parse_override(text: str) -> tuple[str, Any]:
    """``key=value`` with a YAML value. ``+key=value`` is the same; ``~key`` has no meaning here and is explained."""
    if text.startswith("~"):
        raise ConfigError(f"argument {text!r}: keys cannot be removed; give the value you want, e.g. {text[1:].split('=')[0]}=null")
    key, equals, value = text.lstrip("+").partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"argument {text!r}: expected key=value")
    try:
        return key.strip(), _number_like(yaml.safe_load(value)) if value else None
    except yaml.YAMLError:
        return key.strip(), value


def _number_like(value: Any) -> Any:
    """YAML 1.1 reads ``1e-5`` as text; people mean the number."""
    if isinstance(value, str):
        try:
            return float(value) if "e" in value.lower() and value.lower() not in ("inf", "nan") else value
        except ValueError:
            return value
    return value


def _fields_of(
    key: str, value: Any, source: str, known: Mapping[str, Any], aliases: bool, notes: list[str]
) -> tuple[str, ...]:
    """The fields that a key, in whatever spelling, sets; unknown keys are errors, keys without effect are noted."""
    if key in known:
        return (key,)
    if aliases:
        if key in ALIASES:
            return (ALIASES[key],)
        if key in SPREAD:
            return SPREAD[key]
        if key in ("algorithm.norm_adv_by_std_in_grpo", "rllm.algorithm.norm_adv_by_std_in_grpo"):
            if value:
                return ()
            raise ConfigError(f"{source}: {key}={value}: write algorithm.grpo_std=none")
        reason = no_effect_reason(key)
        if reason is not None:
            notes.append(f"{key} has no effect here: {reason}")
            return ()
    candidates = [*known, *(ALIASES if aliases else ())]
    near = difflib.get_close_matches(key, candidates, n=1, cutoff=0.6) or _near_by_leaf(key, candidates)
    hint = f"; did you mean {near[0]!r}?" if near else "; `rllm train --help` lists all keys"
    raise ConfigError(f"{source}: unknown key {key!r}{hint}")


def _near_by_leaf(key: str, candidates: Iterable[str]) -> list[str]:
    leaf = key.rpartition(".")[2]
    by_leaf = {name.rpartition(".")[2]: name for name in reversed(list(candidates))}
    return [by_leaf[name] for name in difflib.get_close_matches(leaf, by_leaf, n=1)]


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, leaf = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    return tree


def _explain(error: ValidationError, spelled: Mapping[str, tuple[str, Any, str]], known: Mapping[str, Any]) -> str:
    """One line for the first bad value: where, key, found, allowed."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    field_name = next((key for key in known if name == key or name.startswith(key + ".")), name)
    key, value, source = spelled.get(field_name, (field_name, first.get("input"), "config"))
    info = known.get(field_name)
    allowed = f"; allowed: {_type_name(info.annotation)}" if info is not None else ""
    message = first["msg"][0].lower() + first["msg"][1:]
    about = f" ({info.description})" if info is not None and info.description else ""
    return f"{source}: {key}={_show(value)}: {message}{allowed}{about}"


def _type_name(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(map(str, typing.get_args(annotation)))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(_type_name(part) for part in typing.get_args(annotation))
    if typing.get_origin(annotation) is list:
        return "list of text"
    if typing.get_origin(annotation) is typing.Annotated:
        return _type_name(typing.get_args(annotation)[0])
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _one_of(key: str, value: str, allowed: Sequence[str], planned: Sequence[str]) -> None:
    if value in allowed:
        return
    choices = ", ".join(allowed)
    if value in planned:
        raise ConfigError(f"{key}={value}: not built yet; available are {choices}")
    near = difflib.get_close_matches(str(value), [*allowed, *planned], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{key}={value}: unknown{hint} Available are {choices}")


def _show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

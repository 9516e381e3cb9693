"""The schema that editors read: it takes what the loader takes, flags what the loader refuses, and says what every key is."""

import json
import re
from pathlib import Path

import pytest
import yaml

from rllm.config.json_schema import config_schema
from rllm.config.load import leaves, load_config, to_yaml
from rllm.config.schema import Config
from rllm.config.sources import read_yaml
from rllm.errors import ConfigError

ROOT = Path(__file__).parents[2]
SCHEMA = config_schema()
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "number": (int, float),
    "integer": int,
}


def problems(value, schema=SCHEMA, at=""):
    """What is wrong with `value`: the part of JSON schema that the schema uses, read strictly (an unknown keyword fails)."""
    found = []
    about = {"title", "description", "default", "$schema", "$defs"}
    for keyword, rule in schema.items():
        if keyword == "$ref":
            found += problems(value, SCHEMA["$defs"][rule.rpartition("/")[2]], at)
        elif keyword == "anyOf":
            found += [] if any(not problems(value, part, at) for part in rule) else [f"{at}: fits none of {rule}"]
        elif keyword == "type":
            kinds = rule if isinstance(rule, list) else [rule]
            fits = any(isinstance(value, TYPES[kind]) for kind in kinds)
            if not fits or (isinstance(value, bool) and "boolean" not in kinds):
                found.append(f"{at}: {value!r} is no {rule}")
        elif keyword in ("enum", "const"):
            allowed = rule if keyword == "enum" else [rule]
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
                found.append(f"{at}: {value!r} is not in {allowed}")
        elif keyword == "pattern":
            found += [] if not isinstance(value, str) or re.search(rule, value) else [f"{at}: {value!r} !~ {rule}"]
        elif keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
            if isinstance(value, (int, float)):
                low, strict = "inimum" in keyword, keyword.startswith("exclusive")
                distance = value - rule if low else rule - value
                found += [] if distance > 0 or (distance == 0 and not strict) else [f"{at}: {value} {keyword} {rule}"]
        elif keyword == "items":
            found += (
                [p for i, one in enumerate(value) for p in problems(one, rule, f"{at}[{i}]")]
                if isinstance(value, list)
                else []
            )
        elif keyword == "properties":
            for name, part in rule.items():
                if isinstance(value, dict) and name in value:
                    found += problems(value[name], part, f"{at}.{name}")
        elif keyword == "additionalProperties":
            patterns = schema.get("patternProperties", {})
            for name in value if isinstance(value, dict) else ():
                if name not in schema.get("properties", {}) and not any(re.search(p, name) for p in patterns):
                    found += (
                        [f"{at}: unknown {name}"]
                        if rule is False
                        else problems(value[name], {} if rule is True else rule, f"{at}.{name}")
                    )
        elif keyword not in about | {"patternProperties"}:
            raise AssertionError(f"the schema uses {keyword}, which this test does not know")
    return found


@pytest.mark.parametrize("file", sorted(ROOT.glob("examples/**/*.yaml")), ids=lambda file: file.name)
def test_every_example_file_fits_and_loads(file):
    assert problems(read_yaml(file)) == []
    load_config([file])


def test_there_is_an_example_file_with_the_line_that_editors_look_for():
    text = (ROOT / "examples/solver_judge/train_solver_judge.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=")


def test_every_key_has_its_description_and_default():
    for key, info in leaves(Config):
        part = SCHEMA
        for name in key.split("."):
            part = part["properties"][name]
        assert part["description"] == info.description
        if info.default_factory is None:
            assert part["default"] == info.default


def test_what_a_run_writes_fits():
    for overrides in (
        [],
        ["lora.per_role={solver: {rank: 4}, judge: {}}", "lora.rank_pattern={q_proj: 3}", "trainer.total_steps=3"],
    ):
        assert problems(yaml.safe_load(to_yaml(load_config(overrides=overrides).config))) == []


@pytest.mark.parametrize(
    "text",
    [
        "lora: {rank: 8}",
        "lora:",
        "lora.rank: 8",
        "rollout: {n: '${data.train_batch_size}'}",
        "algorithm: {adv_estimator: mine_as_registered, norm_adv_by_std_in_grpo: true}",
        "trainer: {test_freq: -1, logger: console, nnodes: 2}",
        "actor_rollout_ref: {model: {lora_rank: 8, lora: {rank: 4}}, rollout: {name: vllm, engine_kwargs: {vllm: {x: 1}}}}",
        "critic: {anything: {at: all}}",
        "rllm: {rollout: {n: 4}, mask_truncated_samples: false}",
    ],
)
def test_what_the_loader_takes_fits(text):
    assert problems(yaml.safe_load(text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "lora: {rnak: 8}",
        "lora: {rank: -1}",
        "lora: {rank: '8x'}",
        "lora: {rank: true}",
        "lora: {alpha: 0}",
        "lora: {per_role: {solver: {rnk: 8}}}",
        "optim: {lr: fast}",
        "backend: tinkr",
        "model: {dtype: fp16}",
        "algorithm: {grpo_std: pop}",
        "algorithm: {loss_agg_mode: mean}",
        "trainer: {logger: [wandbb]}",
        "trainer: {test_freq: -2}",
        "actor_rollout_ref: {model: {lora_rnak: 8}}",
        "custom_reward_function: {path: my.py}",
        "zzz: 1",
    ],
)
def test_what_the_loader_refuses_is_flagged(text, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert problems(yaml.safe_load(text)) != []
    with pytest.raises(ConfigError):
        load_config([file])


def test_it_is_plain_json_that_names_its_dialect_and_needs_no_network():
    text = json.dumps(SCHEMA, allow_nan=False)
    assert SCHEMA["$schema"].endswith("2020-12/schema")
    referred = set(re.findall(r'"\$ref": "([^"]*)"', text))
    assert "#/$defs/LoraSettings" in referred and referred == {f"#/$defs/{kind}" for kind in SCHEMA["$defs"]}

"""The commands themselves. What they do lives in `trainer`, `sft` and `serve`."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

import rllm
from rllm.backends.base import refuse_impossible
from rllm.config.check import ESTIMATORS, LOSSES
from rllm.config.explain import reference
from rllm.config.load import Resolved, load_config, load_model, show_config
from rllm.config.schema import Config
from rllm.config.sources import about_option
from rllm.errors import ConfigError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Reinforcement learning with LoRA for LLM agents.",
)


config_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="About config files.")
app.add_typer(config_app, name="config")


def _keys(kind: Any) -> str:
    """All config keys of a tree, as text that help output leaves as it is."""
    lines = [f"  {key}={default}\n      {text}" for key, default, text in reference(kind)]
    return "\b\nConfig keys and defaults (key=value; verl's spellings of them work too):\n" + "\n".join(lines)


def _no_options(context: typer.Context, value: Any) -> Any:
    """Options of Hydra and misspelt ones of ours reach the arguments: say what to write instead."""
    for text in value if isinstance(value, list) else [value or ""]:
        if text.startswith("-"):
            ours = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
            near = difflib.get_close_matches(text.partition("=")[0], ours, n=1, cutoff=0.8)
            raise ConfigError(f"argument {text!r}: " + (f"did you mean {near[0]}?" if near else about_option(text)))
    return value


# Of one task in an evaluation: all episodes of a task are asked for at once.
MOST_EPISODES = 10_000
PASSED_ON = {"ignore_unknown_options": True}  # to `_no_options`
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config overrides", callback=_no_options)
]
ConfigFiles = Annotated[list[Path] | None, typer.Option("--config", "-c", help="YAML config file; may be given again")]
TargetArgument = Annotated[
    str, typer.Argument(help="Python file or module with the flow; file.py:name picks one", callback=_no_options)
]


def _version(value: bool) -> None:
    if value:
        typer.echo(f"rllm {rllm.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version")
    ] = False,
) -> None:
    """Reinforcement learning with LoRA for LLM agents."""


@app.command(epilog=_keys(Config), context_settings=PASSED_ON)
def train(
    target: TargetArgument,
    overrides: Overrides = None,
    config: ConfigFiles = None,
    show: Annotated[
        bool, typer.Option("--show-config", help="Print the resolved config with its sources and stop")
    ] = False,
) -> None:
    """Train a flow with reinforcement learning."""
    from rllm.cli.target import load_target

    _check_first(target, config or (), overrides or ())
    found = load_target(target)
    resolved = load_config(config or (), overrides or (), defaults=found.defaults)
    refuse_impossible(resolved.config, resolved.provenance)
    if show:
        typer.echo(show_config(resolved))
        if resolved.config.backend == "verl":
            from rllm.backends.verl.render import preview

            typer.echo(preview(resolved.config))
        return
    from rllm.trainer import AgentTrainer

    AgentTrainer(
        agent_flow=found.flow,
        workflow_class=found.workflow_class,
        evaluator=found.evaluator,
        config=resolved,
        train_dataset=_dataset(found.train_dataset, resolved, resolved.config.data.train_files),
        val_dataset=_dataset(found.val_dataset, resolved, resolved.config.data.val_files),
    ).train()


@app.command("eval", context_settings=PASSED_ON)
def evaluate(
    target: TargetArgument,
    overrides: Overrides = None,
    config: ConfigFiles = None,
    adapter: Annotated[str, typer.Option(help="PEFT folder to sample with, or none: the model alone")] = "none",
    model: Annotated[
        str | None, typer.Option(help="The same as model.path=; with --base-url the endpoint's name of the model")
    ] = None,
    n: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_EPISODES, help="Episodes per task (default: rollout.n_val, at least the largest k)"
        ),
    ] = None,
    k: Annotated[str, typer.Option(help="Values of k for the unbiased pass@k, e.g. 1,4")] = "1",
    out: Annotated[Path | None, typer.Option(help="Also write the JSON result here")] = None,
    base_url: Annotated[
        str | None, typer.Option(help="Evaluate what this OpenAI endpoint serves, e.g. http://127.0.0.1:8000/v1")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="VAR", help="Environment variable with the endpoint's API key")
    ] = None,
    episodes: Annotated[
        Path | None,
        typer.Option(help="JSONL file to which each episode is written (with --base-url: one in trainer.run_dir)"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with --episodes: run what is missing or failed")
    ] = False,
) -> None:
    """Run a flow on its validation tasks without training, and print the result as JSON."""
    from rllm.cli.target import load_target

    try:
        ks = sorted({int(part) for part in k.split(",")})
    except ValueError:
        raise ConfigError(f"--k {k!r}: expected whole numbers with commas, e.g. 1,4") from None
    if not ks or ks[0] < 1 or ks[-1] > MOST_EPISODES:
        raise ConfigError(
            f"--k {k!r}: every k must be at least 1 and at most {MOST_EPISODES:,}, the episodes run for a task"
        )
    api_key = _key(api_key_env)
    own_model = [f"model.path={model}"] if model and base_url is None else []
    extra = [*own_model, *([f"rollout.n_val={n}"] if n else [])]
    if out is not None and not out.resolve().parent.is_dir():
        raise ConfigError(f"--out {out}: the folder {out.parent} does not exist; make it first, or name another")
    if out is not None and out.is_dir():
        raise ConfigError(f"--out {out}: it is a folder; name a file in it")
    arguments = [*(overrides or ()), *extra]
    _check_first(target, config or (), arguments, training=False)
    found = load_target(target)
    resolved = load_config(config or (), arguments, defaults=found.defaults, training=False)
    from rllm.evaluation import evaluate as run

    if base_url is not None and episodes is None and not resume:
        episodes = Path(resolved.config.trainer.run_dir) / f"eval-{datetime.now():%Y%m%d-%H%M%S}.jsonl"
        episodes.parent.mkdir(parents=True, exist_ok=True)
        typer.echo(f"episodes go to {episodes}", err=True)
    try:
        result = run(
            agent_flow=found.flow,
            workflow_class=found.workflow_class,
            evaluator=found.evaluator,
            config=resolved,
            dataset=_dataset(found.val_dataset, resolved, resolved.config.data.val_files),
            adapter=None if adapter.lower() == "none" else adapter,
            ks=ks,
            base_url=base_url,
            model=model if base_url is not None else None,
            api_key=api_key,
            episodes=episodes,
            resume=resume,
        )
    except KeyboardInterrupt:
        if episodes is not None:
            typer.echo(
                f"stopped; what ended is in {episodes}: the same command with --episodes {episodes} --resume goes on",
                err=True,
            )
        raise
    text = json.dumps(result, indent=2)
    typer.echo(text)
    if out is not None:
        try:
            out.write_text(text + "\n")
        except OSError as error:
            raise ConfigError(f"--out {out}: {error.strerror or error}; the result is printed above") from error


@app.command(context_settings=PASSED_ON)
def sft(
    file: Annotated[
        str | None, typer.Argument(help="JSONL file of {'messages': [...]} chats", callback=_no_options)
    ] = None,
    overrides: Overrides = None,
    config: ConfigFiles = None,
    show: Annotated[
        bool, typer.Option("--show-config", help="Print the resolved config with its sources and stop")
    ] = False,
) -> None:
    """Fine-tune on chats: cross-entropy on the assistant's tokens, with LoRA or on all weights (lora.rank=0)."""
    from rllm.sft import SftConfig, run_sft

    arguments = list(overrides or ())
    if file is not None:
        arguments.insert(0, file if "=" in file else f"data.train_files={json.dumps(file)}")
    resolved = load_model(SftConfig, config or (), arguments)
    if show:
        typer.echo(show_config(resolved))
        return
    run_sft(resolved.config)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON")] = False,
    model: Annotated[str, typer.Option(help="Folder or hub id of the model to try, or default")] = "default",
) -> None:
    """Say what this machine can run and what to mend; exit code 1 if the default backend cannot run."""
    from rllm.doctor import as_text, examine

    report = examine(model)
    typer.echo(json.dumps(report.to_dict(), indent=2) if as_json else as_text(report))
    if not report.can_run:
        raise typer.Exit(1)


@config_app.command("schema")
def schema() -> None:
    """Print the JSON schema of config files, for editors: rllm config schema > rllm.schema.json"""
    from rllm.config.json_schema import config_schema

    typer.echo(json.dumps(config_schema(), indent=2))


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="Folder, hub id, or default")] = "default",
    adapter: Annotated[str | None, typer.Option(help="PEFT folder to serve beside the model")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that other machines reach needs --api-key-env")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one")] = 8000,
    api: Annotated[str, typer.Option(help="What to speak: tinker, openai, or both with a comma")] = "tinker,openai",
    name: Annotated[
        str | None, typer.Option(help="What clients call the model (Tinker's base_model); default: as in --model")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="Folder for Tinker's checkpoints and database (default: runs/serve)")
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(min=1e-6, help="LoRA alpha of Tinker's runs: updates are scaled by alpha / rank (default: 32)"),
    ] = None,
    max_rank: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Highest LoRA rank of Tinker's runs (default: 512)")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="VAR", help="Environment variable with the key that clients must show")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Config override key=value; may be given again")
    ] = None,
) -> None:
    """Serve the model, and an adapter beside it, to OpenAI clients and to Tinker clients, which train and sample adapters of their own."""
    from rllm.serve.server import check_key, chosen_apis, serve_model

    apis, key = chosen_apis(api), _key(api_key_env)
    check_key(host, key, tinker="tinker" in apis)
    values: dict[str, Any] = {"model": {"path": model}, "lora": {"adapter_path": adapter}}
    resolved = load_config(overrides=overrides or (), base=values, training=False)
    serve_model(resolved.config, host, port, apis=apis, name=name, state=state, alpha=alpha, max_rank=max_rank, key=key)


@app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(help="Adapter folder: of a run, or one that PEFT saved")],
    out: Annotated[Path, typer.Option(help="New folder for the merged model")],
    base: Annotated[
        str | None, typer.Option(help="Folder, hub id, or default; default: what the adapter names")
    ] = None,
    dtype: Annotated[str, typer.Option(help="keep, float32, bfloat16 or float16")] = "keep",
    max_shard_size: Annotated[str, typer.Option(help="Largest file of weights")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier merge; other files stay")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="The base's own Python files may be run and are copied")
    ] = False,
) -> None:
    """Merge an adapter into its base: a full model for any tool, checked against PEFT before this says "merged"."""
    from rllm.lora.checkpoint import parse_size

    size = parse_size(max_shard_size, "--max-shard-size")
    if dtype not in ("keep", "float32", "bfloat16", "float16"):
        raise ConfigError(f"--dtype {dtype!r}: expected keep, float32, bfloat16 or float16")
    import torch

    from rllm.backends.local.loading import DEFAULT_MODEL, resolve_model
    from rllm.lora.merge import MergeOptions, base_of, describe, find_adapter, merge_adapter

    folder = find_adapter(adapter)
    options = MergeOptions(None if dtype == "keep" else getattr(torch, dtype), size, overwrite, trust_remote_code)
    result = merge_adapter(folder, resolve_model(base or base_of(folder, DEFAULT_MODEL), "base"), out, options)
    describe(result, out, typer.echo)


def _key(variable: str | None) -> str | None:
    if variable is not None and variable not in os.environ:
        raise ConfigError(
            f"--api-key-env {variable}: there is no such environment variable; set it, or leave the option out"
        )
    return os.environ[variable] if variable else None


def _check_first(target: str, files: Sequence[Path], overrides: Sequence[str], training: bool = True) -> None:
    """Config mistakes are told before any user code runs, and before anything heavy is imported. What only that code can tell (its
    computed DEFAULTS, estimators and losses of its own) waits for it."""
    from rllm.cli.target import peek_defaults

    defaults = peek_defaults(target)
    algorithm = load_model(Config, files, overrides, defaults=defaults, aliases=True).config.algorithm
    known = algorithm.estimators() <= ESTIMATORS.keys() and algorithm.losses() <= LOSSES.keys()
    if defaults is not None and known:
        resolved = load_config(files, overrides, defaults=defaults, training=training)
        refuse_impossible(resolved.config, resolved.provenance, training)


def _dataset(make: Any, resolved: Resolved[Config], files: Any) -> Any:
    """The module's own dataset unless the config names files."""
    if files is not None or make is None:
        return None
    return make(resolved.config)

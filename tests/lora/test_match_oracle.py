"""Which modules get an adapter, of which rank and scale: on random module trees the answer is PEFT's own, taken from the layers that
`peft.inject_adapter_in_model` puts in."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.utils.other import get_pattern_key
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rllm.config.schema import LoraSettings
from rllm.errors import ConfigError
from rllm.lora.adapter import LoraAdapter
from rllm.lora.match import adapted_modules

CONTAINERS = ["layers", "0", "1", "10", "attn", "mlp", "xattn"]
LEAVES = ["q_proj", "k_proj", "xq_proj", "up", "up_1", "w1", "w11"]


class Tree(PreTrainedModel):
    """Linear layers at the dotted `names`, and an output head where one is called ``lm_head``."""

    config_class = PretrainedConfig

    def __init__(self, names: list[str]):
        super().__init__(PretrainedConfig(tie_word_embeddings=False))
        for i, name in enumerate(names):
            *path, leaf = name.split(".")
            place: nn.Module = self
            for part in path:
                if part not in place._modules:
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            place.add_module(leaf, nn.Linear(2 + i % 3, 3, bias=False))

    def get_output_embeddings(self):
        return self._modules.get("lm_head")


def pefts_choice(names, lora: LoraSettings) -> dict[str, tuple[int, float]] | None:
    """Name -> (rank, scale) of every layer PEFT adapts; None where it finds nothing to adapt."""
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]
        target_modules=lora.target_modules,
        exclude_modules=lora.exclude_modules,
        rank_pattern=lora.rank_pattern,
        alpha_pattern=lora.alpha_pattern,
        use_rslora=lora.use_rslora,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = inject_adapter_in_model(config, Tree(names))
    except ValueError as error:
        assert "not found in the base model" in str(error) or "excluded" in str(error) or "No modules" in str(error)
        return None
    return {
        name: (module.r["default"], module.scaling["default"])
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


def our_choice(names, lora: LoraSettings) -> dict[str, tuple[int, float]]:
    shapes = {name: (2 + i % 3, 3) for i, name in enumerate(names)}
    chosen = adapted_modules(names, lora)
    adapter = LoraAdapter(
        shapes, chosen, {}, rank=lora.rank, alpha=lora.alpha, seed=0, rank_pattern=lora.rank_pattern,
        alpha_pattern=lora.alpha_pattern, rslora=lora.use_rslora,
    )  # fmt: skip
    return {name: (adapter.matrices(name)[0].shape[0], adapter.scales[name]) for name in chosen}


def names_nothing(entry: str, names) -> bool:
    return not any(name == entry or name.endswith(f".{entry}") for name in names)


def compare(names, lora: LoraSettings) -> None:
    """Ours is PEFT's. The one thing we do otherwise is to refuse what PEFT passes over: an entry or pattern that names nothing."""
    expected = pefts_choice(names, lora)
    try:
        found = our_choice(names, lora)
    except ConfigError:
        entries = lora.target_modules if isinstance(lora.target_modules, list) else []
        patterns = [*lora.rank_pattern, *lora.alpha_pattern]
        passed_over = any(names_nothing(entry, names) for entry in entries) or any(
            all(get_pattern_key([pattern], name) == name for name in expected or ()) for pattern in patterns
        )
        assert expected is None or passed_over, (names, lora)
    else:
        assert expected is not None, (names, lora)
        assert found.keys() == expected.keys(), (names, lora)
        for name, (rank, scale) in expected.items():
            assert found[name] == (rank, pytest.approx(scale, rel=1e-12)), (name, lora)


paths = st.lists(st.sampled_from(CONTAINERS), max_size=4)
trees = st.lists(
    st.tuples(paths, st.sampled_from(LEAVES)).map(lambda t: ".".join([*t[0], t[1]])),
    min_size=1,
    max_size=14,
    unique=True,
)
leaf = st.sampled_from([*LEAVES, "proj", "lm_head"])
suffix = st.tuples(st.lists(st.sampled_from(CONTAINERS), max_size=2), leaf).map(lambda t: ".".join([*t[0], t[1]]))
# Every expression ends with the name of a leaf: one that also names a container is an error in PEFT, where ours looks at layers alone.
regex = st.one_of(
    leaf.map(lambda n: rf".*\.{n}"),
    leaf.map(lambda n: rf".*{n}"),
    st.tuples(leaf, leaf).map(lambda t: rf"(.*\.)?({t[0]}|{t[1]})"),
    leaf.map(lambda n: rf"layers\.\d+\..*{n}"),
    st.tuples(st.sampled_from(CONTAINERS), leaf).map(lambda t: rf".*\.{t[0]}\.{t[1]}$"),
    suffix,
    st.sampled_from([r".*[qk]_proj", r".*w1+", r".*\.(attn|mlp)\..*(_proj|w1)", r"^layers\.0\..*up(_1)?"]),
)
pattern = st.one_of(
    suffix, regex, st.sampled_from([r"w1", r"w\d+", "[qk]_proj", r"^q_proj", "q_proj|up", r"attn\..*", ".*"])
)


def lora_settings(names):
    """Settings for a tree: targets and excludes as lists, expressions, whole names; patterns for ranks and alphas. Most name something."""
    parts = [name.split(".") for name in names]
    present = st.sampled_from(sorted({".".join(p[-n:]) for p in parts for n in range(1, len(p) + 1)}))
    some = st.lists(present, min_size=1, max_size=4) | st.lists(present | suffix, min_size=1, max_size=3)
    there = present.map(lambda name: rf"(.*\.)?{name}")
    key = st.one_of(present, present, present.map(lambda name: rf"[a-z0-9.]*{name}"), pattern)
    often = st.integers(0, 9).map(lambda n: n < 7)
    wanted = st.one_of(some, there, st.just("all-linear"), st.just(list(names)))
    left_out = st.one_of(
        st.lists(st.sampled_from(names), min_size=1, max_size=2),
        st.lists(present | suffix, min_size=1, max_size=2),
        there,
        regex,
    )
    return st.builds(
        LoraSettings,
        rank=st.integers(1, 8),
        alpha=st.integers(1, 32),
        target_modules=often.flatmap(lambda yes: wanted if yes else regex),
        exclude_modules=often.flatmap(lambda yes: st.none() if yes else left_out),
        rank_pattern=st.just({}) | st.dictionaries(key, st.integers(1, 9), max_size=2),
        alpha_pattern=st.just({}) | st.dictionaries(key, st.integers(1, 64), max_size=2),
        use_rslora=st.booleans(),
    )


@settings(max_examples=400, deadline=None)
@given(trees.flatmap(lambda names: st.tuples(st.just(names), lora_settings(names))))
@example((["q_proj", "a.xq_proj", "a.q_proj"], LoraSettings(target_modules=["q_proj"])))
@example((["0.w1", "10.w1", "10.w11"], LoraSettings(target_modules=["0.w1"], rank_pattern={"w1": 3})))
@example((["0.w1", "1.w1"], LoraSettings(rank_pattern={"w1": 3, r"1\.w1": 5}, alpha_pattern={r"^0\.w1": 7})))
def test_modules_ranks_and_scales_are_pefts_on_any_tree(case):
    compare(*case)


@settings(max_examples=60, deadline=None)
@given(trees, st.one_of(st.none(), st.lists(leaf, min_size=1, max_size=2), regex))
def test_all_linear_leaves_the_output_head_alone_as_peft_does(names, exclude):
    names = [*names, "lm_head"]
    lora = LoraSettings(rank=2, exclude_modules=exclude)
    compare(names, lora)
    if exclude is None:
        assert our_choice(names, lora).keys() == set(names[:-1])


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 6), st.sets(st.sampled_from(LEAVES), min_size=4, max_size=5), st.data())
def test_lists_so_long_that_peft_shortens_them_mean_the_same(layers, leaves, data):
    """From 20 entries on PEFT looks for fewer suffixes that say the same; our adapters name every module."""
    names = [f"model.layers.{i}.attn.{leaf}" for i in range(layers) for leaf in sorted(leaves)]
    names += [f"model.layers.{i}.xattn.{leaf}" for i in range(layers) for leaf in sorted(leaves)]
    chosen = data.draw(st.sets(st.sampled_from(names), min_size=20))
    lora = LoraSettings(rank=3, target_modules=sorted(chosen))
    assert our_choice(names, lora).keys() == chosen
    compare(names, lora)


@settings(max_examples=30, deadline=None)
@given(trees)
def test_an_expression_that_matches_nothing_is_an_error_in_both(names):
    lora = LoraSettings(target_modules=r".*\.no_such_layer")
    assert pefts_choice(names, lora) is None
    with pytest.raises(ConfigError, match="matches no module"):
        our_choice(names, lora)


@settings(max_examples=100, deadline=None)
@given(trees, st.data(), st.booleans())
def test_the_first_pattern_that_names_a_layer_gives_its_rank_and_alpha(names, data, rslora):
    ends = sorted({".".join(name.split(".")[-n:]) for name in names for n in range(1, name.count(".") + 2)})
    key = st.sampled_from([*ends, *(rf"[a-z0-9_.]*{end}" for end in ends), *(f"^{name}" for name in names)])
    ranks = data.draw(st.dictionaries(key, st.integers(1, 9), min_size=1, max_size=3))
    alphas = data.draw(st.dictionaries(key, st.integers(1, 64), min_size=1, max_size=3))
    lora = LoraSettings(rank=12, alpha=100, rank_pattern=ranks, alpha_pattern=alphas, use_rslora=rslora)
    assert any(rank < 12 for rank, _ in our_choice(names, lora).values())
    compare(names, lora)

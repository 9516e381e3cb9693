"""Which modules are adapted: PEFT's rules, checked against PEFT itself, and loud where nothing matches."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllm.errors import ConfigError
from rllm.lora.match import match_modules, unmatched_excludes

LEAVES = {
    "self_attn": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "mlp": ["gate_proj", "up_proj", "down_proj"],
}
NAMES = [
    *(f"model.layers.{i}.{part}.{leaf}" for i in range(12) for part, leaves in LEAVES.items() for leaf in leaves),
    "lm_head",
]


def test_all_linear_is_every_layer_but_the_output_head():
    assert match_modules(NAMES) == NAMES[:-1]


def test_a_list_matches_whole_names_and_dotted_suffixes_only():
    names = ["a.q_proj", "a.xq_proj", "q_proj"]
    assert match_modules(names, ["q_proj"]) == ["a.q_proj", "q_proj"]


def test_a_string_is_a_full_match_regex():
    assert match_modules(NAMES, r"model\.layers\.1\..*_proj") == [n for n in NAMES if ".layers.1." in n]


def test_exclusion_wins_as_list_and_as_regex():
    chosen = match_modules(NAMES, ["q_proj", "v_proj"], ["layers.0.self_attn.v_proj"])
    assert len(chosen) == 23 and "model.layers.0.self_attn.v_proj" not in chosen
    assert len(match_modules(NAMES, "all-linear", r".*\.mlp\..*")) == 48


def test_one_mistyped_entry_among_good_ones_is_an_error_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"'k_prj' matches no module.*did you mean 'k_proj'.*q_proj, k_proj"):
        match_modules(NAMES, ["q_proj", "k_prj"])


def test_all_linear_inside_a_list_is_an_error_with_the_fix():
    with pytest.raises(ConfigError, match="target_modules=all-linear instead of a list"):
        match_modules(NAMES, ["all-linear"])


@pytest.mark.parametrize("pattern", ["q_proj", "(", "layers.*"])
def test_a_regex_that_matches_nothing_or_is_none_is_an_error(pattern):
    with pytest.raises(ConfigError, match=r"matches no module|no valid regular expression"):
        match_modules(NAMES, pattern)


def test_nothing_left_after_exclusion_is_an_error():
    with pytest.raises(ConfigError, match="leave no module"):
        match_modules(NAMES, ["q_proj"], ["q_proj"])


def test_a_name_near_nothing_is_an_error_that_lists_what_there_is():
    with pytest.raises(
        ConfigError, match=r"'zzz' matches no module as a name or dotted suffix\. The model has q_proj, k_proj"
    ):
        match_modules(NAMES, ["zzz"])


def test_exclusions_that_name_nothing_are_told_apart_from_those_that_do():
    assert unmatched_excludes(NAMES, ["q_proj", "c_attn", "layers.3.mlp.up_proj"]) == ["c_attn"]
    assert unmatched_excludes(NAMES, r".*\.visual\..*") == [r".*\.visual\..*"]
    assert unmatched_excludes(NAMES, r".*\.mlp\..*") == unmatched_excludes(NAMES, None) == []


names = st.lists(
    st.lists(
        st.sampled_from(["layers", "0", "1", "10", "attn", "q_proj", "k_proj", "xq_proj"]), min_size=1, max_size=4
    ).map(".".join),
    min_size=1,
    max_size=12,
    unique=True,
)
entries = st.one_of(
    st.lists(st.sampled_from(["q_proj", "k_proj", "attn.q_proj", "0", "1.q_proj", "layers"]), min_size=1, max_size=3),
    st.sampled_from([r".*q_proj", r"layers\.\d+\..*", r".*attn\.[qk]_proj", r"q_proj", r".*"]),
)


@settings(max_examples=300, deadline=None)
@given(names, entries, st.one_of(st.none(), entries))
def test_the_choice_equals_pefts_on_any_module_tree(module_names, target, exclude):
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    config = LoraConfig(target_modules=target, exclude_modules=exclude)
    expected = [name for name in module_names if check_target_module_exists(config, name)]
    try:
        chosen = match_modules(module_names, target, exclude)
    except ConfigError:
        # Refused here where PEFT would go on: nothing chosen at all, or an entry of the list that names nothing.
        unmatched = isinstance(target, list) and any(
            not any(n == e or n.endswith("." + e) for n in module_names) for e in target
        )
        assert not expected or unmatched
    else:
        assert chosen == expected

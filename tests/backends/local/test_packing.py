"""Prompts that rows share are passed once, and nothing changes but the number of tokens."""

import pytest
import torch
from tiny_models import VOCAB, random_adapter, with_peft

from rllm.backends.base import Datum, LossSpec
from rllm.backends.local.learner import Learner
from rllm.backends.local.packing import PackedShared, SharedPrompts, micro_batches, pack, worth_sharing

CPU = torch.device("cpu")


def group_rows(prompt_lengths=(9, 4), tails=(6, 1, 3)):
    """For each prompt a row of each tail length, the last two tokens of the longer ones not trained; every row its own advantage."""
    generator = torch.Generator().manual_seed(0)

    def draw(n):
        return torch.randint(0, VOCAB, (n,), generator=generator).tolist()

    data = []
    for length in prompt_lengths:
        prompt = draw(length)
        for i, tail in enumerate(tails):
            mask = [0] * length + [1] * tail + [0, 0] * (tail > 1)
            ids = prompt + draw(len(mask) - length)
            data.append(Datum(ids, mask, [(i - 0.7) * m for m in mask], [-4.5 * m for m in mask]))
    return data


def spoken_for(row):
    return [t for t, m in enumerate(row.mask) if m]


@pytest.mark.parametrize("prompt_lengths", [(9, 4), (7, 7)])
def test_log_probabilities_and_gradients_over_shared_prompts_equal_peft(make, prompt_lengths):
    model, decoder, _ = make("qwen3")
    adapter = random_adapter(decoder)
    data = group_rows(prompt_lengths)
    assert isinstance(pack(data, CPU, share=True, most=1000).attend, SharedPrompts)
    learner = Learner(decoder, {"default": adapter})
    peft = with_peft(model, adapter).double()
    loss, count = torch.zeros((), dtype=torch.float64), sum(row.n_trained for row in data)
    for row, values in zip(data, learner.logprobs(data, trained_only=True), strict=True):
        logprobs = peft(input_ids=torch.tensor([row.ids])).logits[0].log_softmax(-1)
        for t in spoken_for(row):
            expected = logprobs[t - 1, row.ids[t]]
            assert abs(values[t] - expected.item()) < 1e-5
            loss = loss - row.advantages[t] * expected / count
        row.old_logprobs = values  # a ratio of 1, where the gradient is that of -advantage * log-probability
    loss.backward()
    learner.forward_backward(data, LossSpec())
    theirs = dict(peft.named_parameters())
    for name in adapter.modules_adapted:
        for letter, own in zip("AB", adapter.matrices(name), strict=True):
            expected = theirs[f"base_model.model.{name}.lora_{letter}.default.weight"].grad
            assert (own.grad - expected).norm() < 1e-4 * expected.norm(), (name, letter)


def test_a_shared_prompt_goes_through_the_model_once():
    data = group_rows(prompt_lengths=(20,), tails=(6, 3))
    # The last trained token of a row, and what follows it, predicts nothing.
    assert len(pack(data, CPU, share=True, most=1000).ids) == 20 + 5 + 2
    assert len(pack(data, CPU, share=False, most=1000).ids) == sum(len(row.ids) for row in data)


def test_rows_without_a_common_prompt_are_laid_out_one_by_one():
    data = group_rows(prompt_lengths=(30, 31, 32), tails=(2,))
    assert not isinstance(pack(data, CPU, share=True, most=1000).attend, SharedPrompts)


@pytest.mark.parametrize(("share", "fused"), [(True, False), (True, True), (False, False)])
def test_micro_batches_hold_every_row_once_and_keep_to_the_limit(share, fused):
    data = group_rows(prompt_lengths=(9, 4, 15, 6), tails=(6, 1, 3, 5))
    batches = list(micro_batches(data, range(len(data)), 40, share, padded=share and not fused))
    assert sorted(i for batch in batches for i in batch) == list(range(len(data)))
    assert len(batches) > 1
    for batch in batches:
        assert len(batch) == 1 or len(pack([data[i] for i in batch], CPU, share, 40, fused).ids) <= 40 or not share
        assert share or sum(len(data[i].ids) for i in batch) <= 40


def test_a_row_longer_than_the_limit_is_a_batch_of_its_own():
    data = group_rows(prompt_lengths=(50,), tails=(6, 3))
    assert [len(batch) for batch in micro_batches(data, range(2), 10, share=False)] == [1, 1]


def test_the_layout_for_cuda_kernels_says_what_each_tail_sees_above_it():
    data = group_rows(prompt_lengths=(20, 9), tails=(6, 1, 3))
    packed = pack(data, CPU, share=True, most=1000, fused=True)
    layout = packed.attend
    assert isinstance(layout, PackedShared) and layout.above is not None
    # Tails end before the last trained token: 5, 0 and 2 tokens of each prompt's rows.
    assert layout.bounds.tolist() == [0, 20, 29, 34, 34, 36, 41, 41, 43]
    assert layout.above.queries.tolist() == [29, 36, 43] and layout.above.keys.tolist() == [0, 20, 29]
    assert (layout.above.longest_queries, layout.above.longest_keys, layout.longest) == (7, 20, 20)
    assert packed.positions.tolist() == [*range(20), *range(9), *range(20, 25), 20, 21, *range(9, 14), 9, 10]
    dense = pack(data, CPU, share=True, most=1000)
    assert dense.ids.equal(packed.ids) and dense.predicting.equal(packed.predicting)
    assert dense.positions.equal(packed.positions)


def test_prompts_that_come_again_after_another_one_are_passed_again():
    data = group_rows(prompt_lengths=(20, 20), tails=(3, 3))
    mixed = [data[0], data[1], data[2], data[0]]
    layout = pack(mixed, CPU, share=True, most=10, fused=True).attend
    assert isinstance(layout, PackedShared) and layout.above is not None
    assert layout.above.keys.tolist() == [0, 20, 40, 60]


def test_sharing_must_save_more_where_rows_of_one_length_have_a_faster_attention():
    equal = group_rows(prompt_lengths=(20,), tails=(23, 23))  # 20 of 90 tokens
    assert worth_sharing(equal, fused=False) and not worth_sharing(equal, fused=True)
    assert worth_sharing(group_rows(prompt_lengths=(20,), tails=(20, 26)), fused=True)
    # But not more tokens than fit.
    assert isinstance(pack(equal, CPU, share=True, most=80, fused=True).attend, PackedShared)
    assert not isinstance(pack(equal, CPU, share=True, most=90, fused=True).attend, PackedShared)


def test_answers_of_one_token_leave_nothing_that_sees_a_prompt_above():
    layout = pack(group_rows(prompt_lengths=(20, 9), tails=(1, 1, 1)), CPU, share=True, most=1000, fused=True).attend
    assert isinstance(layout, PackedShared) and layout.above is None and layout.bounds.tolist() == [0, 20] + [29] * 7

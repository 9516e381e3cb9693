"""The hand-written backward passes between the products are those of the formulas."""

import pytest
import torch
import torch.nn.functional as F

from rllm.backends.local.ops import rms_norm, rotate, swiglu


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def plain_norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def plain_rotate(x, cos, sin):
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


def plain_swiglu(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


CASES = {
    "norm": (lambda x, w: rms_norm(x, w, 1e-3), lambda x, w: plain_norm(x, w, 1e-3), (draw(7, 12), draw(12, seed=1))),
    "norm of heads": (
        lambda x, w: rms_norm(x, w, 1e-3),
        lambda x, w: plain_norm(x, w, 1e-3),
        (draw(7, 3, 8), draw(3, 8, seed=1)),
    ),
    "rotate": (
        lambda x: rotate(x, draw(7, 1, 8, seed=2), draw(7, 1, 8, seed=3)),
        lambda x: plain_rotate(x, draw(7, 1, 8, seed=2), draw(7, 1, 8, seed=3)),
        (draw(7, 3, 8),),
    ),
    "swiglu": (swiglu, plain_swiglu, (draw(7, 16),)),
}


@pytest.mark.parametrize("name", list(CASES))
def test_values_and_gradients_equal_those_autograd_takes_of_the_formula(name):
    ours, plain, inputs = CASES[name]
    if name == "rotate":  # a rotation has equal angles in both halves, of opposite sign
        half = draw(7, 1, 4, seed=3)
        cos, sin = draw(7, 1, 4, seed=2).repeat(1, 1, 2), torch.cat((-half, half), -1)
        ours, plain = (lambda x: rotate(x, cos, sin)), (lambda x: plain_rotate(x, cos, sin))
    mine, theirs = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
    got, expected = ours(*mine), plain(*theirs)
    assert torch.allclose(got, expected, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(ours(*inputs), got)  # the sampler takes the path without autograd
    weight = draw(*got.shape, seed=9)
    got_grads = torch.autograd.grad((got * weight).sum(), mine)
    for one, other in zip(got_grads, torch.autograd.grad((expected * weight).sum(), theirs), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_in_bfloat16_the_statistics_are_float32():
    x, weight = draw(4, 4096, dtype=torch.bfloat16) * 100, torch.ones(4096, dtype=torch.bfloat16)
    expected = plain_norm(x.double(), 1.0, 1e-6)
    assert ((rms_norm(x, weight, 1e-6).double() - expected).abs() <= 2.0**-8 * expected.abs() + 1e-6).all()

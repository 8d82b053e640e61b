"""Any split of any batch over any ranks and micro-batches trains as one process does."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import NATIVE
from torch import nn
from training import gradients

import parallelkit as pk
from parallelkit.testing import virtual_ranks

VOCABULARY, WIDTH = 11, 6
Example = tuple[int, int]  # number of tokens, seed of what they are


class Tagger(nn.Module):
    """Losses of tokens; tied weights, and a parameter that only some examples use."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.rare = nn.Parameter(torch.randn(WIDTH))
        self.to(dtype)

    def forward(self, example: Example) -> torch.Tensor:
        """The sum over the example's tokens."""
        length, seed = example
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCABULARY, (length,), generator=generator)
        x = torch.tanh(self.hidden(self.embedding(tokens)))
        if seed % 3 == 0:
            x = x * self.rare
        logits = nn.functional.linear(x, self.embedding.weight)
        return nn.functional.cross_entropy(logits, tokens.roll(1), reduction="sum")


def adamw(module):
    # A large eps: else the sign of a gradient that is zero but for rounding moves a weight by lr.
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-2)


def one_process(whole: Tagger, examples: list[Example]) -> dict[str, torch.Tensor]:
    """Sets `.grad` to the mean over all tokens; for each parameter the same mean of |gradient|."""
    tokens = sum(length for length, _ in examples)
    sizes = {}
    for example in examples:
        parameters = dict(whole.named_parameters())
        found = torch.autograd.grad(
            whole(example), list(parameters.values()), allow_unused=True, materialize_grads=False
        )
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True):
            if gradient is not None:
                before = 0 if parameter.grad is None else parameter.grad
                parameter.grad = before + gradient / tokens
                sizes[name] = sizes.get(name, 0) + gradient.abs() / tokens
    return sizes


def assert_close(found, expected, sizes, bound):
    assert {n for n, g in found.items() if g is not None} == set(sizes)
    for name, size in sizes.items():
        error = (found[name].double() - expected[name]).abs().max()
        assert error <= bound * size.max(), name


def train(group, steps, dtype, reduction):
    """`steps[step][rank]` are the rank's micro-batches, each a list of examples."""
    torch.manual_seed(0)
    model = pk.DataParallel(Tagger(dtype), group, bucket_mb=2e-4)
    whole = copy.deepcopy(model.module).double()
    ours, theirs = adamw(model), adamw(whole)
    bound = 1e-6 if dtype == torch.float32 else 1e-12
    for step in steps:
        ours.zero_grad()
        theirs.zero_grad()
        mine = step[group.rank]
        for index, examples in enumerate(mine, start=1):
            tokens = sum(length for length, _ in examples)
            loss = sum(model(example) for example in examples)
            loss = loss / tokens if reduction == "mean" else loss
            model.backward(loss, tokens, reduction=reduction, sync=index == len(mine))
        if not mine:
            model.backward(None, weight=0)
        sizes = one_process(whole, [e for rank in step for part in rank for e in part])
        assert_close(gradients(model), gradients(whole), sizes, bound)
        ours.step()
        theirs.step()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.double(), q, rtol=bound, atol=bound)


@st.composite
def split_batches(draw):
    """A number of ranks, and three global batches: random examples, each put anywhere."""
    size = draw(st.integers(1, 4))
    steps = []
    for _ in range(3):
        parts = [[[] for _ in range(5)] for _ in range(size)]
        for example in draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 99)), max_size=8)):
            parts[draw(st.integers(0, size - 1))][draw(st.integers(0, 4))].append(example)
        steps.append([[part for part in rank if part] for rank in parts])
    return size, steps


@pytest.mark.skipif(not NATIVE, reason="virtual ranks need the native extension")
@settings(max_examples=40)
@given(
    split_batches(),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from(["mean", "sum"]),
)
def test_gradients_and_weights_are_those_of_one_process(batches, dtype, reduction):
    size, steps = batches
    virtual_ranks(lambda group: train(group, steps, dtype, reduction), size)

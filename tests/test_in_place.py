"""Layers add weight gradients to what the buckets hold, wherever that changes no number."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from training import items, mean_square, one_process, worst

import parallelkit as pk
from parallelkit.in_place import gradient_buffer, gradients_in_place
from parallelkit.nn import product_ops
from parallelkit.nn.functional import linear

COUNTS = [2, 3, 1, 4]
CLOSE = 0.05  # of activations and gradients in bfloat16, relative to the largest


class Layers(nn.Module):
    """Our linear operator twice, in 16 bits: wider ones are left to PyTorch's on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = linear(x, self.first.weight, self.first.bias, "gelu")
        return linear(h, self.second.weight, self.second.bias)


@pytest.fixture
def temporaries(monkeypatch):
    """How many weight gradients were made apart from their buffer."""
    made = []
    apart = product_ops.weight_gradient
    monkeypatch.setattr(
        product_ops, "weight_gradient", lambda *args: (made.append(1), apart(*args))[1]
    )
    return made


@pytest.mark.parametrize("grad_dtype", [None, torch.float32], ids=["bf16", "in-fp32"])
@pytest.mark.parametrize("sharded", [False, True], ids=["averaged", "private"])
def test_only_the_first_micro_batch_makes_temporaries(grad_dtype, sharded, temporaries):
    batches = items(COUNTS)
    module = Layers()
    expected = one_process(module, batches)
    temporaries.clear()
    with pk.Group() as group:
        model = pk.DataParallel(module, group, grad_dtype=grad_dtype)
        if sharded:
            pk.ShardedAdamW(model.parameters(), group=group, data_parallel=model)
        for index, (x, weight) in enumerate(batches, start=1):
            model.backward(mean_square(model, x), weight, sync=index == len(batches))
        assert len(temporaries) == 2, "one for each layer"
        if sharded:
            assert all(p.grad is None for p in model.parameters())
            buckets = model._buckets
            buckets.settle()
            share = buckets.reference / buckets.weight
            found = {slot.name: slot.view * share for slot in buckets.slot_of.values()}
        else:
            found = {name: p.grad for name, p in model.named_parameters()}
        assert worst(found, expected) <= CLOSE


def test_tensor_hooks_see_every_gradient(temporaries):
    batches, module = items([2, 2]), Layers()
    expected = one_process(module, batches)
    temporaries.clear()
    with pk.Group() as group:
        model = pk.DataParallel(module, group)
        model.first.weight.register_hook(lambda gradient: 2 * gradient)
        for x, weight in batches:
            model.backward(mean_square(model, x), weight, sync=x is batches[-1][0])
        expected["first.weight"] *= 2
        assert worst({n: p.grad for n, p in model.named_parameters()}, expected) <= CLOSE
    assert len(temporaries) == 3, "both layers, then the one with the hook"


def test_passes_of_several_threads_end_each_for_itself():
    w = nn.Parameter(torch.ones(3))
    w.grad = torch.zeros(3)
    entered, leave = threading.Barrier(2), threading.Event()

    def other() -> None:
        with gradients_in_place():
            entered.wait()
            leave.wait()

    thread = threading.Thread(target=other)
    with torch.no_grad():
        with gradients_in_place():
            thread.start()
            entered.wait()
        assert gradient_buffer(w, torch.float32) is w.grad, "the other pass still runs"
        leave.set()
        thread.join()
        assert gradient_buffer(w, torch.float32) is None

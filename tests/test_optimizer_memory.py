"""What ShardedAdamW takes for a moment: never the size of the model. As the kernel counts it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import parallelkit as pk
from parallelkit.testing import run_ranks

TENSORS, ELEMENTS = 50, 1 << 20  # 200 MiB, of which int8 moments of the owned half are 50
M_MMAP_THRESHOLD = -3
RESET = Path("/proc/self/clear_refs")


def mib(name: str) -> float:
    """VmRSS, resident memory, or VmHWM, the most there was since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def taken_for_a_moment(call: Callable[[], object]) -> float:
    """By how many MiB memory was above what there is before and after, whichever is more."""
    gc.collect()
    before = mib("VmRSS")
    RESET.write_text("5")
    kept = call()
    peak = mib("VmHWM")
    after = mib("VmRSS")
    del kept
    return peak - max(before, after)


def measure(group: pk.Group) -> list[float]:
    """While an optimizer is made, in a step, while its state is gathered on rank 0."""
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 18)  # what is freed goes back at once
    for count in (1, TENSORS):  # the first time loads code too
        tensors = [nn.Parameter(torch.ones(ELEMENTS)) for _ in range(count)]
        optimizers: list[pk.ShardedAdamW] = []

        def make(tensors: Any = tensors, made: Any = optimizers) -> None:
            made.append(pk.ShardedAdamW(tensors, state_dtype="int8", group=group))

        found = [taken_for_a_moment(make)]
        (optimizer,) = optimizers
        for _ in range(2):
            for p in tensors:
                p.grad = tensors[0].detach()  # no memory of its own
            step = taken_for_a_moment(optimizer.step)
        found += [step, taken_for_a_moment(lambda o=optimizer: o.state_dict(rank0_only=True))]
    return found


def test_nothing_of_the_models_size_is_taken_on_the_way() -> None:
    if not RESET.exists():
        pytest.skip("the kernel does not reset its count")
    for rank, (made, stepped, told) in enumerate(run_ranks(measure, 2)):
        assert made < 32, "at most 64 MiB of parameters are there twice, before the 50 of state"
        assert stepped < 8
        if rank == 1:
            assert told < 48, "windows of 2^20 elements; a shard would be 100"

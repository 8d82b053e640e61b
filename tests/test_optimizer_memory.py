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
from parallelkit.bench.measure import proportional_bytes
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


STEPS = [
    (False, torch.float32, torch.float32),
    (False, torch.bfloat16, torch.bfloat16),
    (True, torch.float32, "int8"),
    (True, torch.bfloat16, torch.float32),
]


def with_gradients(
    group: pk.Group, fused: bool, dtype: torch.dtype, count: int, **options: Any
) -> tuple[pk.ShardedAdamW, Callable[[], None]]:
    """An optimizer of tensors of 2^20 elements, and what gives each a gradient."""
    parameters = [nn.Parameter(torch.ones(ELEMENTS, dtype=dtype)) for _ in range(count)]
    model = pk.DataParallel(nn.ParameterList(parameters), group) if fused else None
    optimizer = pk.ShardedAdamW(parameters, group=group, data_parallel=model, **options)
    shared = torch.ones(ELEMENTS, dtype=dtype)

    def backward() -> None:
        if model is not None:
            model.backward(torch.stack([p.sum() for p in parameters]).sum())
        else:
            for p in parameters:
                p.grad = shared

    return optimizer, backward


def held(group: pk.Group, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that this process has more with an optimizer than before, and `state_bytes()`."""
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 18)
    hold(group, dtype, 1)  # loads code too
    return hold(group, dtype, 24)


def hold(group: pk.Group, dtype: torch.dtype, count: int) -> tuple[int, int]:
    parameters = [nn.Parameter(torch.ones(ELEMENTS, dtype=dtype)) for _ in range(count)]
    gradient = torch.ones(ELEMENTS, dtype=dtype)
    before = settled(group)
    optimizer = pk.ShardedAdamW(parameters, group=group, max_grad_norm=1.0)
    for _ in range(2):
        for p in parameters:
            p.grad = gradient
        optimizer.step()
    return settled(group) - before, optimizer.state_bytes()


def settled(group: pk.Group) -> int:
    gc.collect()
    group.barrier()
    now = proportional_bytes()
    group.barrier()
    return now


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_is_as_large_as_it_says_it_is(dtype: torch.dtype) -> None:
    """Within 2 %: shared memory that holds the parameters is that of the old ones, given back."""
    found = run_ranks(held, 2, dtype)
    told = sum(bytes_ for _, bytes_ in found)
    assert told == 24 * ELEMENTS * (8 if dtype == torch.float32 else 12)
    assert sum(taken for taken, _ in found) == pytest.approx(told, rel=0.02)


def load(group: pk.Group, path: str) -> list[float]:
    """Shards that are taken for a moment while state is loaded, from a dict and from files."""
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 18)
    found = []
    for count in (1, 16):  # the first time loads code too
        optimizer, backward = with_gradients(group, False, torch.float32, count)
        model = nn.ParameterList(optimizer.parameters())
        backward()
        optimizer.step()
        whole = optimizer.state_dict()
        folder = f"{path}/{count}"
        pk.checkpoint.save(folder, model, optimizer)
        taken = [
            taken_for_a_moment(lambda o=optimizer, w=whole: o.load_state_dict(w)),
            taken_for_a_moment(lambda f=folder, m=model, o=optimizer: pk.checkpoint.load(f, m, o)),
        ]
        found = [mib * 2**20 / optimizer.state_bytes() for mib in taken]
    return found


def test_old_state_goes_as_the_new_one_comes(tmp_path: Path) -> None:
    if not RESET.exists():
        pytest.skip("the kernel does not reset its count")
    for from_dict, from_files in run_ranks(load, 2, str(tmp_path)):
        assert from_dict < 0.6
        assert from_files < 1.5, "what is read is there beside what it replaces"


class Heap(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def allocated() -> int:
    """Bytes that are allocated now, by Python, torch and the extension."""
    mallinfo: Any = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Heap
    gc.collect()
    heap = mallinfo()
    return int(heap.uordblks + heap.hblkhd)


def step_many_times(group: pk.Group) -> list[tuple[str, int, float, int]]:
    """For each kind of step: torch's largest allocation, MiB for a moment, growth in 50 steps."""
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 18)
    found = []
    for fused, dtype, kind in STEPS:
        optimizer, backward = with_gradients(
            group, fused, dtype, 8, state_dtype=kind, max_grad_norm=1.0
        )
        for _ in range(3):
            backward()
            optimizer.step()
        backward()
        with torch.profiler.profile(profile_memory=True) as profile:
            optimizer.step()
        largest = max(event.self_cpu_memory_usage for event in profile.events())
        backward()
        moment = taken_for_a_moment(optimizer.step) if RESET.exists() else 0.0
        small, again = with_gradients(group, fused, dtype, 1, state_dtype=kind, max_grad_norm=1.0)
        small.param_groups[0]["lr"] = 0.0
        for steps in (10, 50):
            before = allocated()
            for _ in range(steps):
                again()
                small.step()
            growth = allocated() - before
        found.append((f"fused={fused} {dtype} {kind}", largest, moment, growth))
    return found


def test_a_step_allocates_nothing_but_numbers_and_nothing_that_stays() -> None:
    for rank in run_ranks(step_many_times, 2):
        for what, largest, moment, growth in rank:
            assert largest < 1024, f"{what}: {largest} bytes at once, of 2^20 elements"
            assert moment < 2, f"{what}: {moment} MiB, of 8 tensors of 2 or 4"
            assert growth < 16384, f"{what}: {growth} bytes more after 50 steps"

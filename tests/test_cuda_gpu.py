"""On a GPU: collectives and the optimizer's pass over virtual ranks, against exact values.

Run by `make gpu-check`, or as `pytest -m gpu`; skipped where there is no GPU. The rehearsal of
that script sets PARALLELKIT_TEST_DEVICE=cpu: what is not about streams then runs on the CPU.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import os
import threading
import time
import warnings

import oracle
import pytest
import torch
from ranks import digest, laid_out, message_of, random, same, weights_of
from torch import nn
from training import Leaf, items, mean_square, mlp

import parallelkit as pk
from parallelkit.nn.functional import linear
from parallelkit.prepared import PreparedAllReduce
from parallelkit.testing import run_ranks, virtual_ranks
from parallelkit.transport import peer_memory

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("PARALLELKIT_TEST_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
only_on_a_gpu = pytest.mark.skipif(not ON_GPU, reason="a GPU's streams, graphs or kernels")

SIZES = (1, 2, 4, 8) if ON_GPU else (1, 2)
SHAPES = ((0,), (), (1,), (3,), (5, 13), (1023,), (9001,), (3, 70001))
KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
LARGE = (1 << 20) + 3  # elements: more than one segment of every way

on_device = functools.partial(virtual_ranks, device=DEVICE, timeout=20.0)


def kinds():
    return list(enumerate(itertools.product(SHAPES, KINDS)))


def in_peer_memory(group: pk.Group, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [group.empty(t.shape, dtype=t.dtype).copy_(t) for t in tensors if not t.is_complex()]


# -- collectives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", ["auto", "direct", "ring"])
def test_means_are_added_in_rank_order_and_rounded_once(size, algorithm, monkeypatch):
    monkeypatch.setenv("PARALLELKIT_ALGORITHM", algorithm)
    inputs = [
        [random(i, rank, shape, kind) for i, (shape, kind) in kinds()] for rank in range(size)
    ]
    weights = weights_of(size, size)
    if size > 1:  # one with nothing, whose values nobody may read
        idle = weights.index(min(weights))
        weights[idle] = 0.0
        for tensor in inputs[idle]:
            tensor.fill_(math.nan)

    def rank(group):
        results = []
        for reduction in ("mean", "sum"):
            mine = [t.to(DEVICE, copy=True) for t in inputs[group.rank]]
            total = pk.weighted_all_reduce_(mine, weights[group.rank], group, reduction=reduction)
            assert total.device.type == DEVICE and total.item() == sum(weights)
            alone = [t.to(DEVICE, copy=True) for t in inputs[group.rank]]
            for tensor in alone:
                pk.weighted_all_reduce_(tensor, weights[group.rank], group, reduction=reduction)
            reached = in_peer_memory(group, inputs[group.rank])
            pk.weighted_all_reduce_(reached, weights[group.rank], group, reduction=reduction)
            results.append([t.cpu() for t in mine])
            assert digest(results[-1]) == digest(t.cpu() for t in alone)
            real = [t for t in results[-1] if not t.is_complex()]
            assert digest(real) == digest(t.cpu() for t in reached)
        return results

    ranks = on_device(rank, size)
    assert same([digest(t for r in results for t in r) for results in ranks])
    for reduction, result in zip(("mean", "sum"), ranks[0], strict=True):
        for index, (shape, kind) in kinds():
            tensors = [i[index] for i in inputs]
            what = (reduction, shape, kind)
            oracle.assert_weighted(result[index], tensors, weights, reduction, what)
            if kind != torch.float64:
                wanted = oracle.chain(tensors, weights, reduction).reshape(shape)
                assert oracle.bits(result[index]) == oracle.bits(wanted), what


@pytest.mark.parametrize("size", SIZES)
def test_large_tensors_are_right_everywhere(size):
    inputs = [random(7, rank, (LARGE,), torch.float32) for rank in range(size)]
    weights = weights_of(3, size)

    def rank(group):
        outs = []
        for tensor in (
            inputs[group.rank].to(DEVICE, copy=True),
            group.empty(LARGE).copy_(inputs[group.rank]),
        ):
            pk.weighted_all_reduce_(tensor, weights[group.rank], group)
            outs.append(tensor.cpu())
        shard = pk.weighted_reduce_scatter(
            inputs[group.rank].to(DEVICE, copy=True), weights[group.rank], group
        )
        outs.append(pk.all_gather_flat(shard, LARGE, group).cpu())
        return outs

    ranks = on_device(rank, size)
    assert same([digest([out]) for outs in ranks for out in outs])
    oracle.assert_weighted(ranks[0][0], inputs, weights)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("numel", [0, 1, 5, 1023])
def test_shards_are_cut_by_the_rule(size, numel):
    inputs = [random(numel, rank, (numel,), torch.bfloat16) for rank in range(size)]

    def rank(group):
        flat = inputs[group.rank].to(DEVICE, copy=True)
        start, stop = pk.shard_bounds(numel, size, group.rank)
        out = torch.full((stop - start,), math.nan, dtype=flat.dtype, device=DEVICE)
        shard = pk.weighted_reduce_scatter(flat, 1 + group.rank, group, out=out)
        assert shard is out and torch.equal(flat.cpu(), inputs[group.rank])
        whole = torch.full((numel,), math.nan, dtype=flat.dtype, device=DEVICE)
        return pk.all_gather_flat(shard, numel, group, out=whole).cpu()

    ranks = on_device(rank, size)
    assert same([digest([whole]) for whole in ranks])
    wanted = oracle.chain(inputs, list(range(1, size + 1)))
    assert oracle.bits(ranks[0]) == oracle.bits(wanted)


def test_strides_are_kept():
    layouts = ("row-major", "transposed", "channels_last", "gaps", "conjugate")
    inputs = [random(1, rank, (2, 3, 4, 5), torch.complex64) for rank in range(2)]

    def rank(group):
        tensors = [laid_out(inputs[group.rank], layout).to(DEVICE) for layout in layouts]
        strides = [t.stride() for t in tensors]
        pk.weighted_all_reduce_(tensors, 1, group)
        assert [t.stride() for t in tensors] == strides
        return [t.cpu() for t in tensors]

    for tensors in on_device(rank, 2):
        for tensor in tensors:
            oracle.assert_weighted(tensor, inputs, [1, 1])


def test_weights_are_taken_from_either_side():
    def rank(group):
        found = []
        for weight in (1, torch.tensor(1), torch.tensor(1, device=DEVICE), 2**40 + 1):
            mine = weight if group.rank == 0 else torch.tensor(3.0, device=DEVICE)
            tensor = torch.tensor([1.0, 5.0][group.rank], device=DEVICE)
            total = pk.weighted_all_reduce_(tensor, mine, group)
            found.append((tensor.item(), total.item()))
        nothing = torch.full((3,), math.nan, device=DEVICE)
        total = pk.weighted_all_reduce_(nothing, torch.tensor(0.0, device=DEVICE), group)
        return found, nothing.tolist(), total.item()

    for found, nothing, total in on_device(rank, 2):
        assert found[:3] == [(4.0, 4.0)] * 3
        assert found[3][1] == 2.0**40 + 4
        assert (nothing, total) == ([0.0] * 3, 0.0)


# -- refusals -------------------------------------------------------------------------------------


@only_on_a_gpu
@pytest.mark.parametrize("bad", [math.nan, -1.0, math.inf])
def test_a_bad_weight_on_the_gpu_changes_nothing_and_is_raised_at_the_next_call(bad):
    def rank(group):
        tensor = torch.tensor([1.0, 5.0][group.rank], device=DEVICE)
        weight = torch.tensor([bad, 3.0][group.rank], device=DEVICE)
        pk.weighted_all_reduce_(tensor, weight, group)
        torch.cuda.synchronize()
        before = tensor.item()
        told = message_of(ValueError, lambda: pk.weighted_all_reduce_(tensor, 1, group))
        pk.weighted_all_reduce_(tensor, [1, 3][group.rank], group)
        return before, told, tensor.item()

    results = on_device(rank, 2)
    assert [r[0] for r in results] == [1.0, 5.0]
    assert all("a weight on the GPU" in r[1] for r in results)
    assert [r[2] for r in results] == [4.0, 4.0]


def test_ranks_that_disagree_are_told_and_go_on():
    def rank(group):
        tensor = torch.ones(2 + group.rank, device=DEVICE)
        told = message_of(
            pk.CollectiveMismatchError, lambda: pk.weighted_all_reduce_(tensor, 1, group)
        )
        pk.weighted_all_reduce_(tensor[:2], 1, group)
        return told

    assert same(on_device(rank, 2))


def test_a_rank_that_does_not_come_breaks_the_group_in_time():
    done = threading.Event()

    def rank(group):
        pk.weighted_all_reduce_(torch.ones(1, device=DEVICE), 1, group)
        if group.rank == 1:
            done.wait(30)
            return 0.0
        start = time.monotonic()
        try:
            message_of(
                pk.CollectiveTimeoutError,
                lambda: pk.weighted_all_reduce_(torch.ones(1, device=DEVICE), 1, group),
            )
        finally:
            done.set()
        return time.monotonic() - start

    assert virtual_ranks(rank, 2, DEVICE, timeout=2.0)[0] < 3.0


# -- streams and graphs ---------------------------------------------------------------------------


@only_on_a_gpu
def test_nothing_waits_for_the_gpu():
    entered = threading.Barrier(2, timeout=30)

    def steps(group, model, optimizer, tensors):
        for _ in range(3):
            pk.weighted_all_reduce_(tensors, torch.ones((), device=DEVICE), group)
            pk.weighted_all_reduce_(tensors, 1, group, async_op=True).wait()
            model.backward(model(gradient))
            optimizer.step()

    gradient = torch.ones(1000, device=DEVICE)

    def rank(group):
        module = Leaf(1000).to(DEVICE)
        model = pk.DataParallel(module, group, overlap=False)
        optimizer = pk.ShardedAdamW(
            model.parameters(), group=group, data_parallel=model, max_grad_norm=1.0
        )
        tensors = [torch.ones(100, device=DEVICE), group.empty(1000).fill_(1.0)]
        steps(group, model, optimizer, tensors)  # allocates, loads and uploads
        torch.cuda.synchronize()
        entered.wait()
        torch.cuda.set_sync_debug_mode("error")
        try:
            steps(group, model, optimizer, tensors)
        finally:
            entered.wait()
            torch.cuda.set_sync_debug_mode("default")

    on_device(rank, 2)


@only_on_a_gpu
def test_the_call_follows_the_stream_that_is_current():
    def rank(group):
        side, wrong = torch.cuda.Stream(), 0
        tensor = torch.empty(LARGE, device=DEVICE)
        for turn in range(200):
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000)
                tensor.fill_(float(turn + group.rank))
                pk.weighted_all_reduce_(tensor, 1, group)
            torch.cuda.current_stream().wait_stream(side)
            work = pk.weighted_all_reduce_(tensor, 1, group, async_op=True)
            work.wait()
            wrong += (tensor != turn + 0.5).sum()
            side.wait_stream(torch.cuda.current_stream())
        return int(wrong)

    assert on_device(rank, 2) == [0, 0]


# Case 49: https://github.com/pytorch/pytorch/pull/45787
@only_on_a_gpu
@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_made_on_a_side_stream_are_waited_for(overlap):
    size = 1 if overlap else 2  # one thread runs the backward of all virtual ranks

    def rank(group):
        model = pk.DataParallel(Leaf(LARGE).to(DEVICE), group, overlap=overlap)
        side, wrong = torch.cuda.Stream(), 0
        for turn in range(200):
            model.zero_grad()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000)
                loss = model(torch.full((LARGE,), float(turn + group.rank), device=DEVICE))
            torch.cuda.current_stream().wait_stream(side)
            model.backward(loss)
            wrong += (model.p.grad != turn + (size - 1) / 2).sum()
        return int(wrong)

    assert on_device(rank, size) == [0] * size


class Captured:
    """One CUDA graph of what all virtual ranks enqueue between `begin` and `end`."""

    def __init__(self, size: int) -> None:
        self.graph, self.meet = torch.cuda.CUDAGraph(), threading.Barrier(size, timeout=30)
        self.events: list[torch.cuda.Event] = [torch.cuda.Event() for _ in range(size)]

    def begin(self, rank: int) -> None:
        torch.cuda.synchronize()
        self.meet.wait()
        if rank == 0:
            self.graph.capture_begin(capture_error_mode="relaxed")
            self.events[0].record()
        self.meet.wait()
        if rank:
            torch.cuda.current_stream().wait_event(self.events[0])
        self.meet.wait()

    def end(self, rank: int) -> None:
        if rank:
            self.events[rank].record()
        self.meet.wait()
        if rank == 0:
            for event in self.events[1:]:
                torch.cuda.current_stream().wait_event(event)
            self.graph.capture_end()
        self.meet.wait()

    def replay(self, rank: int) -> None:
        torch.cuda.synchronize()
        self.meet.wait()
        if rank == 0:
            self.graph.replay()
        torch.cuda.synchronize()
        self.meet.wait()


@only_on_a_gpu
@pytest.mark.parametrize("size", [1, 2])
def test_graphs_replay_collectives_with_new_values_and_weights(size):
    captured = Captured(size)

    def rank(group):
        own, reached = torch.zeros(1003, device=DEVICE), group.empty(1003).zero_()
        weight = torch.ones((), dtype=torch.float64, device=DEVICE)
        prepared = PreparedAllReduce([own, reached], group)
        prepared.run(weight)
        captured.begin(group.rank)
        total = prepared.run(weight)
        captured.end(group.rank)
        found = []
        for turn in range(3):
            own.fill_(float(turn + group.rank))
            reached.fill_(float(turn - group.rank))
            weight.fill_(float(1 + group.rank * turn))
            captured.replay(group.rank)
            found.append((own.unique().tolist(), reached.unique().tolist(), total.item()))
            prepared.run(1)  # calls in between are in order too
        return found

    for found in on_device(rank, size):
        for turn, (own, reached, total) in enumerate(found):
            weights = [1.0 + r * turn for r in range(size)]
            values = [
                torch.tensor([[turn + r, turn - r]], dtype=torch.float32) for r in range(size)
            ]
            oracle.assert_weighted(torch.tensor([[own[0], reached[0]]]), values, weights)
            assert len(own) == len(reached) == 1 and total == sum(weights)


# -- the optimizer's pass -------------------------------------------------------------------------


class Leaves(nn.Module):
    """Parameters of odd sizes whose gradients are given."""

    SHAPES = ((257,), (1000, 3), (5,), (70001,), (0,), ())

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        drawn = [random(99, i, shape, torch.float32) for i, shape in enumerate(self.SHAPES)]
        values = [(value / 100).to(device, dtype) for value in drawn]
        self.leaves = nn.ParameterList([nn.Parameter(value) for value in values])

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.leaves, gradients, strict=True)
        return sum((p * g.to(p.device, p.dtype)).sum() for p, g in pairs)


def gradients(step: int, rank: int) -> list[torch.Tensor]:
    return [random(step * 16 + i, rank, shape, torch.float32) for i, shape in enumerate(
        Leaves.SHAPES
    )]  # fmt: skip


def trained(group, dtype, device, steps, weights, **options):
    model = pk.DataParallel(Leaves(dtype, device), group, overlap=False)
    optimizer = pk.ShardedAdamW(model.parameters(), group=group, data_parallel=model, **options)
    for step in range(steps):
        given = gradients(step, group.rank)
        if weights[group.rank] == 0:
            given = [g.fill_(math.nan) for g in given]
        model.backward(model(given), weights[group.rank])
        optimizer.step()
    norm = optimizer.last_grad_norm
    parameters = [p.detach().cpu() for p in model.parameters()]
    return parameters, optimizer.state_dict()["state"], None if norm is None else norm.item()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("norm", [None, 0.5], ids=["plain", "clipped"])
def test_fp32_steps_are_those_of_float64(size, norm):
    weights, options = weights_of(size, size), {"lr": 0.01, "weight_decay": 0.1}
    wanted = Leaves(torch.float64, "cpu")
    with torch.no_grad():
        for p, q in zip(wanted.leaves, Leaves(torch.float32, "cpu").leaves, strict=True):
            p.copy_(q)
    exact = torch.optim.AdamW(wanted.parameters(), **options)
    norms = []
    for step in range(3):
        everybody = [gradients(step, rank) for rank in range(size)]
        for index, p in enumerate(wanted.leaves):
            parts = [
                g[index].double() * (w / sum(weights))
                for g, w in zip(everybody, weights, strict=True)
                if w > 0
            ]
            p.grad = torch.stack(parts).sum(0)
        if norm is not None:
            norms.append(nn.utils.clip_grad_norm_(wanted.parameters(), norm).item())
        exact.step()

    def rank(group):
        return trained(group, torch.float32, DEVICE, 3, weights, max_grad_norm=norm, **options)

    ranks = on_device(rank, size)
    assert same([digest(parameters) for parameters, _, _ in ranks])
    parameters, state, measured = ranks[0]
    if norm is not None:
        assert measured == pytest.approx(norms[-1], rel=1e-6)
    for index, (found, p) in enumerate(zip(parameters, wanted.leaves, strict=True)):
        if p.numel():
            assert (found - p).abs().max() <= 3e-6 * (p.abs().max() + 1), index
            kept = exact.state[p]
            for name in ("exp_avg", "exp_avg_sq"):
                error = (state[index][name] - kept[name]).abs().max()
                assert error <= 1e-5 * kept[name].abs().max(), (index, name)
            assert state[index]["step"] == 3


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, "int8"])
@pytest.mark.parametrize("master", [True, False])
def test_every_format_gives_what_the_cpu_gives(size, dtype, state_dtype, master):
    if dtype == torch.float16 and not master and size > 1:
        pytest.skip("as with masters")
    weights = weights_of(size + 1, size)
    options = {"lr": 0.01, "state_dtype": state_dtype, "master_weights": master, "amsgrad": True}
    here = on_device(lambda group: trained(group, dtype, DEVICE, 3, weights, **options), size)
    there = virtual_ranks(lambda group: trained(group, dtype, "cpu", 3, weights, **options), size)
    assert same([digest(parameters) for parameters, _, _ in here])
    for found, wanted in zip(here[0][0], there[0][0], strict=True):
        if found.numel():
            # The same arithmetic; only 1/(1 - beta^t) may differ in its last bit before rounding,
            # and with it where a value falls between two codes or two bfloat16 numbers.
            unequal = (found != wanted).float().mean()
            assert unequal <= 0.02, unequal
            scale = wanted.float().abs() + 0.02
            assert ((found - wanted).float().abs() <= 0.02 * scale).all()


def test_a_gradient_that_is_not_finite_moves_nothing_and_is_counted():
    def rank(group):
        model = pk.DataParallel(Leaf(5000).to(DEVICE), group, overlap=False)
        optimizer = pk.ShardedAdamW(model.parameters(), group=group, data_parallel=model)
        steps = []
        for value in (1.0, math.nan, math.inf, 1.0):
            before = model.p.detach().clone()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.backward(model(torch.full((5000,), value, device=DEVICE)), 1 + group.rank)
                optimizer.step()
            steps.append(not torch.equal(before, model.p))
        return steps, optimizer.skipped_steps, optimizer.state_dict()["state"][0]["step"].item()

    assert on_device(rank, 2) == [([True, False, False, True], 2, 2)] * 2


def test_steps_on_averaged_gradients_are_torchs():
    module = mlp().to(DEVICE)
    wanted = copy.deepcopy(module).double()
    exact = torch.optim.AdamW(wanted.parameters(), lr=0.02)

    def rank(group):
        model = pk.DataParallel(copy.deepcopy(module), group, overlap=False)
        optimizer = pk.ShardedAdamW(model.parameters(), lr=0.02, group=group)
        for step in range(3):
            model.zero_grad()
            (x, weight) = items([2, 3], seed=step)[group.rank]
            model.backward(mean_square(model, x.to(DEVICE)), weight)
            optimizer.step()
        return [p.detach().double() for p in model.parameters()]

    for step in range(3):
        exact.zero_grad()
        for x, weight in items([2, 3], seed=step):
            (mean_square(wanted, x.to(DEVICE)) * (weight / 5)).backward()
        exact.step()
    for found in on_device(rank, 2):
        for a, b in zip(found, wanted.parameters(), strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-4, atol=1e-5)


@only_on_a_gpu
def test_weight_gradients_are_added_in_place_on_the_callers_stream():
    torch.manual_seed(0)
    x = torch.randn(64, 128, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(96, 128, device=DEVICE, dtype=torch.bfloat16)
    with pk.Group(device=DEVICE) as group:
        module = nn.Linear(128, 96, bias=False).to(DEVICE, torch.bfloat16)
        module.weight.data.copy_(w)
        module.forward = lambda x: linear(x, module.weight)
        model = pk.DataParallel(module, group, grad_dtype=torch.float32)
        for turn in range(4):
            model.backward(model(x).float().sum() / 64, 1, sync=turn == 3)
        wanted = torch.ones(64, 96, device=DEVICE).double().T @ x.double() / 64
        error = (module.weight.grad.double() - wanted).abs().max() / wanted.abs().max()
        assert error < 2e-2


# -- processes ------------------------------------------------------------------------------------


def two_processes(group: pk.Group, virtual_memory: bool) -> tuple[str, float, float]:
    if not virtual_memory:
        peer_memory.PeerMapper._virtual = peer_memory.PeerMapper._symmetric  # refuses, too
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they share the GPU
        gpus = pk.Group(device=DEVICE)
    own = torch.full((1003,), [1.0, 5.0][group.rank], device=DEVICE)
    reached = gpus.empty(70001).fill_([1.0, 5.0][group.rank])
    pk.weighted_all_reduce_([own, reached], [1, 3][group.rank], gpus)
    found = gpus.transport, own.unique().item(), reached.unique().item()
    gpus.close()
    return found


# Case 48: https://github.com/NVIDIA/nccl/issues/418
@only_on_a_gpu
@pytest.mark.parametrize("virtual_memory", [True, False], ids=["virtual-memory", "ipc"])
def test_processes_on_one_gpu_reach_each_other(virtual_memory):
    assert run_ranks(two_processes, 2, virtual_memory) == [("cuda-peer", 4.0, 4.0)] * 2

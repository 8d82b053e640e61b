"""On a GPU: collectives over virtual ranks, against exact values."""

from __future__ import annotations

import itertools
import math
import threading
import time
import warnings

import oracle
import pytest
import torch
from gpu import DEVICE, SIZES, on_device, only_on_a_gpu
from ranks import digest, laid_out, message_of, random, same, weights_of
from training import Leaf

import parallelkit as pk
from parallelkit.prepared import PreparedAllReduce
from parallelkit.testing import run_ranks, virtual_ranks
from parallelkit.transport import peer_memory

pytestmark = pytest.mark.gpu

SHAPES = ((0,), (), (1,), (3,), (5, 13), (1023,), (9001,), (3, 70001))
KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
LARGE = (1 << 20) + 3  # elements: more than one segment of every way


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

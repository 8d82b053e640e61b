"""The transport of GPUs of one host, on kernels that a fake plays: agreement, order, errors."""

from __future__ import annotations

import gc
import math
import threading

import fake_gpus
import oracle
import pytest
import torch
from ranks import NATIVE, message_of, random, same, weights_of

import parallelkit as pk
from parallelkit.prepared import PreparedAllReduce
from parallelkit.transport import REDUCTIONS, Call

pytestmark = pytest.mark.skipif(not NATIVE, reason="no native extension")

SHAPES = ((0,), (), (1,), (5, 13), (1023,))
KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)


@pytest.fixture
def runtime(monkeypatch):
    return fake_gpus.install(monkeypatch, fake_gpus.Runtime())


def call(weight: float | torch.Tensor) -> Call:
    return Call(5, 0, weight, 1.0, REDUCTIONS["mean"], False)


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_lists_of_every_dtype_and_shape_become_their_mean(runtime, size):
    weights = weights_of(1, size)
    inputs = [
        [random(i, rank, shape, kind) for i, (shape, kind) in enumerate(all_kinds())]
        for rank in range(size)
    ]

    def rank(group):
        assert group.transport == ("cuda-peer" if size > 1 else "single")
        tensors = [t.clone() for t in inputs[group.rank]]
        total = pk.weighted_all_reduce_(tensors, weights[group.rank], group)
        assert total.dtype == torch.float64 and total.dim() == 0
        return tensors, total.item()

    for tensors, total in fake_gpus.peers(runtime, rank, size):
        assert total == sum(weights)
        for index, tensor in enumerate(tensors):
            if tensor.dtype == torch.float32:  # the fake adds in float64 and rounds once
                oracle.assert_weighted(tensor, [i[index] for i in inputs], weights)


def all_kinds():
    return [(shape, kind) for shape in SHAPES for kind in KINDS]


def test_shards_are_scattered_and_gathered(runtime):
    inputs = [random(3, rank, (1003,), torch.float32) for rank in range(3)]

    def rank(group):
        shard = pk.weighted_reduce_scatter(inputs[group.rank], group.rank, group)
        return pk.all_gather_flat(shard, 1003, group)

    results = fake_gpus.peers(runtime, rank, 3)
    assert same([oracle.bits(whole) for whole in results])
    oracle.assert_weighted(results[0], inputs, [0, 1, 2])


def test_memory_of_the_group_is_freed_once_no_rank_has_a_tensor_of_it(runtime):
    def rank(group):
        kept = group.empty(3, 4)
        view = group.empty(5, dtype=torch.bfloat16)[2:]
        other = group.empty(7)
        assert kept.shape == (3, 4) and view.dtype == torch.bfloat16
        segments = group._transport._comm.meeting.segments[group.rank]
        counts = [len(segments)]
        if group.rank == 0:
            del view
        del other
        gc.collect()
        group.empty(1)
        counts.append(len(segments))  # `other` is gone; another rank still has `view`
        assert group.empty(0).numel() == 0
        return counts, kept.fill_(1.0)

    for counts, kept in fake_gpus.peers(runtime, rank, 2):
        assert counts == [3, 3]
        assert bool((kept == 1).all()), "it outlives the group"


# -- what the hosts agree on ----------------------------------------------------------------------


def test_ranks_that_disagree_are_told_before_any_kernel_starts(runtime):
    def rank(group):
        tensor = torch.ones(2 + group.rank)
        told = message_of(
            pk.CollectiveMismatchError, lambda: pk.weighted_all_reduce_(tensor, 1, group)
        )
        bad = message_of(
            ValueError, lambda: pk.weighted_all_reduce_(tensor[:2], 1.0 - 2 * group.rank, group)
        )
        if group.rank == 0:
            other = message_of(pk.CollectiveMismatchError, lambda: group.barrier())
        else:
            other = message_of(
                pk.CollectiveMismatchError, lambda: pk.weighted_all_reduce_(tensor, 1, group)
            )
        assert bool((tensor == 1).all())
        assert runtime.calls[group.rank] == []
        pk.weighted_all_reduce_(tensor[:2], 1, group)
        return told, bad, other

    results = fake_gpus.peers(runtime, rank, 2)
    assert same([result[:2] for result in results])
    told, bad, _ = results[0]
    assert "float32[2] on rank 0" in told and "float32[3] on rank 1" in told
    assert "-1.0 on rank 1" in bad
    differ = "Group.barrier on rank 0; weighted_all_reduce_ on rank 1"
    assert all(differ in other for *_, other in results)


@pytest.mark.parametrize("bad", [math.nan, -1.0, math.inf])
def test_a_bad_weight_on_the_gpu_is_raised_by_every_rank_at_the_next_call(runtime, bad):
    def rank(group):
        transport, tensor = group._transport, torch.tensor([1.0, 5.0][group.rank])
        prepared = transport.prepare([tensor])
        weight = torch.tensor([bad, 3.0][group.rank])
        reply = transport.all_reduce(prepared, call(weight))
        assert reply.outcome == "done", "the hosts do not know yet"
        assert tensor == [1.0, 5.0][group.rank]
        if group.rank == 0:  # this GPU is late: nothing shows at the next call yet
            runtime.statuses[0] = [("done", -1)]
        told = message_of(ValueError, lambda: pk.weighted_all_reduce_(tensor, 1, group))
        weight.fill_([1.0, 3.0][group.rank])
        reply = transport.all_reduce(prepared, call(weight))
        return told, tensor.item(), reply.total.item(), transport.barrier().outcome

    results = fake_gpus.peers(runtime, rank, 2)
    assert [r[1:] for r in results] == [(4.0, 4.0, "done")] * 2
    assert all("a weight on the GPU" in r[0] for r in results)


def test_collectives_of_the_same_tensor_are_told_apart(runtime):
    def rank(group):
        if group.rank:
            return message_of(
                pk.CollectiveMismatchError, lambda: pk.all_gather_flat(torch.ones(2), 4, group)
            )
        return message_of(
            pk.CollectiveMismatchError, lambda: pk.weighted_reduce_scatter(torch.ones(4), 1, group)
        )

    for told in fake_gpus.peers(runtime, rank, 2):
        assert "weighted_reduce_scatter on rank 0; all_gather_flat on rank 1" in told


def test_weights_of_the_host_and_of_the_gpu_go_together(runtime):
    def rank(group):
        tensor = torch.tensor([1.0, 5.0][group.rank])
        weight = [1.0, torch.tensor(3, dtype=torch.int64)][group.rank]
        reply = group._transport.all_reduce(group._transport.prepare([tensor]), call(weight))
        return tensor.item(), reply.total.item()

    assert fake_gpus.peers(runtime, rank, 2) == [(4.0, 4.0)] * 2


def test_in_a_capture_hosts_agree_on_nothing(runtime):
    runtime.capturing = True

    def rank(group):
        tensor = torch.tensor([1.0, 5.0][group.rank])
        meetings = []
        host = group._transport.host
        group._transport.host = type(
            "Host", (), {"all_reduce": lambda *_: meetings.append(1), "close": host.close}
        )()
        prepared = PreparedAllReduce(tensor, group)
        prepared.run([1, 3][group.rank])
        prepared.run([1, 3][group.rank])
        uploads = prepared._native.native.uploads
        refused = message_of(
            RuntimeError,
            lambda: pk.weighted_all_reduce_(torch.ones(1, dtype=torch.int64), 1, group),
        )
        return tensor.item(), meetings, uploads, "CUDA graph" in refused

    # Each captured call fills its own table; on the second the mean is in place already.
    assert fake_gpus.peers(runtime, rank, 2) == [(4.0, [], 2, True)] * 2


def test_a_prepared_list_is_uploaded_once(runtime):
    def rank(group):
        prepared = PreparedAllReduce(torch.ones(3), group)
        for _ in range(3):
            prepared.run(1)
        return prepared._native.native.uploads

    assert fake_gpus.peers(runtime, rank, 2) == [1, 1]


def test_no_call_waits_for_the_gpu(runtime, monkeypatch):
    def rank(group):
        tensors, shared = [torch.ones(3), torch.ones(5, dtype=torch.bfloat16)], group.empty(9)
        monkeypatch.setattr(torch.cuda, "synchronize", None)
        try:
            for _ in range(3):
                pk.weighted_all_reduce_([*tensors, shared], 1, group)
                pk.weighted_all_reduce_(tensors, 1, group, async_op=True).wait()
                pk.all_gather_flat(pk.weighted_reduce_scatter(shared, 1, group), 9, group)
                group.barrier()
        finally:
            together.wait()
            monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
            together.wait()

    together = threading.Barrier(2, timeout=20)
    fake_gpus.peers(runtime, rank, 2)


# -- work in the background -----------------------------------------------------------------------


def test_work_started_runs_on_a_stream_of_its_own_and_wait_orders_the_callers_after_it(
    runtime, monkeypatch
):
    events = []

    class Stream(fake_gpus.Stream):
        def __init__(self, device=None):
            self.name = "side"

        def wait_stream(self, other):
            events.append((threading.get_ident(), "side waits"))

        def wait_event(self, event):
            events.append((threading.get_ident(), "caller waits for", event.name))

    current = Stream()
    current.name = "caller"
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)

    def rank(group):
        tensor = torch.tensor([1.0, 5.0][group.rank])
        work = pk.weighted_all_reduce_(tensor, [1, 3][group.rank], group, async_op=True)
        assert work.done()
        total = work.wait()
        future = pk.weighted_all_reduce_(tensor, 1, group, async_op=True)._pending
        assert future.devices == [torch.device("cpu")]
        return [e[1:] for e in events if e[0] == threading.get_ident()][:2], total.item()

    waits = [("side waits",), ("caller waits for", "side")]
    assert fake_gpus.peers(runtime, rank, 2) == [(waits, 4.0)] * 2


def test_a_reduce_scatter_runs_in_the_background_too(runtime):
    inputs = [random(3, rank, (7,), torch.float32) for rank in range(2)]

    def rank(group):
        transport = group._transport
        start, stop = pk.shard_bounds(7, 2, group.rank)
        shard = torch.full((stop - start,), math.nan)
        prepared = transport.prepare([inputs[group.rank]])
        work = transport.start_reduce_scatter(prepared, shard, call(1.0 + group.rank), b"")
        assert work.wait().total.item() == 3.0
        return shard

    oracle.assert_weighted(torch.cat(fake_gpus.peers(runtime, rank, 2)), inputs, [1, 2])


def test_a_refusal_in_the_background_comes_with_what_each_rank_told(runtime):
    def rank(group):
        transport = group._transport
        prepared = transport.prepare([torch.ones(1)])
        odd = call(1.0)._replace(signature=group.rank)
        reply = transport.start_all_reduce(prepared, odd, str(group.rank).encode()).wait()
        return reply.outcome, list(reply.heard)

    assert fake_gpus.peers(runtime, rank, 2) == [("mismatch", [b"0", b"1"])] * 2


def test_what_runs_in_the_background_keeps_its_tensors(runtime, monkeypatch):
    kept = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, s: kept.append(t.data_ptr()))

    def rank(group):
        transport, tensor, weight = group._transport, torch.ones(3), torch.tensor(2.0)
        work = transport.start_all_reduce(transport.prepare([tensor]), call(weight), b"")
        return {tensor.data_ptr(), weight.data_ptr()} <= set(kept) and work.wait().total.item()

    assert fake_gpus.peers(runtime, rank, 1) == [2.0]


def test_work_of_other_shapes_raises_where_it_is_waited_for(runtime):
    def rank(group):
        work = pk.weighted_all_reduce_(torch.ones(1 + group.rank), 1, group, async_op=True)
        group.barrier()
        return message_of(pk.CollectiveMismatchError, work.wait)

    assert same(fake_gpus.peers(runtime, rank, 2))


# -- ranks that are lost --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "error", "words"),
    [
        ("timeout", pk.CollectiveTimeoutError, "rank 2 did not arrive within"),
        ("peer_lost", pk.PeerLostError, "rank 2 is gone"),
    ],
)
def test_a_kernel_that_gave_up_breaks_the_group_for_every_rank(runtime, outcome, error, words):
    """One host sees it first; the others wait for that one, and blame whom its kernels blamed."""
    runtime.statuses = {0: [(outcome, 2)], 1: [("done", -1), (outcome, 2)]}

    def rank(group):
        x = torch.ones(1)
        if group.rank == 2:  # nobody meets it any more
            return message_of(pk.ParallelKitError, lambda: pk.weighted_all_reduce_(x, 1, group))
        first = message_of(error, lambda: pk.weighted_all_reduce_(x, 1, group))
        again = message_of(error, lambda: group.barrier())
        assert group._transport.broken and first == again
        return first

    results = fake_gpus.peers(runtime, rank, 3)
    assert all(words in told for told in results[:2]), results
    assert {(r, o, c) for r, o, c in runtime.aborted if r < 2} == {
        (0, outcome, 2),
        (1, outcome, 2),
    }


def test_a_rank_that_left_is_lost_and_kernels_that_wait_for_it_give_up(runtime):
    def rank(group):
        if group.rank == 1:
            return "left"
        return message_of(
            pk.PeerLostError, lambda: pk.weighted_all_reduce_(torch.ones(1), 1, group)
        )

    told, _ = fake_gpus.peers(runtime, rank, 2)
    assert "rank 1 is gone" in told
    assert runtime.aborted == [(0, "peer_lost", 1)]


def test_a_rank_that_does_not_come_is_late(runtime):
    done = threading.Event()

    def rank(group):
        if group.rank == 1:
            done.wait(10)
            return ""
        try:
            return message_of(pk.CollectiveTimeoutError, lambda: group.barrier())
        finally:
            done.set()

    told, _ = fake_gpus.peers(runtime, rank, 2, timeout=0.5)
    assert "rank 1 did not arrive within 0.5 s" in told


def test_a_closed_group_says_so(runtime):
    def rank(group):
        transport = group._transport
        group.close()
        group.close()
        return message_of(RuntimeError, lambda: group.barrier()), message_of(
            RuntimeError, lambda: transport.barrier()
        )

    for told in fake_gpus.peers(runtime, rank, 2):
        assert all("closed" in text for text in told)

"""Memory that GPUs reach, and the transport they get: each way, and what follows if it fails."""

from __future__ import annotations

import gc
import os
import sys
import threading
import types
import warnings
from datetime import timedelta

import fake_gpus
import pytest
import torch
import torch.distributed as dist
from ranks import NATIVE, message_of, same

import parallelkit as pk
from parallelkit import group as groups
from parallelkit import ops
from parallelkit.testing import run_ranks, virtual_ranks
from parallelkit.transport import REDUCTIONS, Call, Reply, choose
from parallelkit.transport.mapping import MappingError
from parallelkit.transport.peer_memory import PeerMapper
from parallelkit.transport.process_group import ProcessGroup

pytestmark = pytest.mark.skipif(not NATIVE, reason="no native extension")

SYMMETRIC = "torch.distributed._symmetric_memory"


@pytest.fixture
def runtime(monkeypatch):
    monkeypatch.setitem(sys.modules, SYMMETRIC, None)  # importing it fails
    return fake_gpus.install(monkeypatch, fake_gpus.Runtime())


def read_by_all(
    group: pk.Group, runtime: fake_gpus.Runtime, device: int | None = None
) -> list[int]:
    """Each rank writes its number into its slab; what this one reads of everybody's."""
    device = group.rank if device is None else device
    mapper = PeerMapper(
        runtime, group.rank, torch.device("cuda", device), group._gather_objects, None
    )
    slab = mapper(4096)
    mine = fake_gpus.at(slab.address, 4096, torch.uint8)
    assert slab.nbytes == 4096 and not mine.any(), "zeroed"
    mine.fill_(group.rank + 1)
    group.barrier()
    read = [int(fake_gpus.at(a + 4095, 1, torch.uint8)) for a in slab.addresses]
    group.barrier()
    return read


# -- the ways -------------------------------------------------------------------------------------


class Symmetric(types.ModuleType):
    """torch's module: a tensor lies somewhere inside its allocation."""

    OFFSET = 512

    def __init__(self, size: int) -> None:
        super().__init__(SYMMETRIC)
        self.whole: list[torch.Tensor] = [torch.empty(0)] * size
        self.meeting = threading.Barrier(size, timeout=20)
        self.broken = None

    def empty(self, nbytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        whole = self.whole[device.index] = torch.full((nbytes + self.OFFSET,), 9, dtype=dtype)
        return whole[self.OFFSET :]

    def rendezvous(self, flat: torch.Tensor, group: object) -> object:
        if self.broken:
            raise RuntimeError(self.broken)
        self.meeting.wait()
        pointers = [whole.data_ptr() for whole in self.whole]
        return types.SimpleNamespace(
            buffer_ptrs=pointers, offset=self.OFFSET, multicast_ptr=1 << 40
        )


def test_symmetric_memory_is_taken_first_and_found_at_its_offset(runtime, monkeypatch):
    monkeypatch.setitem(sys.modules, SYMMETRIC, Symmetric(3))
    runtime.broken = {"shareable": "all", "plain": "all"}
    assert virtual_ranks(lambda group: read_by_all(group, runtime), 3) == [[1, 2, 3]] * 3


def test_the_address_of_all_parts_at_once_comes_with_symmetric_memory_alone(runtime, monkeypatch):
    def rank(group):
        device = torch.device("cuda", group.rank)
        mapper = PeerMapper(runtime, group.rank, device, group._gather_objects, None)
        return mapper(64).multicast

    assert virtual_ranks(rank, 2) == [0, 0]
    monkeypatch.setitem(sys.modules, SYMMETRIC, Symmetric(2))
    assert virtual_ranks(rank, 2) == [1 << 40] * 2


def test_symmetric_memory_that_refuses_is_not_the_end(runtime, monkeypatch):
    module = Symmetric(2)
    module.broken = "CUDASymmetricMemoryAllocator does not support expandable segments"
    monkeypatch.setitem(sys.modules, SYMMETRIC, module)
    assert virtual_ranks(lambda group: read_by_all(group, runtime), 2) == [[1, 2]] * 2
    runtime.broken = {"shareable": "all", "plain": "all"}
    told = virtual_ranks(lambda group: trouble(group, runtime), 2)
    assert module.broken in told[0]


def over_descriptors(group: pk.Group) -> tuple[list[int], int]:
    sys.modules[SYMMETRIC] = None
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    read = read_by_all(group, fake_gpus.Runtime())
    gc.collect()
    return read, max(0, len(os.listdir("/proc/self/fd")) - before)


def test_processes_hand_each_other_descriptors_and_keep_none():
    assert run_ranks(over_descriptors, 3) == [([1, 2, 3], 0)] * 3


def over_handles(group: pk.Group) -> list[int]:
    sys.modules[SYMMETRIC] = None
    runtime = fake_gpus.Runtime()
    runtime.broken = {"open_fd": "1"}  # on one rank, and so on none
    return read_by_all(group, runtime)


def test_handles_follow_where_one_rank_cannot_open_a_descriptor():
    assert run_ranks(over_handles, 2) == [[1, 2]] * 2


def trouble(group: pk.Group, runtime: fake_gpus.Runtime, device: int | None = None) -> str:
    return message_of(MappingError, lambda: read_by_all(group, runtime, device))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            {"broken": {"open_fd": "1", "open_ipc": "0"}},
            [
                "symmetric memory: ",
                "virtual memory: open_fd: CUDA says no [rank 1 of 2]",
                "CUDA IPC: open_ipc: CUDA says no [rank 0 of 2]",
            ],
        ),
        (
            {"vmm": False, "broken": {"plain": "all"}},
            ["virtual memory: cannot be exported [rank 0 of 2]", "plain: CUDA says no"],
        ),
        ({"no_access": {(1, 0)}}, ["no peer access, GPU 1 cannot reach GPU 0 [rank 1]"]),
        ({"drivers": {1: 12080}}, ["(13000, 12080) on rank 1 and (13000, 13010) on rank 0"]),
    ],
    ids=["nothing-opens", "no-vmm", "no-access", "drivers"],
)
def test_where_nothing_works_every_rank_knows_why(runtime, setting, words):
    vars(runtime).update(setting)
    told = virtual_ranks(lambda group: trouble(group, runtime), 2)
    assert same(told)
    for word in words:
        assert word in told[0]


def test_ranks_on_one_gpu_leave_out_symmetric_memory(runtime, monkeypatch):
    monkeypatch.setitem(sys.modules, SYMMETRIC, Symmetric(2))
    read = virtual_ranks(lambda group: read_by_all(group, runtime, device=0), 2)
    assert read == [[1, 2]] * 2
    runtime.broken = {"shareable": "all", "plain": "all"}
    told = virtual_ranks(lambda group: trouble(group, runtime, device=0), 2)
    assert "symmetric memory: two ranks are on one GPU" in told[0]


def test_memory_that_runs_out_later_is_an_error_and_no_other_way(runtime):
    def rank(group):
        mapper = PeerMapper(
            runtime, group.rank, torch.device("cuda", group.rank), group._gather_objects, None
        )
        mapper(64)
        group.barrier()
        runtime.broken = {"shareable": "1"}
        told = message_of(MappingError, lambda: mapper(64))
        group.barrier()
        runtime.broken = {}
        mapper(64)
        return told

    told = virtual_ranks(rank, 2)
    assert same(told) and told[0] == "virtual memory: shareable: CUDA says no [rank 1 of 2]"


# -- the choice -----------------------------------------------------------------------------------


class Ranks:
    """What the choice asks a process group for."""

    def __init__(self, rank: int) -> None:
        self.rank = lambda: rank


def chosen(group: pk.Group, device: int | None = None) -> tuple[str, list[str]]:
    """The transport's class, and what was warned of."""
    device = group.rank if device is None else device
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        transport = choose.choose_transport(
            Ranks(group.rank),
            torch.device("cuda", device),
            timedelta(seconds=10),
            "auto",
            group._gather_objects,
        )
        group.barrier()
    transport.close()
    return type(transport).__name__, [str(w.message) for w in said]


@pytest.fixture
def choice(monkeypatch, runtime):
    """A runtime for the choice; plain torch.distributed is not started."""

    class Plain:
        def __init__(self, *args: object) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr(choose, "load_cuda", lambda: (runtime, ""))
    monkeypatch.setattr(choose, "ProcessGroup", Plain)
    return runtime


def told_once(results: list[tuple[str, list[str]]], kind: str) -> str:
    """The one warning of all ranks (whose threads share their list of warnings)."""
    assert {name for name, _ in results} == {kind}, results
    return "; ".join(dict.fromkeys(text for _, texts in results for text in texts))


def test_gpus_that_reach_each_other_need_no_warning(choice):
    assert told_once(virtual_ranks(chosen, 3), "CudaPeer") == ""
    assert told_once(virtual_ranks(chosen, 1), "CudaPeer") == ""


def test_ranks_on_one_gpu_are_told_that_they_take_turns(choice):
    told = told_once(virtual_ranks(lambda group: chosen(group, 0), 2), "CudaPeer")
    assert "several ranks are on one GPU" in told and "virtual_ranks" in told


def test_memory_out_of_reach_is_said_once_and_torch_does_the_work(choice):
    choice.no_access = {(0, 1)}
    told = told_once(virtual_ranks(chosen, 2), "Plain")
    assert told == (
        "parallelkit uses torch.distributed between ranks of one host: no peer access, GPU 0 "
        "cannot reach GPU 1 [rank 0]"
    )


def test_an_extension_that_one_rank_lacks_is_said_once(choice, monkeypatch):
    def lacking(device):
        return "no CUDA extension: reinstall" if device.index == 1 else ""

    monkeypatch.setattr(choose, "_lacking", lacking)
    told = told_once(virtual_ranks(chosen, 2), "Plain")
    assert told.endswith("no CUDA extension: reinstall [rank 1 of 2]")


def test_gpus_of_several_hosts_are_left_to_torch(choice, monkeypatch):
    names = {}

    def rank(group):
        names[threading.get_ident()] = group.rank // 2
        return chosen(group)

    monkeypatch.setattr(choose, "host_identity", lambda: names[threading.get_ident()])
    assert told_once(virtual_ranks(rank, 4), "Plain") == ""


# Case 44: https://github.com/vllm-project/vllm/issues/42609
def out_of_reach(group: pk.Group) -> tuple[float, float, list[str]]:
    runtime = fake_gpus.Runtime()
    sys.modules[SYMMETRIC] = None
    runtime.broken = {"open_fd": "0", "open_ipc": "1"}
    choose.load_cuda = lambda: (runtime, "")
    choose.ProcessGroup = lambda ranks, device, timeout: ProcessGroup(
        ranks, torch.device("cpu"), timeout
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        transport = choose.choose_transport(
            dist.group.WORLD,
            torch.device("cuda", group.rank),
            timedelta(seconds=10),
            "auto",
            group._gather_objects,
        )
    tensor = torch.tensor([1.0, 5.0][group.rank])
    call = Call(1, 0, [1.0, 3.0][group.rank], 1.0, REDUCTIONS["mean"], False)
    reply = transport.all_reduce(transport.prepare([tensor]), call)
    transport.close()
    return tensor.item(), reply.total, [str(w.message) for w in said]


def test_a_handle_that_cannot_be_opened_costs_one_warning_and_no_number():
    first, second = run_ranks(out_of_reach, 2)
    assert first[:2] == second[:2] == (4.0, 4.0)
    assert len(first[2]) == 1 and second[2] == []
    for word in ("torch.distributed", "virtual memory", "[rank 0 of 2]", "CUDA IPC", "[rank 1 of"):
        assert word in first[2][0]


def test_what_torch_does_in_the_background_follows_the_callers_stream(monkeypatch):
    entered = []

    class Stream(fake_gpus.Stream):
        def __enter__(self):
            entered.append(threading.get_ident())

    mine = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: mine)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    plain = ProcessGroup(None, torch.device("cuda", 0), timedelta(seconds=1))
    outcome = plain._on_this_stream(lambda: Reply("done", 1.0))
    thread = threading.Thread(target=outcome)
    thread.start()
    thread.join()
    assert entered == [thread.ident]
    on_cpu = ProcessGroup(None, torch.device("cpu"), timedelta(seconds=1))
    assert on_cpu._on_this_stream(entered.clear) == entered.clear


# -- loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (None, ["no CUDA extension", "reinstall parallelkit where nvcc is found"]),
        (types.SimpleNamespace(interface=0), ["it is stale (interface 0, wanted"]),
        (fake_gpus.Runtime(gpus=0), ["CUDA driver version is insufficient"]),
    ],
    ids=["missing", "stale", "no-driver"],
)
def test_an_extension_that_cannot_be_used_says_why(monkeypatch, module, words):
    monkeypatch.setitem(sys.modules, "parallelkit._cuda", module)
    loaded, reason = ops.load_cuda.__wrapped__()
    assert loaded is None
    for word in words:
        assert word in reason


def test_an_extension_that_works_is_loaded(monkeypatch):
    module = fake_gpus.Runtime()
    monkeypatch.setitem(sys.modules, "parallelkit._cuda", module)
    assert ops.load_cuda.__wrapped__() == (module, "")


# -- init and virtual ranks -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "gpus", "local", "expected"),
    [
        (2, 2, 1, ("nccl", torch.device("cuda", 1))),
        (4, 2, 3, ("gloo", torch.device("cuda", 1))),  # NCCL refuses two ranks on one GPU
        (2, 0, 1, ("gloo", None)),
    ],
)
def test_init_gives_each_rank_a_gpu_and_shares_them_over_gloo(
    monkeypatch, ranks, gpus, local, expected
):
    started = []
    here = {"RANK": local, "WORLD_SIZE": ranks, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": ranks}
    for name, value in here.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(groups, "_default", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: started.append(device))
    monkeypatch.setattr(
        groups.rendezvous, "start", lambda backend, timeout: started.append(backend)
    )
    monkeypatch.setattr(groups, "Group", lambda device, timeout: device)
    monkeypatch.setattr(groups.atexit, "register", lambda end: None)
    backend, device = expected
    assert pk.init() == device
    assert started == ([device, backend] if gpus else [backend])


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert groups._existing(torch.device("cuda")) == torch.device("cuda", 3)
    assert groups._existing(torch.device("cuda", 1)) == torch.device("cuda", 1)


def test_virtual_ranks_share_one_gpu(runtime, monkeypatch):
    monkeypatch.setattr("parallelkit.testing.load_cuda", lambda: (runtime, ""))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: fake_gpus.Stream())

    def rank(group):
        group.barrier()
        transport = group._transport
        addresses = transport._control.addresses
        return group.device, group.transport, addresses, transport._comm.meeting

    results = virtual_ranks(rank, 3, "cuda")
    assert same([r[2] for r in results]) and len(set(results[0][2])) == 3
    assert {r[:2] for r in results} == {(torch.device("cuda", 0), "cuda-peer")}
    assert len({id(r[3]) for r in results}) == 1


@pytest.mark.parametrize(
    ("found", "size", "words"),
    [
        ((None, "no CUDA extension"), 2, "2 ranks on cuda cannot be had: no CUDA extension"),
        ((fake_gpus.Runtime(), ""), 99, "at most 16 ranks fit on one GPU"),
    ],
)
def test_virtual_ranks_that_cannot_be_had_are_refused(monkeypatch, found, size, words):
    monkeypatch.setattr("parallelkit.testing.load_cuda", lambda: found)
    with pytest.raises(ValueError, match=words):
        virtual_ranks(lambda group: None, size, "cuda")

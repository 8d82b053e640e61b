"""The CUDA extension's host side: communicators, lists, tables of a step, virtual ranks.

csrc/cuda is compiled with tests/fake_cuda in place of CUDA's runtime, so that launches run the very
kernels as threads, and CPU tensors are the device's memory.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_gpus
import pybind11
import pytest
import torch
from test_cuda_gpu_step import trained

import parallelkit as pk
from parallelkit.ops import DTYPE_CODES
from parallelkit.optimizer_norm import InNorm
from parallelkit.testing import virtual_ranks
from parallelkit.transport import Call

ROOT = Path(__file__).parents[1]
PARTS = ("communicator", "sharded_step", "work", "virtual_ranks", "bindings")
BLOCKS = 2

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """parallelkit._cuda with the host as its GPU."""
    folder = tmp_path_factory.mktemp("host")
    paths = ["tests/fake_cuda", "csrc", "csrc/cuda", "tests"]
    paths += [sysconfig.get_path("include"), pybind11.get_include()]
    flags = ["-std=c++20", "-O0", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-pthread"]
    flags += ["-DPK_CUDA_ARCHS=0", *(f"-I{path}" for path in paths)]
    sources = ["tests/fake_cuda/runtime.cpp", *(f"csrc/cuda/{part}.cpp" for part in PARTS)]
    compilers = [
        subprocess.Popen(["g++", *flags, "-c", source, "-o", folder / f"{i}.o"], cwd=ROOT)
        for i, source in enumerate(sources)
    ]
    assert {compiler.wait() for compiler in compilers} == {0}
    library = folder / f"_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run(["g++", "-shared", "-pthread", *folder.glob("*.o"), "-o", library], check=True)
    spec = importlib.util.spec_from_file_location("_cuda", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Rank:
    """What a test body gets: a communicator, and tensors in its memory."""

    def __init__(self, cuda: ModuleType, rank: int, size: int, comm: Any, shared: Any) -> None:
        self.cuda, self.rank, self.size, self.comm, self._shared = cuda, rank, size, comm, shared
        self._asked = 0
        self._kept: list[torch.Tensor] = []

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """In a segment: every rank calls it alike."""
        addresses, tensors = self._shared(self._asked, numel, dtype)
        self._asked += 1
        self.comm.add_segment(addresses, tensors[self.rank].nbytes)
        return tensors[self.rank]

    def list(self, *tensors: torch.Tensor) -> Any:
        """Uploaded where it has to be."""
        made = self.comm.tensors([(t.data_ptr(), t.nbytes, DTYPE_CODES[t.dtype]) for t in tensors])
        table = torch.empty(made.table_bytes, dtype=torch.uint8)
        self._kept.append(table)
        made.upload(table.data_ptr(), 0)
        return made


def run(
    cuda: ModuleType,
    size: int,
    body: Callable[[Rank], Any],
    algorithm: str = "auto",
    timeout: float = 20.0,
) -> list[Any]:
    """body(rank) for virtual ranks, each on a thread; the results by rank."""
    virtual = cuda.VirtualRanks(size)
    bytes_each = cuda.Communicator.control_bytes(size, BLOCKS)
    controls = [cuda.Memory.plain(0, bytes_each) for _ in range(size)]
    segments: dict[int, list[torch.Tensor]] = {}
    lock = threading.Lock()

    def shared(number: int, numel: int, dtype: torch.dtype) -> tuple[list[int], list[torch.Tensor]]:
        with lock:
            if number not in segments:
                segments[number] = [torch.zeros(numel, dtype=dtype) for _ in range(size)]
            return [t.data_ptr() for t in segments[number]], segments[number]

    outcomes: list[Any] = [None] * size

    def work(rank: int) -> None:
        try:
            comm = cuda.Communicator(
                rank=rank,
                size=size,
                device=0,
                controls=[control.address for control in controls],
                blocks=BLOCKS,
                timeout_seconds=timeout,
                algorithm=cuda.algorithms.index(algorithm),
                virtual=virtual,
            )
            outcomes[rank] = body(Rank(cuda, rank, size, comm, shared))
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def said(weight: float = 1.0, signature: int = 0) -> tuple[Call, int]:
    """What a rank says of a call with reduction "mean", and stream 0."""
    return Call(signature, 0, weight, 1.0, 0, False), 0


# ---- collectives


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    if rank == 1:
        return torch.full((numel,), torch.nan, dtype=dtype)  # of weight 0
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def mean(size: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    weights = {r: 0.0 if r == 1 else r + 2.0 for r in range(size)}
    total = sum(weights.values())
    return sum(w * values(r, numel, dtype).double() for r, w in weights.items() if w) / total


def weight_of(rank: int) -> float:
    return 0.0 if rank == 1 else rank + 2.0


@pytest.mark.parametrize("algorithm", ["auto", "one-shot", "direct", "ring"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_all_reduce_is_the_weighted_mean(
    cuda: ModuleType, size: int, in_place: bool, algorithm: str
) -> None:
    shapes = [(5, torch.float32), (30001, torch.float32), (0, torch.float32), (777, torch.float64)]

    def body(rank: Rank) -> Any:
        found = []
        for several in (False, True):
            tensors = []
            for numel, dtype in shapes if several else shapes[1:2]:
                x = rank.empty(numel, dtype) if in_place else torch.empty(numel, dtype=dtype)
                tensors.append(x.copy_(values(rank.rank, numel, dtype)))
            total = torch.full((), torch.nan, dtype=torch.float64)
            listed = rank.list(*tensors)
            assert listed.in_place == in_place
            weight = torch.tensor(weight_of(rank.rank), dtype=torch.float64)
            rank.comm.all_reduce(
                listed, *said(weight=-7.0), weight_at=weight.data_ptr(), total_at=total.data_ptr()
            )
            assert rank.comm.status() == (0, -1)
            found.append((tensors, total.item()))
        return found

    results = run(cuda, size, body, algorithm)
    for found in results:
        for (tensors, total), wanted in zip(found, (shapes[1:2], shapes), strict=True):
            assert total == sum(weight_of(r) for r in range(size))
            for x, (numel, dtype) in zip(tensors, wanted, strict=True):
                exact = mean(size, numel, dtype)
                bound = 1e-6 if dtype == torch.float32 else 1e-15
                torch.testing.assert_close(x.double(), exact, rtol=bound, atol=bound)
                assert torch.equal(x, results[0][1][0][1]) or numel != 30001


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("size", "numel"), [(1, 7), (2, 40003), (3, 5), (4, 5)])
def test_shards_are_parts_of_the_mean_and_are_gathered_again(
    cuda: ModuleType, size: int, numel: int, in_place: bool
) -> None:
    def body(rank: Rank) -> Any:
        each = -(-numel // size)
        start, stop = min(numel, each * rank.rank), min(numel, each * (rank.rank + 1))
        whole = torch.empty(numel)
        if in_place:
            whole = rank.empty(numel, torch.float32)
        whole.copy_(values(rank.rank, numel, torch.float32))
        before = whole.clone()
        shard = torch.full((stop - start,), torch.nan)
        listed = rank.list(whole)
        call = said(weight_of(rank.rank))
        rank.comm.reduce_scatter(listed, shard.data_ptr(), 4, *call)
        torch.testing.assert_close(
            shard.double(), mean(size, numel, torch.float32)[start:stop], rtol=1e-6, atol=1e-6
        )
        rank.comm.barrier(0)
        assert torch.equal(whole.nan_to_num(), before.nan_to_num())
        rank.comm.barrier(0)
        rank.comm.all_gather(listed, shard.data_ptr(), 4, *call)
        assert rank.comm.status() == (0, -1)
        return whole

    for whole in run(cuda, size, body):
        exact = mean(size, numel, torch.float32)
        torch.testing.assert_close(whole.double(), exact, rtol=1e-6, atol=1e-6)


# ---- what goes wrong


def test_ranks_that_disagree_are_told_and_go_on(cuda: ModuleType) -> None:
    def body(rank: Rank) -> Any:
        x = torch.full((100 + 90000 * (rank.rank == 1),), float(rank.rank))
        told = []
        for fault in ("sizes", "shapes", "calls", "weight", "none"):
            listed = rank.list(x) if fault == "sizes" else rank.list(x[:100])
            if fault == "calls" and rank.rank == 0:
                rank.comm.barrier(0)
            else:
                weight = -1.0 if fault == "weight" and rank.rank == 1 else 1.0
                odd = rank.rank if fault == "shapes" else 0
                rank.comm.all_reduce(listed, *said(weight, signature=odd))
            told.append((cuda.outcomes[rank.comm.status()[0]], x[0].item()))
            assert rank.comm.status() == (0, -1)
        return told

    for rank, told in enumerate(run(cuda, 2, body)):
        outcomes = ["mismatch", "mismatch", "mismatch", "bad_weight", "done"]
        assert told == list(zip(outcomes, [rank] * 4 + [0.5], strict=True))


def test_a_rank_that_does_not_come_breaks_the_group(cuda: ModuleType) -> None:
    def body(rank: Rank) -> Any:
        if rank.rank == 0:
            return None
        rank.comm.barrier(0)
        first = rank.comm.status()
        rank.comm.barrier(0)  # at once
        return first, rank.comm.status()

    _, *told = run(cuda, 3, body, timeout=0.5)
    timeout = (cuda.outcomes.index("timeout"), -1)
    assert told == [(timeout, timeout)] * 2


@pytest.mark.parametrize("size", [1, 2])
def test_bad_arguments_are_refused_by_name(cuda: ModuleType, size: int) -> None:
    def body(rank: Rank) -> None:
        x = torch.zeros(8)
        with pytest.raises(ValueError, match="one address a rank, on multiples of 16"):
            rank.comm.add_segment([x.data_ptr() + 4] * rank.size, 16)
        with pytest.raises(ValueError, match="no segment begins there"):
            rank.comm.remove_segment(x.data_ptr())
        several = rank.comm.tensors([(x.data_ptr(), 16, 0), (x[4:].data_ptr(), 16, 0)])
        with pytest.raises(ValueError, match="has to be uploaded before a call"):
            rank.comm.all_reduce(several, *said())
        step = cuda.ShardedStep(rank.comm, False)
        step.add_parameter(0, False, False, False, False)
        with pytest.raises(ValueError, match="no such parameter"):
            step.add_piece(1, 0, 0, 8, 0, 0, (0, 0, 0), (0, 0, 0))
        with pytest.raises(ValueError, match="one row for each of 1 parameters, got 0"):
            step.set([], [])
        with pytest.raises(ValueError, match="want squares_at"):
            rank.comm.sharded_step(step, *said(), max_norm=1.0)
        step = cuda.ShardedStep(rank.comm, averaged=False, multicast=True)
        step.add_parameter(0, False, False, True, True)
        shared = rank.empty(8, torch.float32)
        if rank.size > 1:
            with pytest.raises(ValueError, match="segments that have a multicast address"):
                step.set([(shared.data_ptr(), shared.data_ptr(), 0, 0, 1)], [(0.0,) * 5 + (False,)])
            with pytest.raises(ValueError, match="said to be shared, but lies in no segment"):
                step.set([(x.data_ptr(), x.data_ptr(), 0, 0, 1)], [(0.0,) * 5 + (False,)])
        rank.comm.close()
        rank.comm.close()
        with pytest.raises(ValueError, match="it is closed"):
            rank.comm.barrier(0)

    run(cuda, size, body)


def test_a_segment_can_be_forgotten_and_its_place_used_again(cuda: ModuleType) -> None:
    def body(rank: Rank) -> None:
        x = torch.zeros(1024)
        for _ in range(1100):  # more than there is room for at a time
            rank.comm.add_segment([x.data_ptr()], x.nbytes)
            assert rank.comm.tensors([(x.data_ptr() + 64, 128, 0)]).in_place
            rank.comm.remove_segment(x.data_ptr())
            assert not rank.comm.tensors([(x.data_ptr() + 64, 128, 0)]).in_place

    run(cuda, 1, body)


# ---- the step

SIZES = (1000, 3, 513)
OPTIONS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def gradient(rank: int, index: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + 10 * index + step)
    return torch.randn(SIZES[index], generator=generator)


def train(
    rank: Rank,
    dtypes: tuple[torch.dtype, ...],
    max_norm: float,
    steps: int,
    in_norm: tuple[InNorm, ...],
) -> Any:
    """Steps of ShardedStep over parameters of which each rank owns whole blocks."""
    step = rank.cuda.ShardedStep(rank.comm, False)
    params, grads, state = [], [], []
    counts = torch.zeros(len(SIZES))
    for index, (numel, dtype) in enumerate(zip(SIZES, dtypes, strict=True)):
        params.append(rank.empty(numel, dtype).copy_(torch.linspace(-1, 1, numel)))
        grads.append(rank.empty(numel, torch.float32))
        step.add_parameter(DTYPE_CODES[dtype], False, in_norm[index], True, True)
        blocks = -(-numel // 256)
        each = -(-blocks // rank.size) * 256
        start, stop = min(numel, rank.rank * each), min(numel, (rank.rank + 1) * each)
        if start == stop:
            continue
        moments = [torch.zeros(stop - start) for _ in range(2)]
        master = params[-1][start:stop].float()
        state.append((moments, master))
        addresses = (*(m.data_ptr() for m in moments), 0)
        kept = master.data_ptr() if dtype != torch.float32 else 0
        step.add_piece(index, index, start, stop - start, kept, 0, addresses, (0, 0, 0))
    squares = torch.full((2,), torch.nan, dtype=torch.float64)
    report = torch.full((3,), torch.nan, dtype=torch.float64)
    reports = []
    rank.comm.barrier(0)
    for number in range(steps + 1):
        for index, grad in enumerate(grads):
            grad.copy_(gradient(rank.rank, index, number))
        if number == steps and rank.rank == rank.size - 1:
            grads[2][7] = torch.inf  # every rank skips this one
        beta1, beta2 = OPTIONS["betas"]
        setting = (OPTIONS["lr"], beta1, beta2, OPTIONS["eps"], OPTIONS["weight_decay"], False)
        rows = [
            (p.data_ptr(), g.data_ptr(), 0, 0, counts[i:].data_ptr())
            for i, (p, g) in enumerate(zip(params, grads, strict=True))
        ]
        step.set(rows, [setting])
        table = torch.empty(step.table_bytes, dtype=torch.uint8)
        step.upload(table.data_ptr(), 0)
        call = said(rank.rank + 1.0)
        rank.comm.gradient_norm(step, *call, squares_at=squares.data_ptr())
        rank.comm.sharded_step(
            step,
            *call,
            squares_at=squares.data_ptr(),
            max_norm=max_norm,
            skip_nonfinite=True,
            report_at=report.data_ptr(),
        )
        assert rank.comm.status() == (0, -1)
        reports.append((report.tolist(), squares.tolist()))
    return params, counts, reports


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("dtypes", [(F32, F32, F32), (BF16, F32, BF16)], ids=["one", "two kinds"])
@pytest.mark.parametrize("max_norm", [0.0, 5.0])
@pytest.mark.parametrize("first", [InNorm.WHOLE, InNorm.ELSEWHERE])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_step_is_adamw_on_the_mean_gradient(
    cuda: ModuleType, size: int, max_norm: float, dtypes: tuple[torch.dtype, ...], first: InNorm
) -> None:
    steps, in_norm = 3, (first, InNorm.SPLIT, InNorm.WHOLE)
    results = run(cuda, size, lambda rank: train(rank, dtypes, max_norm, steps, in_norm))

    total = sum(r + 1.0 for r in range(size))
    starts = [torch.linspace(-1, 1, n).to(d) for n, d in zip(SIZES, dtypes, strict=True)]
    wanted = [start.double().requires_grad_() for start in starts]
    optimizer = torch.optim.AdamW(wanted, **OPTIONS)
    norms = []
    for number in range(steps):
        for index, p in enumerate(wanted):
            shares = ((r + 1.0) * gradient(r, index, number).double() for r in range(size))
            p.grad = sum(shares) / total
        counted = [p.grad for p, at in zip(wanted, in_norm, strict=True) if at != InNorm.ELSEWHERE]
        norms.append(torch.nn.utils.get_total_norm(counted).item())
        if max_norm:
            norm = torch.tensor(norms[-1])
            torch.nn.utils.clip_grads_with_norm_(wanted, max_norm, norm)
        optimizer.step()

    for params, counts, reports in results:
        assert counts.tolist() == [steps] * len(SIZES)
        for p, exact, same in zip(params, wanted, results[0][0], strict=True):
            assert torch.equal(p, same)
            bound = 2e-6 if p.dtype == F32 else 2**-8
            torch.testing.assert_close(p.double(), exact.detach(), rtol=bound, atol=bound)
        for (report, squares), norm in zip(reports, norms, strict=False):
            assert report == [pytest.approx(norm, rel=1e-6), 0.0, total]
            assert sum(squares) == pytest.approx(norm**2, rel=1e-6)
        assert reports[-1][0][1:] == [1.0, total]


# ---- under the Python that calls it


def test_the_transport_and_the_optimizer_run_on_it(
    cuda: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The public calls, down to the kernels; the optimizer's steps are the CPU's to the bit."""
    fake_gpus.install(monkeypatch, fake_gpus.Runtime())
    inputs = [values(rank, 1003, torch.float32) for rank in range(3)]

    def body(group: pk.Group) -> Any:
        tensors = [inputs[group.rank].clone(), group.empty(1003).copy_(inputs[group.rank])]
        total = pk.weighted_all_reduce_(tensors, weight_of(group.rank), group)
        work = pk.weighted_all_reduce_(tensors, 1.0, group, async_op=True)
        assert work.wait() == 3.0, "of equal tensors it is the same mean"
        shard = pk.weighted_reduce_scatter(inputs[group.rank], weight_of(group.rank), group)
        gathered = pk.all_gather_flat(shard, 1003, group)
        group.barrier()
        steps = [
            trained(group, dtype, "cpu", 2, [1.0, 0.0, 3.0], max_grad_norm=norm)[0]
            for dtype, norm in ((torch.float32, None), (torch.bfloat16, 0.5))
        ]
        return [*tensors, gathered], total.item(), steps

    def on_the_cpu(group: pk.Group) -> Any:
        return [
            trained(group, dtype, "cpu", 2, [1.0, 0.0, 3.0], max_grad_norm=norm)[0]
            for dtype, norm in ((torch.float32, None), (torch.bfloat16, 0.5))
        ]

    exact = mean(3, 1003, torch.float32)
    wanted = virtual_ranks(on_the_cpu, 3)[0]
    for means, total, steps in fake_gpus.peers(cuda, body, 3):
        assert total == sum(map(weight_of, range(3)))
        for tensor in means:
            torch.testing.assert_close(tensor.double(), exact, rtol=1e-6, atol=1e-6)
        for found, right in zip(steps, wanted, strict=True):
            assert all(map(torch.equal, found, right))

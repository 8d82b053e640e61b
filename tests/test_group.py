"""Groups: made over any ranks, used side by side, closed, and made again."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import ALGORITHMS, NATIVE, message_of, same
from torch.distributed.device_mesh import init_device_mesh

import parallelkit as pk
from parallelkit.testing import run_ranks

FORCED = os.environ.get("PARALLELKIT_ALGORITHM", "auto")
HERE = "shared-memory" if NATIVE and FORCED != "reference" else "process-group"


def mean_of_ranks(group: pk.Group, numel: int = 5) -> float:
    x = torch.full((numel,), float(group.rank))
    pk.weighted_all_reduce_(x, 1, group)
    assert bool((x == x[0]).all())
    return x[0].item()


def attributes(group: pk.Group) -> None:
    assert (group.rank, group.size) == (dist.get_rank(), 2)
    assert group.device == torch.device("cpu") and group.timeout == timedelta(minutes=5)
    assert group.transport == HERE
    assert pk.init() is group, "a second call gives the same group"
    assert "rank" in repr(group) and group.transport in repr(group)
    for algorithm in ALGORITHMS:
        with pk.Group(timeout=timedelta(seconds=7), algorithm=algorithm) as other:
            assert other.timeout == timedelta(seconds=7)
            wanted = FORCED if algorithm == "auto" else algorithm
            reference = wanted == "reference" or not NATIVE
            assert other.transport == ("process-group" if reference else "shared-memory")
            assert mean_of_ranks(other) == 0.5


def test_a_group_tells_its_ranks_and_how_they_reach_each_other():
    run_ranks(attributes, 2)


def test_a_process_alone_is_a_group_of_one():
    group = pk.init()
    assert pk.init() is group
    assert (group.rank, group.size, group.transport) == (0, 1, "single")
    x = torch.tensor([1.0, 3.0])
    assert pk.weighted_all_reduce_(x, 7, reduction="sum") == 7.0
    oracle.assert_weighted(x, [torch.tensor([1.0, 3.0])], [7], "sum")
    assert pk.weighted_all_reduce_(x, 0) == 0.0
    assert x.tolist() == [0.0, 0.0]
    assert pk.weighted_reduce_scatter(torch.ones(3), 2, group).tolist() == [1.0] * 3
    assert pk.all_gather_flat(torch.ones(3), 3).tolist() == [1.0] * 3
    group.barrier()
    group.close()
    assert pk.init() is not group, "a closed group is made anew"
    with pk.Group(algorithm="reference") as reference:
        assert mean_of_ranks(reference) == 0.0


def subgroups(group: pk.Group) -> None:
    del group
    rank = dist.get_rank()
    odd = dist.new_group([1, 3])
    even = dist.new_group([0, 2, 4])
    mine = pk.Group(odd if rank % 2 else even)
    assert (mine.rank, mine.size) == (rank // 2, 2 if rank % 2 else 3)
    for numel in (1, 1000, 100_000):
        x = torch.full((numel,), float(rank))
        pk.weighted_all_reduce_(x, 1 + rank, mine)
        ranks = [1, 3] if rank % 2 else [0, 2, 4]
        exact = sum(r * (1 + r) for r in ranks) / sum(1 + r for r in ranks)
        torch.testing.assert_close(x, torch.full_like(x, exact))
    mine.close()


def test_subgroups_average_over_their_own_ranks_alone():
    run_ranks(subgroups, 5)


def wrong_on_one_rank(group: pk.Group) -> list[str]:
    last = group.rank == group.size - 1
    wrong: list[tuple[type[Exception], dict[str, Any]]] = [
        (TypeError, {"timeout": 5}),
        (ValueError, {"timeout": timedelta(seconds=-5)}),
        (TypeError, {"algorithm": ["ring"]}),
        (ValueError, {"device": "nonsense"}),
    ]
    told = [message_of(kind, lambda o=o: pk.Group(**(o if last else {}))) for kind, o in wrong]
    with pk.Group() as other:
        assert mean_of_ranks(other) == (group.size - 1) / 2
    return told


def test_a_wrong_argument_on_one_rank_is_refused_on_all():
    first, second = run_ranks(wrong_on_one_rank, 2)
    assert first == second
    for message, argument in zip(first, ("timeout", "timeout", "algorithm", "device"), strict=True):
        assert argument in message
        assert "[rank 1 of 2]" in message


def uneven_groups(group: pk.Group, algorithm: str) -> None:
    dist.new_group([0, 1])  # torch itself counts a group more on ranks 0 and 1 than on rank 2
    with pk.Group(algorithm=algorithm) as other:
        assert mean_of_ranks(other) == 1.0


@pytest.mark.parametrize("algorithm", ["auto", "reference"])
def test_ranks_may_be_in_different_numbers_of_groups(algorithm):
    run_ranks(uneven_groups, 3, algorithm)


def from_mesh(group: pk.Group) -> None:
    del group
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    with pk.Group.from_mesh(mesh["dp"]) as dp, pk.Group.from_mesh(mesh["tp"]) as tp:
        assert (dp.size, dp.rank, tp.size, tp.rank) == (2, rank // 2, 2, rank % 2)
        x = torch.tensor([float(rank)])
        pk.weighted_all_reduce_(x, 1, dp)
        assert x.item() == rank % 2 + 1  # of ranks r and r + 2
    with pytest.raises(ValueError, match=r'one dimension.*mesh\["dp"\]'):
        pk.Group.from_mesh(mesh)


def test_a_group_may_be_one_dimension_of_a_device_mesh():
    run_ranks(from_mesh, 4)


def alternating(group: pk.Group) -> None:
    with pk.Group() as other, pk.Group(algorithm="ring") as third:
        arena = other.empty(300)
        for turn in range(60):
            used = (group, other, third)[turn * 7 % 3]
            x = arena[: turn * 5 + 1] if turn % 2 else torch.empty(turn * 50 + 1)
            x.fill_(float(group.rank + turn))
            works = [pk.weighted_all_reduce_(x, 1, used, async_op=True)] if turn % 4 == 0 else []
            y = torch.full((3,), float(group.rank))
            pk.weighted_all_reduce_(y, 1, (other, third, group)[turn * 7 % 3])
            assert y.tolist() == [0.5] * 3
            if works:
                works[0].wait()
            else:
                pk.weighted_all_reduce_(x, 1, used)
            assert bool((x == turn + 0.5).all()), turn


def test_groups_of_the_same_ranks_used_alternately_do_not_disturb_each_other():
    run_ranks(alternating, 2)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_kib() -> int:
    """Memory of this process, shared parts included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("parallelkit")


def made_and_closed(group: pk.Group, algorithm: str, rounds: int) -> None:
    def once() -> None:
        with pk.Group(algorithm=algorithm) as used:
            x = used.empty(20_000).fill_(float(used.rank))
            pk.weighted_all_reduce_([x, torch.ones(3)], 1, used)
            assert x[-1] == 0.5
            pk.weighted_all_reduce_(x, 1, used, async_op=True).wait()

    for _ in range(10):
        once()
    gc.collect()
    before = open_files(), mappings(), resident_kib()
    for _ in range(rounds):
        once()
    gc.collect()
    group.barrier()
    after = open_files(), mappings(), resident_kib()
    assert after[0] <= before[0] + 2, "files left open"
    assert after[1] <= before[1], "shared memory left mapped"
    assert after[2] <= before[2] + 16 * 1024, "memory left in use"


@pytest.mark.parametrize(("algorithm", "rounds"), [("auto", 200), ("reference", 20)])
def test_groups_made_and_closed_200_times_leave_nothing(algorithm, rounds):
    run_ranks(made_and_closed, 2, algorithm, rounds)


def closing(group: pk.Group) -> None:
    x = group.empty(7).fill_(3.0)
    other = pk.Group()
    y = other.empty(50_000).fill_(2.0)
    other.close()
    other.close()
    assert bool((y == 2.0).all()), "a tensor outlives its group"
    y.fill_(4.0)
    for call in (
        other.barrier,
        lambda: other.empty(3),
        lambda: pk.weighted_all_reduce_(y, 1, other),
        lambda: pk.weighted_all_reduce_(y, 1, other, async_op=True),
        lambda: pk.weighted_reduce_scatter(y, 1, other),
        lambda: pk.all_gather_flat(y, 100_000, other),
    ):
        assert "closed" in message_of(pk.errors.UsageError, call)
    pk.weighted_all_reduce_(y, 1, group)  # by now an ordinary tensor
    pk.weighted_all_reduce_(x, 1, group)
    assert bool((y == 4.0).all() and (x == 3.0).all())


def test_closing_twice_is_harmless_and_a_closed_group_says_so():
    run_ranks(closing, 2)


def empties(group: pk.Group) -> None:
    assert group.empty(3, 4).shape == group.empty((3, 4)).shape == (3, 4)
    assert group.empty(()).shape == group.empty().shape == ()
    assert group.empty(5).dtype == torch.float32
    for dtype in (torch.bfloat16, torch.int64, torch.complex64, torch.bool):
        for shape in ((0,), (1,), (5, 0), (1000, 3)):
            x = group.empty(shape, dtype=dtype)
            assert x.shape == shape and x.dtype == dtype and x.is_contiguous()
            x.fill_(1)
    kept = group.empty(1000).fill_(float(group.rank))
    view = kept[10:20]
    del kept
    gc.collect()
    pk.weighted_all_reduce_(view, 1, group)
    assert bool((view == 0.5).all())
    refusal = message_of(ValueError, lambda: group.empty(-3))
    assert "-3" in refusal and f"[rank 0 of {group.size}]" in refusal
    told = message_of(
        pk.CollectiveMismatchError,
        lambda: group.empty(3, dtype=(torch.float32, torch.float64)[group.rank]),
    )
    assert "float32" in told and "float64" in told


def test_empty_gives_any_shape_and_dtype_and_refuses_what_differs():
    run_ranks(empties, 2)


def in_place(group: pk.Group) -> list[int]:
    """Bytes copied through staging by two large calls, in shared and in ordinary memory."""
    staged = []
    for x in (group.empty(1 << 20), torch.empty(1 << 20)):
        before = group._transport._comm.traffic[2]
        pk.weighted_all_reduce_(x.fill_(1.0), 1, group)
        staged.append(group._transport._comm.traffic[2] - before)
    return staged


@pytest.mark.skipif(HERE != "shared-memory", reason="torch.distributed copies everything")
def test_collectives_on_memory_from_empty_copy_nothing():
    for shared, ordinary in run_ranks(in_place, 2):
        assert shared == 0 and ordinary > 0


def wrong_algorithms(group: pk.Group) -> list[str]:
    told = [message_of(ValueError, lambda: pk.Group(algorithm="fastest"))]
    different = ("direct", "reference")[group.rank]
    told.append(message_of(ValueError, lambda: pk.Group(algorithm=different)))
    os.environ["PARALLELKIT_ALGORITHM"] = "fastest"
    told.append(message_of(ValueError, pk.Group))
    os.environ["PARALLELKIT_ALGORITHM"] = "reference"
    with pk.Group() as other:
        assert other.transport == "process-group"
    if NATIVE:
        with pk.Group(algorithm="direct") as other:
            assert other.transport == "shared-memory", "an argument wins over the variable"
    assert mean_of_ranks(group) == 0.5
    return [text.partition(" [rank")[0] for text in told]


def test_an_unknown_or_differing_algorithm_is_refused_on_every_rank():
    by_rank = run_ranks(wrong_algorithms, 2)
    assert same(by_rank)
    unknown, differing, variable = by_rank[0]
    assert "fastest" in unknown and "ring" in unknown
    assert "direct" in differing and "reference" in differing
    assert "PARALLELKIT_ALGORITHM" in variable


def forked(group: pk.Group) -> None:
    arena = group.empty(1000).fill_(float(group.rank))
    child = os.fork()
    if child == 0:  # as a DataLoader worker: reads, may not talk, and ends without harm
        refused = "forked" in message_of(pk.errors.UsageError, group.barrier)
        os._exit(0 if refused and bool((arena == float(group.rank)).all()) else 1)
    assert os.waitpid(child, 0)[1] == 0
    pk.weighted_all_reduce_(arena, 1, group)
    assert bool((arena == 0.5).all())


def test_a_forked_child_may_read_and_not_talk_and_its_end_disturbs_nobody():
    run_ranks(forked, 2)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="device must be cpu"):
        pk.Group(device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="cuda where CUDA works"):
            pk.init(device="cuda")


@pytest.mark.slow
def test_a_script_that_ends_right_after_init_ends_well(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nimport parallelkit as pk\npk.init()\nsys.exit(0)\n")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    command = [sys.executable, "-m", *torchrun, str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr

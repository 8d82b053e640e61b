"""Ranks that die, stop, leave or are interrupted: the others hear of it in time, and who it was."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import platform
import random
import signal
import statistics
import struct
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import parallelkit as pk
from parallelkit.errors import UsageError
from parallelkit.testing import RanksFailedError, run_ranks, virtual_ranks

TRANSPORTS = {"shared-memory": "auto", "process-group": "reference"}
# Seconds that a survivor may take to notice where others keep the machine busy; that it takes less
# than one is said of the median of many. Where nothing was noticed, 30 would pass.
SOON = 10.0


@pytest.fixture(params=TRANSPORTS)
def transport(request, monkeypatch):
    monkeypatch.setenv("PARALLELKIT_ALGORITHM", TRANSPORTS[request.param])
    return request.param


def outcomes(fn, size, *args):
    """What each rank returned, raised, or died of."""
    try:
        return run_ranks(fn, size, *args)
    except RanksFailedError as error:
        return error.outcomes


def group_with_timeout(group, seconds):
    """`pk.init()`'s group, made anew with another timeout."""
    group.close()
    return pk.init(timeout=timedelta(seconds=seconds))


def left_open():
    """Mappings, descriptors and threads of this process that belong to a group."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        found = [line.split()[-2] for line in maps if "memfd:parallelkit" in line]
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if "parallelkit" in target or "pidfd" in target:
                found.append(target)
    return found + [t.name for t in threading.enumerate() if "parallelkit" in t.name]


def comes_to(wanted):
    """Whether only that is left open, at once or when threads that were told to end have ended."""
    deadline = time.monotonic() + SOON
    while left_open() != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return left_open() == wanted


# -- death ----


def until_killed(world, victims, delays, folder):
    """One victim after the other is killed amid collectives of all kinds; what the others saw."""
    alive = list(range(world.size))
    parts = [alive]
    for victim in victims[:-1]:
        parts.append([rank for rank in parts[-1] if rank != victim])
    groups = [dist.new_group(part) for part in parts]  # while all are there to make them
    found = []
    for part, process_group, victim, delay in zip(parts, groups, victims, delays, strict=True):
        if world.rank in part:
            found.append(until_one_is_killed(part, process_group, victim, delay, folder))
    return found


def until_one_is_killed(part, process_group, victim, delay, folder):
    before = left_open()  # of the group of all ranks
    group = pk.Group(process_group, timeout=timedelta(seconds=30))
    arena, plain = group.empty(300_001).fill_(1), torch.ones(30_001)
    if part[group.rank] == victim:

        def die():
            with open(f"{folder}/{victim}", "w") as file:
                file.write(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Timer(delay, die).start()
    try:
        while True:
            pk.weighted_all_reduce_([arena], group=group)
            pk.weighted_all_reduce_([plain, arena[:5]], group=group, async_op=True).wait()
            shard = pk.weighted_reduce_scatter(plain, group=group)
            pk.all_gather_flat(shard, len(plain), group, out=plain)
    except pk.PeerLostError as error:
        raised = time.monotonic()
        with open(f"{folder}/{victim}") as file:
            waited = raised - float(file.read())
        culprit, message = part[error.rank], str(error)
    began = time.monotonic()
    with pytest.raises(pk.PeerLostError):
        group.barrier()
    again = time.monotonic() - began
    group.close()
    del arena, group
    return culprit, waited, again, message, comes_to(before)


def shared_names():
    """What lies in /dev/shm, but for what multiprocessing and torch put there in other tests."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sem.", "torch_"))}


def killed_rounds(launches, folder):
    """Each launch has 6 ranks, of which 5 are killed in turn; how long it took to notice."""
    names, delays_to_notice = shared_names(), []
    for seed in range(launches):
        chance = random.Random(seed)
        victims = chance.sample(range(6), 5)
        delays = [chance.uniform(0, 0.03) for _ in victims]
        (folder / str(seed)).mkdir()
        outcome = outcomes(until_killed, 6, victims, delays, str(folder / str(seed)))
        (survivor,) = set(range(6)) - set(victims)
        assert not isinstance(outcome[survivor], BaseException), (seed, outcome[survivor])
        assert [culprit for culprit, *_ in outcome[survivor]] == victims
        for _, waited, again, message, clean in outcome[survivor]:
            assert "is gone" in message and clean
            assert waited < SOON and again < SOON, (seed, waited, again)
            delays_to_notice.append(waited)
    assert shared_names() <= names
    return delays_to_notice


@pytest.mark.slow
def test_survivors_of_a_killed_rank_name_it_within_a_second_and_keep_nothing(tmp_path):
    assert statistics.median(killed_rounds(10, tmp_path)) < 1


def test_survivors_of_a_killed_rank_name_it_over_gloo_too(tmp_path, monkeypatch):
    monkeypatch.setenv("PARALLELKIT_ALGORITHM", "reference")
    killed_rounds(1, tmp_path)


def forbid_pidfds():
    """Let this thread's pidfd_open fail, as in containers whose filter of calls knows it not."""
    allow, errno = 0x7FFF0000, 0x00050000 | 1  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO | EPERM
    filters = [
        (0x20, 0, 0, 0),  # load the call's number
        (0x15, 0, 1, 434),  # pidfd_open?
        (0x06, 0, 0, errno),
        (0x06, 0, 0, allow),
    ]
    program = b"".join(struct.pack("HBBI", *each) for each in filters)
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(filters), ctypes.addressof(code))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, header, 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP
    with pytest.raises(OSError):
        os.pidfd_open(os.getpid())


def killed_without_pidfds(group, folder):
    forbid_pidfds()
    everybody = list(range(group.size))
    return until_one_is_killed(everybody, dist.group.WORLD, 1, 0.02, folder)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="filters calls by their x86 numbers")
def test_a_killed_rank_is_seen_at_once_where_the_kernel_gives_no_pidfd(tmp_path, transport):
    outcome = outcomes(killed_without_pidfds, 3, str(tmp_path))
    for survivor in (0, 2):
        assert not isinstance(outcome[survivor], BaseException), outcome[survivor]
        culprit, waited, again, message, _ = outcome[survivor]
        assert culprit == 1 and "is gone" in message
        assert waited < SOON and again < SOON


def one_collective_then_exit(group):
    value = torch.full((100_000,), float(group.rank))
    pk.weighted_all_reduce_(value, group=group)
    if group.rank == 1:
        os._exit(0)  # no close, no farewell
    time.sleep(0.05)
    return value[0].item()


def test_a_rank_that_exits_after_its_last_collective_fails_nobody(transport):
    for _ in range(3):
        found = outcomes(one_collective_then_exit, 3)
        assert (found[0], found[2]) == (1.0, 1.0)


# -- being stopped ----


def until_stopped(group, victim, after, elements):
    """Collectives until `victim` is stopped; then everybody goes on with a new group."""
    timeout = 1.0
    processes = group._gather_objects(os.getpid())
    group = group_with_timeout(group, timeout)
    arena = group.empty(elements).fill_(1)
    group.barrier()
    if group.rank == victim:
        threading.Timer(after, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    try:
        while True:
            began = time.monotonic()
            pk.weighted_all_reduce_(arena, group=group)
    except pk.CollectiveTimeoutError as error:
        waited, culprit, message = time.monotonic() - began, error.rank, str(error)
    arena.fill_(7)  # what a late writer would write is something else
    if group.rank != victim:
        with pytest.raises(pk.CollectiveTimeoutError):
            group.barrier()
        time.sleep(0.4)
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[victim], signal.SIGCONT)
        time.sleep(0.4)
    untouched = arena.eq(7).all().item()

    whole = pk.init(timeout=timedelta(seconds=20))
    value = torch.full((7,), float(whole.rank))
    pk.weighted_all_reduce_(value, group=whole)
    whole.close()
    return culprit, waited, message, untouched, whole is not group, value[0].item()


@pytest.mark.parametrize("after", [0.01, 0.03])
def test_a_stopped_rank_is_named_at_the_deadline_and_damages_nothing_later(transport, after):
    elements = 8 << 20 if transport == "shared-memory" else 1 << 20
    found = outcomes(until_stopped, 3, 1, after, elements)
    for rank, outcome in enumerate(found):
        assert not isinstance(outcome, BaseException), outcome
        culprit, waited, message, untouched, new, mean = outcome
        assert culprit == 1, message
        assert (
            "this rank was late" if rank == 1 else "rank 1 did not arrive within 1 s"
        ) in message
        assert rank == 1 or 0.9 < waited < 1 + SOON
        assert untouched and new and mean == 1.0


def late_rank(group):
    """Rank 1 computes for longer than the timeout: it is late, though it is alive."""
    group = group_with_timeout(group, 0.8)
    if group.rank == 1:
        time.sleep(2.5)
    with pytest.raises(pk.CollectiveTimeoutError) as raised:
        group.barrier()
    return raised.value.rank


def test_a_rank_that_computes_too_long_is_the_one_named(transport):
    assert run_ranks(late_rank, 3) == [1, 1, 1]


# -- leaving ----


def closing(group):
    group = group_with_timeout(group, 30)
    kept = group.empty(1000).fill_(group.rank)
    group.barrier()
    began = time.monotonic()
    if group.rank == 1:
        time.sleep(0.2)
    else:
        with pytest.raises(pk.PeerLostError, match="rank 1 is gone") as raised:
            pk.weighted_all_reduce_(torch.ones(3), group=group)
        assert raised.value.rank == 1
    waited = time.monotonic() - began
    group.close()
    group.close()
    with pytest.raises(UsageError, match="closed"):
        group.barrier()
    assert kept.eq(group.rank).all()
    kept.add_(1)
    del group
    gc.collect()
    assert kept.eq(kept[0]).all()
    return waited


def test_leaving_wakes_peers_and_keeps_tensors(transport):
    assert max(run_ranks(closing, 3)) < 0.2 + SOON


def interrupted(group, background):
    """Rank 0 gets Ctrl-C while it waits for rank 2, which computes; rank 1 waits too."""
    group = group_with_timeout(group, 30)
    value = torch.ones(1000)
    group.barrier()
    if group.rank == 2:
        time.sleep(1.5)
    if group.rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    try:
        work = pk.weighted_all_reduce_(value, group=group, async_op=background)
        work.wait() if background else None
    except (KeyboardInterrupt, pk.PeerLostError) as error:
        waited = time.monotonic() - began
        with pytest.raises(pk.PeerLostError, match="rank 0 was interrupted"):
            group.barrier()
        return type(error).__name__, str(error), waited


@pytest.mark.parametrize("background", [False, True], ids=["now", "background"])
def test_ctrl_c_is_prompt_and_peers_are_told(transport, background):
    found = run_ranks(interrupted, 3, background)
    assert [kind for kind, _, _ in found] == ["KeyboardInterrupt", "PeerLostError", "PeerLostError"]
    assert all("rank 0 was interrupted" in message for _, message, _ in found[1:])
    assert max(waited for _, _, waited in found) < 0.3 + SOON


def test_a_thread_rank_that_fails_is_reported_and_hangs_nobody():
    def fails(group):
        pk.weighted_all_reduce_(torch.ones(5), group=group)
        if group.rank == 1:
            raise ZeroDivisionError("rank 1 has a fault")
        with pytest.raises(pk.PeerLostError, match="rank 1 is gone"):
            pk.weighted_all_reduce_(torch.ones(5), group=group)

    with pytest.raises(ZeroDivisionError):
        virtual_ranks(fails, 3)


def test_a_thread_rank_that_sleeps_is_late_for_all():
    def sleeps(group):
        if group.rank == 2:
            time.sleep(1)
        with pytest.raises(pk.CollectiveTimeoutError) as raised:
            group.barrier()
        return raised.value.rank

    assert virtual_ranks(sleeps, 3, timeout=0.3) == [2, 2, 2]


# -- children of a rank ----


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(float(index * index))


def child(arena, failures):
    """A forked child reads the parent's tensor, cannot talk for it, and goes."""
    try:
        assert arena.eq(1).all()
        with pytest.raises(UsageError, match="forked"):
            pk.init().barrier()
    except BaseException as error:
        failures.put(repr(error))
    else:
        failures.put("")


def with_children(group):
    arena = group.empty(5000).fill_(1)
    pk.weighted_all_reduce_(torch.ones(5), group=group, async_op=True).wait()  # starts a thread
    fork = multiprocessing.get_context("fork")
    failures = fork.SimpleQueue()
    for _ in range(3):
        process = fork.Process(target=child, args=(arena, failures), daemon=True)
        process.start()
        trouble = failures.get()
        process.join(20)
        assert (trouble, process.exitcode) == ("", 0)
    for method in ("fork", "spawn"):
        loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=method)
        assert torch.cat(list(loader)).tolist() == [float(n * n) for n in range(8)]
        del loader
    arena.fill_(group.rank)
    pk.weighted_all_reduce_(arena, group=group, async_op=True).wait()
    return arena[0].item(), arena.eq(arena[0]).all().item()


def test_children_neither_disturb_the_parent_nor_speak_for_it():
    # Daemons have no children, and the ranks of run_ranks are daemons.
    found = run_ranks(without_daemon, 2)
    assert found == [(0.5, True)] * 2


def without_daemon(group):
    multiprocessing.current_process()._config["daemon"] = False
    return with_children(group)

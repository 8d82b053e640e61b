"""Several hosts: shared memory inside each, and only shards between them."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch

import parallelkit as pk
from parallelkit.ops import cpu
from parallelkit.testing import RanksFailedError, run_ranks
from parallelkit.transport import choose, hierarchical, memory
from parallelkit.transport.mapping import MappingError

pytestmark = pytest.mark.skipif(cpu is None, reason="needs the native extension")

SOON = 10.0  # seconds within which a rank hears, where others keep the machine busy
EVEN = ("aabb", "abba", "aabbcc")
UNEVEN = ("aaab", "abbc")


def on_hosts(group, hosts, **options):
    """A group whose rank r takes itself to be on host hosts[r]."""
    choose.host_identity = lambda: (hosts[group.rank], "", 0)
    return pk.Group(**options)


def digest(tensor):
    return hashlib.sha256(bits(tensor)).hexdigest()


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


# -- numbers ----


def inputs(rank, shape, dtype):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def exact_mean(weights, shape, dtype):
    """The mean over all ranks in float64, and S of the error bound."""
    rows = [inputs(rank, shape, dtype).double() for rank in range(len(weights))]
    shares = [weight / sum(weights) for weight in weights]
    mean = sum(share * row for share, row in zip(shares, rows, strict=True))
    return mean, sum(share * row.abs() for share, row in zip(shares, rows, strict=True))


def within_bound(out, mean, scale, ranks):
    unit = 2.0**-53 if out.dtype == torch.float64 else 2.0**-24
    bound = unit * (mean.abs() + (ranks + 1) * scale)
    if out.dtype == torch.bfloat16:  # that sum, rounded once more
        bound = bound + 2.0**-8 * (mean.abs() + bound)
    return bool(((out.double() - mean).abs() <= bound).all())


def numbers(group, hosts):
    """All collectives on lists of all kinds; what is wrong, and a digest of the results."""
    hierarchical._PACK_BYTES = 1 << 12  # small, so that packing takes many loads
    hierarchical._DIRECT_BYTES = 1 << 11
    wrong, seen = [], []
    with on_hosts(group, hosts) as group:
        size, rank = group.size, group.rank
        weights = [float(r % 3) for r in range(size)]  # ranks 0 and 3 hold NaN and count nothing
        shapes = [(), (1,), (0,), (5,), (3, 7), (1023,), (5000,), (10_007,)]
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            tensors = [inputs(rank, shape, dtype) for shape in shapes]
            arena = group.empty(3001, dtype=dtype)
            arena.copy_(inputs(rank, (3001,), dtype))
            tensors.append(arena)
            if weights[rank] == 0:
                for tensor in tensors:
                    tensor.fill_(torch.nan)
            total = pk.weighted_all_reduce_(tensors, weights[rank], group)
            for tensor in tensors:
                mean, scale = exact_mean(weights, tensor.shape, dtype)
                if total != sum(weights) or not within_bound(tensor, mean, scale, size):
                    wrong.append(("all-reduce", dtype, tensor.shape))
                seen.append(bits(tensor))
            for shape in ((0,), (1,), (5,), (10_007,)):
                flat = inputs(rank, shape, dtype)
                shard = pk.weighted_reduce_scatter(flat, weights[rank], group)
                start, stop = pk.shard_bounds(shape[0], size, rank)
                mean, scale = exact_mean(weights, shape, dtype)
                if not within_bound(shard, mean[start:stop], scale[start:stop], size):
                    wrong.append(("reduce-scatter", dtype, shape))
                if bits(flat) != bits(inputs(rank, shape, dtype)):
                    wrong.append(("reduce-scatter changed its input", dtype, shape))
                whole = torch.full(shape, torch.nan, dtype=dtype)
                pk.all_gather_flat(flat[start:stop].clone(), shape[0], group, out=whole)
                for other in range(size):
                    part = slice(*pk.shard_bounds(shape[0], size, other))
                    if bits(whole[part]) != bits(inputs(other, shape, dtype)[part]):
                        wrong.append(("all-gather", dtype, shape))
        background = inputs(rank, (777,), torch.float32)
        work = pk.weighted_all_reduce_(background, 1.0, group, async_op=True)
        work.wait()
        seen.append(bits(background))
        transport = group.transport
    return transport, wrong, seen


@pytest.mark.parametrize("hosts", EVEN + UNEVEN)
def test_results_are_within_the_bound_and_equal_on_every_rank_of_every_host(hosts):
    found = run_ranks(numbers, len(hosts), hosts)
    for transport, wrong, seen in found:
        assert (transport, wrong) == ("hierarchical", [])
        assert seen == found[0][2]


def chosen(group, hosts, algorithm):
    with on_hosts(group, hosts, algorithm=algorithm) as group:
        return group.transport


@pytest.mark.parametrize(
    "hosts, algorithm, transport",
    [
        ("aabb", "auto", "hierarchical"),
        ("aab", "ring", "hierarchical"),
        ("abc", "auto", "process-group"),
        ("aaa", "auto", "shared-memory"),
        ("aabb", "reference", "process-group"),
    ],
)
def test_the_transport_follows_from_what_ranks_share(hosts, algorithm, transport):
    assert run_ranks(chosen, len(hosts), hosts, algorithm) == [transport] * len(hosts)


def made_and_left(group, hosts, times):
    for _ in range(times):
        with on_hosts(group, hosts):
            pass


def test_a_group_may_be_left_as_soon_as_it_is_made():
    run_ranks(made_and_left, 4, "aabb", 20)


def no_room_on_one_host(group):
    if group.rank == 2:
        memory.available_bytes = lambda: 100 << 20
    with on_hosts(group, "aabb") as group:
        with pytest.raises(MappingError, match="rank 2 of 4"):
            group.empty(25_000_000)
        value = group.empty(1000).fill_(group.rank)
        pk.weighted_all_reduce_(value, group=group)
        return group.transport, value[0].item()


def test_no_room_on_one_host_is_an_error_on_all():
    assert run_ranks(no_room_on_one_host, 4) == [("hierarchical", 1.5)] * 4


def bytes_sent(group, hosts, elements):
    """Bytes that this rank gives torch.distributed for one all-reduce, beside the headers."""
    sent = []
    with on_hosts(group, hosts) as group:
        run = type(group._transport)._run

        def counted(self, collective, *args, **kwargs):
            sent.append(args[0].nbytes if isinstance(args[0], torch.Tensor) else 0)
            return run(self, collective, *args, **kwargs)

        type(group._transport)._run = counted
        pk.weighted_all_reduce_(torch.ones(elements), group=group)
    return sum(sent)


@pytest.mark.parametrize("hosts, lanes", [("aabb", 2), ("aaabbb", 3), ("aaab", 1)])
def test_a_rank_sends_one_shard_between_hosts(hosts, lanes):
    elements = 120_000
    sent = run_ranks(bytes_sent, len(hosts), hosts, elements)
    owners = [hosts[:rank].count(host) < lanes for rank, host in enumerate(hosts)]
    assert sent == [elements * 4 // lanes if owner else 0 for owner in owners]


# -- loss ----


def until_lost(world, victim, signal_number, seconds, folder):
    processes = world._gather_objects(os.getpid())
    group = on_hosts(world, "aabb", timeout=timedelta(seconds=seconds))
    value = group.empty(200_003).fill_(1)
    group.barrier()
    if group.rank == victim:
        threading.Timer(0.1, os.kill, (os.getpid(), signal_number)).start()
    try:
        while True:
            began = time.monotonic()
            pk.weighted_all_reduce_(value, group=group)
    except (pk.PeerLostError, pk.CollectiveTimeoutError) as error:
        waited = time.monotonic() - began
        kind, culprit = type(error).__name__, error.rank
    again = time.monotonic()
    with pytest.raises((pk.PeerLostError, pk.CollectiveTimeoutError)):
        group.barrier()
    again = time.monotonic() - again
    Path(folder, str(group.rank)).touch()
    while len(os.listdir(folder)) < group.size - 1:
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.kill(processes[victim], signal.SIGKILL)  # else it would stay stopped for ever
    return kind, culprit, waited, again


@pytest.mark.parametrize(
    "number, kind, timeout",
    [(signal.SIGKILL, "PeerLostError", 30), (signal.SIGSTOP, "CollectiveTimeoutError", 2)],
    ids=["killed", "stopped"],
)
def test_a_rank_lost_on_one_host_is_named_on_all(number, kind, timeout, tmp_path):
    with pytest.raises(RanksFailedError) as raised:
        run_ranks(until_lost, 4, 2, number, timeout, str(tmp_path))
    for rank, outcome in enumerate(raised.value.outcomes):
        if rank != 2:
            assert not isinstance(outcome, BaseException), (rank, outcome)
            assert outcome[:2] == (kind, 2)
            assert outcome[2] < SOON and outcome[3] < SOON


# -- two network and process namespaces ----

TIMEOUT = 15.0  # so that busy cores do not look like a lost host
ELEMENTS = 2_000_000


def on_two_hosts(folder):
    """The body of a rank that torchrun started on one of two hosts."""
    group = pk.init(timeout=timedelta(seconds=60))
    rank, size = group.rank, group.size
    device = os.environ["GLOO_SOCKET_IFNAME"]

    def sent(over, collective):
        """Its result, and what this host sent for it, in multiples of the tensor's bytes."""
        counts = []
        for call in (lambda: None, collective):
            result = call()
            over.barrier()  # everybody's is done
            path = Path(f"/sys/class/net/{device}/statistics/tx_bytes")
            counts.append(int(path.read_text()))
            over.barrier()  # and nobody's next has begun
        return result, (counts[1] - counts[0]) / (4 * ELEMENTS)

    found = {"transport": group.transport, "size": size}
    weights = [float(r + 1) for r in range(size)]
    mean, scale = exact_mean(weights, (ELEMENTS,), torch.float32)
    flat = pk.Group(algorithm="reference")
    for name, over in (("hierarchical", group), ("flat", flat)):
        value = inputs(rank, (ELEMENTS,), torch.float32)
        shard, found[f"{name} scatter"] = sent(
            over, partial(pk.weighted_reduce_scatter, value, weights[rank], over)
        )
        _, found[name] = sent(over, partial(pk.weighted_all_reduce_, value, weights[rank], over))
        mine = slice(*pk.shard_bounds(ELEMENTS, size, rank))
        found[f"{name} within bound"] = within_bound(value, mean, scale, size) and within_bound(
            shard, mean[mine], scale[mine], size
        )
        found[f"{name} equal"] = len(set(over._gather_objects(digest(value)))) == 1
    flat.close()
    group = pk.Group(timeout=timedelta(seconds=TIMEOUT))
    group.barrier()
    if rank == size - 1:
        subprocess.run(["ip", "link", "set", device, "down"], check=True)
    began = time.monotonic()
    try:
        while True:
            began = time.monotonic()
            pk.weighted_all_reduce_(torch.ones(100_000), group=group)
    except (pk.PeerLostError, pk.CollectiveTimeoutError) as error:
        found |= {"error": str(error), "lost": error.rank, "waited": time.monotonic() - began}
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(found, file)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))),
    reason="needs root, iproute2 and util-linux",
)
def test_two_hosts_joined_by_a_cable_and_parted_again(tmp_path):
    tag = f"{os.getpid() % 100000}"
    spaces = [f"pk{tag}a", f"pk{tag}b"]
    ends = [f"v{tag}a", f"v{tag}b"]
    script = tmp_path / "script.py"
    script.write_text(f"import test_hosts; test_hosts.on_two_hosts({str(tmp_path)!r})")
    hosts = []
    try:
        for space in spaces:
            subprocess.run(["ip", "netns", "add", space], check=True)
        subprocess.run(
            ["ip", "link", "add", ends[0], "netns", spaces[0], "type", "veth"]
            + ["peer", "name", ends[1], "netns", spaces[1]],
            check=True,
        )
        for number, (space, end) in enumerate(zip(spaces, ends, strict=True)):
            for command in (
                f"address add 10.77.0.{number + 1}/24 dev {end}",
                f"link set {end} up",
                "link set lo up",
            ):
                subprocess.run(["ip", "-n", space, *command.split()], check=True)
        for number, (space, end) in enumerate(zip(spaces, ends, strict=True)):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
            torchrun += [f"--node-rank={number}", "--nproc-per-node=2", "--max-restarts=0"]
            torchrun += ["--master-addr=10.77.0.1", "--master-port=29511", str(script)]
            with open(tmp_path / f"log{number}", "w") as log:
                host = subprocess.Popen(
                    ["ip", "netns", "exec", space, "unshare", "--pid", "--fork"]
                    + ["--kill-child", "--mount-proc", *torchrun],
                    env=os.environ | {"GLOO_SOCKET_IFNAME": end, "OMP_NUM_THREADS": "1"},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            hosts.append(host)
        wanted = [tmp_path / f"{rank}.json" for rank in range(4)]
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and not all(path.exists() for path in wanted):
            if all(host.poll() is not None for host in hosts):
                break
            time.sleep(0.2)
        time.sleep(0.3)
    finally:
        for host in hosts:
            host.kill()
            host.wait()
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], check=False)
    logs = "\n".join((tmp_path / f"log{number}").read_text()[-3000:] for number in range(2))
    assert all(path.exists() for path in wanted), logs
    for rank, found in enumerate(json.loads(path.read_text()) for path in wanted):
        assert (found["transport"], found["size"]) == ("hierarchical", 4)
        for name in ("hierarchical", "flat"):
            assert found[f"{name} within bound"] and found[f"{name} equal"]
        # Each of 2 lanes sends half the tensor once; a ring over 4 ranks, 6 quarters of it.
        assert found["hierarchical"] < 1.1 < 1.4 < found["flat"], found
        # Each lane sends a quarter; each rank of all, a quarter to both ranks of the other host.
        assert found["hierarchical scatter"] < 0.55 < 0.9 < found["flat scatter"] < 1.1, found
        assert found["lost"] // 2 != rank // 2, found["error"]
        assert found["waited"] < TIMEOUT + SOON, found

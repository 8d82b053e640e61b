"""The loops over elements, one table an instruction set, each forced by PARALLELKIT_ISA.

All must give the same bits, so that ranks on different processors would agree. Every 16-bit number
goes through, with its subnormals, infinities and NaNs, and every length of tail.
"""

from __future__ import annotations

import platform
from pathlib import Path

import oracle
import pytest
import torch
from ranks import NATIVE, same

import parallelkit as pk
from parallelkit.ops import cpu
from parallelkit.testing import run_ranks

PATHS = {"portable": set(), "avx2": {"avx2", "fma", "f16c"}, "avx512": {"avx512f", "avx512bw"}}
RANKS = 3
WEIGHTS = {
    "counts": [3.0, 1.0, 5.0],
    "powers of two": [1.0, 2.0, 1.0],
    "beyond float": [1.0, 2.0**-130, 3.0],  # added in double
}

pytestmark = pytest.mark.skipif(not NATIVE, reason="no native extension")


def processor_flags() -> set[str]:
    facts = Path("/proc/cpuinfo").read_text()
    return set(next((s for s in facts.splitlines() if s.startswith("flags")), "").split())


def values(rank: int) -> list[torch.Tensor]:
    """All 16-bit numbers in an order of this rank's own, and random 32- and 64-bit patterns."""
    generator = torch.Generator().manual_seed(rank)
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    order = torch.randperm(2**16, generator=generator)
    sixteen = patterns[order].to(torch.int16)
    words = torch.randint(-(2**31), 2**31, (5003,), generator=generator).to(torch.int32)
    doubles = torch.randn(5003, generator=generator, dtype=torch.float64) * 1e100
    doubles[::7] = torch.tensor([0.0, -0.0, 5e-324, float("inf"), float("nan")]).repeat(143)
    return [
        sixteen.view(torch.bfloat16),
        sixteen.clone().view(torch.float16),
        words.view(torch.float32),
        doubles,
    ]


def sums(group: pk.Group) -> tuple[str, dict[str, list[torch.Tensor]]]:
    assert cpu is not None
    results = {}
    for name, weights in WEIGHTS.items():
        tensors = values(group.rank)
        pk.weighted_all_reduce_(tensors, weights[group.rank], group)
        for index, whole in enumerate(tensors):  # every length of tail, at every alignment
            begin = 0
            for length in range(1, 40):
                begin += length
                part = values(group.rank)[index][begin : begin + length]
                pk.weighted_all_reduce_(part, weights[group.rank], group)
                wanted = whole[begin : begin + length]
                assert oracle.bits(part) == oracle.bits(wanted), (name, part.dtype, length)
        results[name] = tensors
    return cpu.kernels(), results


@pytest.fixture(scope="module")
def results():
    """What each path that runs here gives on rank 0."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, needed in PATHS.items():
            if needed <= processor_flags():
                patch.setenv("PARALLELKIT_ISA", name)
                patch.setenv("PARALLELKIT_ALGORITHM", "direct")
                by_rank = run_ranks(sums, RANKS)
                assert [used for used, _ in by_rank] == [name] * RANKS, "the path that was forced"
                tensors = [[*map(oracle.bits, sum(r.values(), []))] for _, r in by_rank]
                assert same(tensors), "ranks differ"
                found[name] = by_rank[0][1]
    return found


@pytest.mark.parametrize("path", PATHS)
def test_each_path_adds_in_rank_order_and_rounds_once(results, path):
    if path not in results:
        pytest.skip(f"this processor has no {path}")
    for name in ("counts", "powers of two"):
        for index in range(3):
            inputs = [values(rank)[index] for rank in range(RANKS)]
            got, right = results[path][name][index], oracle.chain(inputs, WEIGHTS[name])
            assert torch.equal(got.isnan(), right.isnan())
            kept = ~right.isnan()
            assert oracle.bits(got[kept]) == oracle.bits(right[kept]), (name, got.dtype)


@pytest.mark.parametrize("path", PATHS)
def test_each_path_adds_in_double_where_a_coefficient_is_beyond_float(results, path):
    if path not in results:
        pytest.skip(f"this processor has no {path}")
    for index in range(3):
        inputs = [values(rank)[index] for rank in range(RANKS)]
        finite = torch.stack([x.isfinite() for x in inputs]).all(0)
        got = results[path]["beyond float"][index][finite]
        oracle.assert_weighted(got, [x[finite] for x in inputs], WEIGHTS["beyond float"])


@pytest.mark.parametrize("path", ["avx2", "avx512"])
def test_every_path_gives_the_bits_of_the_portable_one(results, path):
    if path not in results:
        pytest.skip(f"this processor has no {path}")
    for name in WEIGHTS:
        for got, right in zip(results[path][name], results["portable"][name], strict=True):
            assert torch.equal(got.isnan(), right.isnan())
            kept = ~right.isnan()
            assert oracle.bits(got[kept]) == oracle.bits(right[kept]), (name, got.dtype)
            assert oracle.bits(got) == oracle.bits(right), (name, got.dtype, "NaNs")


def start(group: pk.Group) -> None:
    del group


def test_a_path_that_is_not_there_is_refused_with_the_ones_that_are(monkeypatch):
    missing = "avx512" if platform.machine() != "x86_64" else "sse9"
    monkeypatch.setenv("PARALLELKIT_ISA", missing)
    monkeypatch.setenv("PARALLELKIT_ALGORITHM", "direct")
    with pytest.raises(pk.testing.RanksFailedError, match=f"PARALLELKIT_ISA={missing}.*portable"):
        run_ranks(start, 2)

"""Who owns what, in csrc/schedule.h and the list of tensors: exact at any offset, past 2^31 too."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from ranks import NATIVE

import parallelkit as pk
from parallelkit.testing import run_ranks

ROOT = Path(__file__).parents[1]
NUMBERS = (0, 1, 63, 64, 65, 4097, 2**31 - 1, 2**31, 2**31 + 8, 2**32, 2**33 + 1, 10**13)

PROGRAM = r"""
#include <cstdio>

#include "cpu/tensor_list.h"

using namespace pk;

// Each line of input is a length; of output, where each rank's, thread's and chunk's part lies.
int main() {
  unsigned long long n;
  while (std::scanf("%llu", &n) == 1) {
    for (int rank = 0; rank < 3; ++rank) {
      const Range shard = shard_bounds(n, 3, rank);
      std::printf("%llu %llu", (unsigned long long)shard.begin, (unsigned long long)shard.end);
      for (int thread = 0; thread < 2; ++thread) {
        const Range part = share_of(shard, 2, thread);
        std::printf(" %llu %llu", (unsigned long long)part.begin, (unsigned long long)part.end);
      }
      for (std::uint64_t chunk = 0; chunk < 3; ++chunk) {
        const Range part = chunk_of(shard, 1u << 31, chunk);
        std::printf(" %llu %llu", (unsigned long long)part.begin, (unsigned long long)part.end);
      }
      std::printf("\n");
    }
    // A list of two: the second begins on the line after the first. Nothing there is read.
    TensorList list;
    list.add(reinterpret_cast<std::byte*>(0x1000), n, Dtype::f32);
    list.add(reinterpret_cast<std::byte*>(0x2000), n, Dtype::f32);
    const std::uint64_t begin = round_up(n, kLine);
    list.each({begin - (n > 8 ? 8 : 0), begin + n}, [](const Piece& piece) {
      std::printf("%llu %llu %llu ", (unsigned long long)piece.offset,
                  (unsigned long long)piece.bytes, (unsigned long long)piece.at);
    });
    std::printf("\n");
  }
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_every_part_lies_where_exact_arithmetic_puts_it(tmp_path):
    (tmp_path / "schedule.cpp").write_text(PROGRAM)
    command = ["g++", "-std=c++20", "-fsanitize=undefined", "-fno-sanitize-recover"]
    subprocess.run(
        [*command, "-Icsrc", tmp_path / "schedule.cpp", "-o", tmp_path / "schedule"],
        cwd=ROOT,
        check=True,
    )
    told = subprocess.run(
        [tmp_path / "schedule"],
        input=" ".join(map(str, NUMBERS)),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    lines = [[int(word) for word in line.split()] for line in told]
    assert len(lines) == 4 * len(NUMBERS)
    for n in NUMBERS:
        for rank in range(3):
            row = lines.pop(0)
            begin, end = min(n, -(-n // 3) * rank), min(n, -(-n // 3) * (rank + 1))
            assert row[:2] == [begin, end]
            lines_of_cache = -(-(end - begin) // 64)
            first = min(end - begin, (lines_of_cache + 1) // 2 * 64)
            assert row[2:6] == [begin, begin + first, begin + first, end]
            for chunk in range(3):
                cut = [min(end, begin + (chunk + k) * 2**31) for k in (0, 1)]
                assert row[6 + 2 * chunk : 8 + 2 * chunk] == cut
        pieces = lines.pop(0)
        gap = -(-n // 64) * 64 - n
        last = max(0, 8 - gap) if n > 8 else 0  # of the first tensor
        wanted = [n - last, last, 0] * (last > 0) + [0, n, 8 if n > 8 else 0] * (n > 0)
        assert pieces == wanted, n


def large(group: pk.Group, numel: int, shared: bool) -> None:
    make = group.empty if shared else torch.empty
    x = make(numel, dtype=torch.bfloat16).fill_(2.0 * group.rank)
    ends = [0, 2**30, 2**31 - 1, 2**31, 2**31 + 7]
    x[ends] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).bfloat16() * (group.rank + 1)
    assert pk.weighted_all_reduce_(x, 3 if group.rank else 1, group) == 4.0
    assert x[ends].tolist() == [1.75, 3.5, 5.25, 7.0, 8.75]
    assert x[1 : 2**30 : 2**20].unique().tolist() == [1.5]
    assert x[2**31 + 1 : 2**31 + 7].tolist() == [1.5] * 6


@pytest.mark.large
@pytest.mark.skipif(not NATIVE, reason="no native extension")
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "ordinary"])
def test_more_than_2_31_elements_are_averaged_to_the_last(shared):
    run_ranks(large, 2, 2**31 + 8, shared, timeout=600.0)

"""What the collectives refuse: with one error on every rank that names ranks and values, no tensor
changed, and the group usable after.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from ranks import message_of, same

import parallelkit as pk
from parallelkit.testing import run_ranks

KEPT = 7.0  # in every tensor that must not change


def kept(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, KEPT, dtype=dtype)


def refusals(group: pk.Group) -> dict[str, tuple[type[Exception], Callable[[], object]]]:
    """By name, what is raised and a call in which the last rank does something wrong."""
    last = group.rank == group.size - 1
    reduce, scatter = pk.weighted_all_reduce_, pk.weighted_reduce_scatter
    mismatch = pk.CollectiveMismatchError
    start, stop = pk.shard_bounds(12, group.size, group.rank)
    shard = kept(stop - start)

    def wrong(good: object, bad: object) -> object:
        return bad if last else good

    calls = {
        "shape": (mismatch, lambda: reduce(kept(200 if last else 100, 2560), 1, group)),
        "dimensions": (mismatch, lambda: reduce(kept(*wrong((6,), (2, 3))), 1, group)),
        "dtype": (
            mismatch,
            lambda: reduce(kept(3, dtype=wrong(torch.float32, torch.bfloat16)), 1, group),
        ),
        "complex": (
            mismatch,
            lambda: reduce(wrong(kept(3, 2), kept(3, dtype=torch.complex64)), 1, group),
        ),
        "count": (mismatch, lambda: reduce([kept(3)] + [kept(2)] * last, 1, group)),
        "nothing": (mismatch, lambda: reduce([kept(3)] * (not last), 1, group)),
        "order": (
            mismatch,
            lambda: reduce([kept(3 - last), kept(2 + last)], 1, group),
        ),
        "reduction": (
            mismatch,
            lambda: reduce(kept(3), 1, group, reduction=wrong("mean", "sum")),
        ),
        "another collective": (
            mismatch,
            lambda: scatter(kept(12), 1, group) if last else reduce(kept(12), 1, group),
        ),
        "a barrier": (mismatch, lambda: group.barrier() if last else reduce(kept(12), 1, group)),
        "Group.empty": (mismatch, lambda: group.empty(3) if last else reduce(kept(3), 1, group)),
        "empty and a barrier": (mismatch, lambda: wrong(group.barrier, group.empty)()),
        "empty and a module": (
            mismatch,
            lambda: group.empty(3) if last else pk.DataParallel(torch.nn.Linear(2, 2), group),
        ),
        "shapes of empty": (mismatch, lambda: group.empty(3 + last)),
        "flat length": (mismatch, lambda: scatter(kept(12 + last), 1, group)),
        "flat dtype": (
            mismatch,
            lambda: scatter(kept(12, dtype=wrong(torch.float32, torch.float64)), 1, group),
        ),
        "numel": (
            mismatch,
            lambda: pk.all_gather_flat(
                kept(*np.diff(pk.shard_bounds(12 + last, group.size, group.rank))), 12 + last, group
            ),
        ),
        "integers": (
            TypeError,
            lambda: reduce(kept(3, dtype=wrong(torch.float32, torch.int64)), 1, group),
        ),
        "complex32": (
            TypeError,
            lambda: reduce(kept(3, dtype=wrong(torch.float32, torch.complex32)), 1, group),
        ),
        "no tensor": (TypeError, lambda: reduce(wrong(kept(3), "abc"), 1, group)),
        "no sequence": (TypeError, lambda: reduce(wrong(kept(3), 5), 1, group)),
        "a number in the list": (
            TypeError,
            lambda: reduce([kept(3), wrong(kept(1), 1.0)], 1, group),
        ),
        "sparse": (ValueError, lambda: reduce(wrong(kept(3), kept(3).to_sparse()), 1, group)),
        "another device": (
            ValueError,
            lambda: reduce(wrong(kept(3), torch.empty(3, device="meta")), 1, group),
        ),
        "twice": (
            ValueError,
            lambda: reduce([shared := kept(3), wrong(kept(3), shared)], 1, group),
        ),
        "overlapping": (
            ValueError,
            lambda: reduce([(shared := kept(5))[:3], wrong(kept(3), shared[2:])], 1, group),
        ),
        "unknown reduction": (
            ValueError,
            lambda: reduce(kept(3), 1, group, reduction=wrong("mean", "max")),
        ),
        "no reduction": (
            ValueError,
            lambda: reduce(kept(3), 1, group, reduction=wrong("mean", [])),
        ),
        "weight of a string": (TypeError, lambda: reduce(kept(3), wrong(1, "1"), group)),
        "weight of no number": (TypeError, lambda: reduce(kept(3), wrong(1, None), group)),
        "weight of two": (TypeError, lambda: reduce(kept(3), wrong(1, torch.ones(2)), group)),
        "complex weight": (TypeError, lambda: reduce(kept(3), wrong(1, 1j), group)),
        "weight of 10^400": (ValueError, lambda: reduce(kept(3), wrong(1, 10**400), group)),
        "weights too large": (ValueError, lambda: reduce(kept(3), 1e308, group)),
        "shard of a matrix": (ValueError, lambda: scatter(wrong(kept(12), kept(3, 4)), 1, group)),
        "shard of a scalar": (ValueError, lambda: scatter(wrong(kept(12), kept()), 1, group)),
        "shard of nothing": (TypeError, lambda: scatter(wrong(kept(12), None), 1, group)),
        "negative numel": (
            ValueError,
            lambda: pk.all_gather_flat(shard, wrong(12, -1), group),
        ),
        "numel of a string": (TypeError, lambda: pk.all_gather_flat(shard, wrong(12, "12"), group)),
        "wrong shard": (
            ValueError,
            lambda: pk.all_gather_flat(wrong(shard, kept(99)), 12, group),
        ),
    }
    for bad in (-1, -0.5, math.nan, math.inf, -math.inf, torch.tensor(-2)):
        calls[f"weight {bad}"] = (
            ValueError,
            lambda bad=bad: reduce(kept(3), wrong(1, bad), group),
        )
    outputs = {
        "too long": kept(99),
        "of another dtype": kept(stop - start, dtype=torch.float64),
        "with gaps": kept(2 * (stop - start) + 2)[: 2 * (stop - start) : 2],
        "no tensor": [KEPT],
    }
    for name, out in outputs.items():
        calls[f"out {name}"] = (
            ValueError,
            lambda out=out: scatter(kept(12), 1, group, out=wrong(None, out)),
        )
        whole = out if name != "with gaps" else kept(24)[::2]
        whole = kept(12, dtype=torch.float64) if name == "of another dtype" else whole
        calls[f"whole {name}"] = (
            ValueError,
            lambda whole=whole: pk.all_gather_flat(shard, 12, group, out=wrong(None, whole)),
        )
    conjugate = kept(4, dtype=torch.complex64).conj()
    part = slice(*pk.shard_bounds(4, group.size, group.rank))
    calls["out conjugate"] = (
        ValueError,
        lambda: scatter(conjugate, 1, group, out=wrong(None, conjugate[part])),
    )
    return calls


def everything_refused(group: pk.Group, algorithm: str) -> dict[str, str]:
    del group
    told = {}
    with pk.Group(algorithm=algorithm) as group:
        tensors = []
        original = torch.full

        def remembered(*arguments, **options):
            tensors.append(original(*arguments, **options))
            return tensors[-1]

        torch.full = remembered
        for turn, (name, (kind, call)) in enumerate(refusals(group).items()):
            told[name] = message_of(kind, call)
            assert all(bool((tensor == KEPT).all()) for tensor in tensors), name
            tensors.clear()
            x = original((turn,), float(group.rank))
            assert pk.weighted_all_reduce_(x, 1, group).item() == group.size
            assert bool((x == (group.size - 1) / 2).all()), f"usable after: {name}"
        torch.full = original
    return told


@pytest.mark.parametrize("algorithm", ["auto", "reference"])
@pytest.mark.parametrize("size", [2, 3])
def test_wrong_calls_raise_the_same_on_every_rank_and_change_nothing(size, algorithm):
    by_rank = run_ranks(everything_refused, size, algorithm)
    for name in by_rank[0]:  # but each rank's message begins with what it called itself
        assert same([told[name].partition(": ")[2] for told in by_rank]), name
    told, last = by_rank[0], size - 1
    others = "rank 0" if size == 2 else "ranks 0, 1"
    for name, parts in {
        "shape": ["float32[100, 2560]", "float32[200, 2560]", others, f"rank {last}"],
        "dtype": ["float32[3]", "bfloat16[3]", others, f"rank {last}"],
        "complex": ["float32[3, 2]", "complex64[3]"],
        "count": ["nothing more", "float32[2]"],
        "reduction": ["mean", "sum", f"rank {last}"],
        "another collective": ["weighted_all_reduce_", "weighted_reduce_scatter", f"rank {last}"],
        "a barrier": ["weighted_all_reduce_", "Group.barrier"],
        "Group.empty": ["weighted_all_reduce_ on rank", f"Group.empty on rank {last}"],
        "empty and a barrier": ["Group.barrier on rank", f"Group.empty on rank {last}"],
        "empty and a module": ["DataParallel on rank", f"Group.empty on rank {last}"],
        "shapes of empty": ["float32[3]", "float32[4]", f"rank {last}"],
        "flat length": ["float32[12]", "float32[13]"],
        "integers": ["tensors[0]", "torch.int64", f"rank {last} of {size}"],
        "a number in the list": ["tensors[1]", "float", f"rank {last} of {size}"],
        "unknown reduction": ["'max'", '"mean"', '"sum"'],
        "weight -1": ["1.0 on rank 0", f"-1.0 on rank {last}", "weight=0"],
        "weight nan": [f"nan on rank {last}"],
        "weight of two": ["[2]", f"rank {last} of {size}"],
        "wrong shard": ["[99]", f"rank {last} of {size}"],
        "out with gaps": ["strides [2]"],
    }.items():
        for part in parts:
            assert part in told[name], (name, told[name])

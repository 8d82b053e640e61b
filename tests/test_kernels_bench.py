"""bench/bench_linear.py, as far as it needs no GPU."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton_interpreter  # noqa: E402

BENCH = runpy.run_path(str(Path(__file__).parent.parent / "bench" / "bench_linear.py"))


def test_every_case_is_right_and_a_wrong_one_is_seen():
    with triton_interpreter.repaired():
        rows = BENCH["check_only"]()
        assert len(rows) == 8 and all(row["wrong"] == 0 for row in rows)
        device, dtype = BENCH["torch"].device("cpu"), BENCH["torch"].float16
        case = BENCH["cases"](16, 16, 16, device, dtype)[0]
        right = case.ours()
        case.ours = lambda: right * 1.05
        assert BENCH["wrong"](case) > 0


def test_the_summary_is_a_geometric_mean_over_right_results_of_each_kind():
    rows = [
        {"kind": "bare", "wrong": 0, "ours ms": 1.0, "torch ms": 1.0, "compile ms": 4.0},
        {"kind": "bare", "wrong": 0, "ours ms": 1.0, "torch ms": 4.0, "compile ms": 1.0},
        {"kind": "bare", "wrong": 9},
    ]
    assert BENCH["summarize"](rows) == {
        "bare": {"over torch": 2.0, "goal": 0.97, "lowest over torch": 1.0, "over compile": 2.0}
    }

"""The linear layer's products: our Triton kernels against cuBLAS with eager epilogues, and against
torch.compile.

Shapes are those of Llama-like models at 8192 tokens, whole and as shards of 2 and 8 ranks. Every
result is checked against fp32 before it is timed; a wrong one has no time. Operands are random (a
GPU multiplies zeros faster). Times are medians over runs of the three in turn, with the L2 cache
flushed before each. The last line is one JSON object.

    python bench/bench_linear.py                 on a GPU, about two minutes
    python bench/bench_linear.py --seconds 60    what fits in a minute; the rest is named
    python bench/bench_linear.py --check         the checks alone, tiny, also without a GPU
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from parallelkit.kernels import linear

from parallelkit.bench.measure import environment

TOKENS = 8192
# N outputs, K inputs: attention and MLP of a hidden size of 4096 and 8192.
SHAPES = [
    (4096, 4096),
    (14336, 4096),
    (4096, 14336),
    (11008, 4096),
    (7168, 4096),  # of 2 ranks, column-split
    (4096, 7168),  # of 2 ranks, row-split
    (3584, 8192),  # of 8 ranks, column-split
    (8192, 3584),  # of 8 ranks, row-split
]
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "B200": 2250}  # dense bf16, by data sheet
GOALS = {"bare": 0.97, "epilogue": 1.05, "swiglu": 1.10}  # times as fast as torch, geometric mean
REPEATS = 15

Tensor = torch.Tensor


@dataclass
class Case:
    """One product: who computes it, and what it must give."""

    name: str
    kind: str  # "bare", "epilogue" or "swiglu"
    flops: float
    ours: Callable[[], Tensor]
    torch: Callable[..., Tensor]  # also what torch.compile compiles
    inputs: tuple[Tensor, ...]


def cases(m: int, n: int, k: int, device: torch.device, dtype: torch.dtype) -> list[Case]:
    """Every direction of one layer, with and without an epilogue."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    x, w, b, r = random(m, k), random(n, k) / math.sqrt(k), random(n), random(m, n)
    dy, pre, both = random(m, n), random(m, k), random(2 * n, k) / math.sqrt(k)
    grad, torch_grad = torch.zeros(2, n, k, device=device)

    def add_gradient() -> Tensor:
        linear.add_weight_gradient(dy, x, grad, None)
        return grad

    def torch_add_gradient(dy: Tensor, x: Tensor) -> Tensor:
        return torch_grad.add_(dy.T @ x)

    def swiglu(x: Tensor, w: Tensor) -> Tensor:
        gate, up = (x @ w.T).chunk(2, 1)
        return F.silu(gate) * up

    once = 2.0 * m * n * k
    forward, input_gradient = linear.forward, linear.input_gradient
    return [
        Case(
            "forward", "bare", once,
            lambda: forward(x, w, None, None, None, False, False)[0],
            lambda x, w: x @ w.T, (x, w),
        ),
        Case(
            "dx", "bare", once,
            lambda: input_gradient(dy, w, None, None, False),
            lambda dy, w: dy @ w, (dy, w),
        ),
        Case(
            "dW", "bare", once,
            lambda: linear.weight_gradient(dy, x, False, dtype)[0],
            lambda dy, x: dy.T @ x, (dy, x),
        ),
        Case(
            "forward + bias, GELU", "epilogue", once,
            lambda: forward(x, w, b, None, "gelu", False, False)[0],
            lambda x, w, b: F.gelu(F.linear(x, w, b)), (x, w, b),
        ),
        Case(
            "forward + bias, GELU, residual", "epilogue", once,
            lambda: forward(x, w, b, r, "gelu", False, False)[0],
            lambda x, w, b, r: F.gelu(F.linear(x, w, b)) + r, (x, w, b, r),
        ),
        Case(
            "dx · GELU'", "epilogue", once,
            lambda: input_gradient(dy, w, pre, "gelu", False),
            lambda dy, w, z: torch.ops.aten.gelu_backward(dy @ w, z), (dy, w, pre),
        ),
        Case("dW into fp32", "epilogue", once, add_gradient, torch_add_gradient, (dy, x)),
        Case(
            "SwiGLU", "swiglu", 2 * once,
            lambda: forward(x, both, None, None, "silu", True, False)[0],
            swiglu, (x, both),
        ),
    ]  # fmt: skip


def wrong(case: Case) -> int:
    """Elements of a first result outside the error of 16-bit outputs, against the same in fp32."""
    with torch.no_grad():
        ours = case.ours().float()
        exact = case.torch(*(t.float() for t in case.inputs))
    # Two roundings to 8 bits, and fp32 sums whose terms are about as large as their result.
    bound = 2.0**-7 * (exact.abs() + exact.abs().mean())
    return int(((ours - exact).abs() > bound).logical_or(ours.isnan()).sum())


def medians(candidates: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of each, run in turn."""
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for call in candidates.values():  # compile and warm up
        call()
        call()
    for _ in range(REPEATS):
        for name, call in candidates.items():
            flush.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop))
    return {name: statistics.median(values) for name, values in times.items()}


def geometric_mean(values: list[float]) -> float:
    """The mean for ratios."""
    return math.exp(statistics.fmean(map(math.log, values)))


def summarize(rows: list[dict]) -> dict:
    """How many times as fast as the others, by kind, with the goal beside it."""
    summary = {}
    for kind, goal in GOALS.items():
        chosen = [row for row in rows if row["kind"] == kind and not row["wrong"]]
        if chosen:
            over_torch = [row["torch ms"] / row["ours ms"] for row in chosen]
            over_compile = [row["compile ms"] / row["ours ms"] for row in chosen]
            summary[kind] = {
                "over torch": round(geometric_mean(over_torch), 3),
                "goal": goal,
                "lowest over torch": round(min(over_torch), 3),
                "over compile": round(geometric_mean(over_compile), 3),
            }
    return summary


def check_only() -> list[dict]:
    """The checks at a size that the interpreter manages in seconds."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    return [
        {"case": case.name, "kind": case.kind, "wrong": wrong(case)}
        for case in cases(96, 80, 112, device, dtype)
    ]


def measure(case: Case) -> dict:
    """One row: checked and, if right, timed."""
    row: dict = {"case": case.name, "kind": case.kind, "wrong": wrong(case)}
    if not row["wrong"]:
        torch._dynamo.reset()
        compiled = torch.compile(case.torch, dynamic=False)
        with torch.no_grad():
            ms = medians(
                {
                    "ours": case.ours,
                    "torch": partial(case.torch, *case.inputs),
                    "compile": partial(compiled, *case.inputs),
                }
            )
        row |= {f"{who} ms": round(time, 4) for who, time in ms.items()}
        row["TFLOP/s"] = round(case.flops / ms["ours"] / 1e9, 1)
    return row


def measure_all(seconds: float) -> tuple[list[dict], list[str]]:
    """Rows of results, printed as they come, and the names of what did not fit into the time."""
    deadline = time.monotonic() + seconds
    name = torch.cuda.get_device_name()
    peak = next((tflops for chip, tflops in PEAK_TFLOPS.items() if chip in name), math.nan)
    print(f"# {name}, peak {peak} TFLOP/s")
    columns = ("wrong", "ours ms", "torch ms", "compile ms", "/torch", "/compile", "of peak")
    print(f"# {'M x N x K':>20} {'case':32}" + "".join(f"{column:>11}" for column in columns))
    rows, left_out = [], []
    for n, k in SHAPES:
        shape = f"{TOKENS} x {n} x {k}"
        for case in cases(TOKENS, n, k, torch.device("cuda"), torch.bfloat16):
            if time.monotonic() > deadline:
                left_out.append(f"{shape} {case.name}")
                continue
            row = {"shape": [TOKENS, n, k]} | measure(case)
            rows.append(row)
            print(f"  {shape:>20} {case.name:32}{row['wrong']:>11}", end="")
            if not row["wrong"]:
                ours, others = row["ours ms"], (row["torch ms"], row["compile ms"])
                figures = [ours, *others, *(other / ours for other in others)]
                print("".join(f"{figure:11.3f}" for figure in figures), end="")
                print(f"{row['TFLOP/s'] / peak:11.1%}", end="")
            print(flush=True)
    return rows, left_out


def main() -> int:
    """Run, print, and fail if any result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150.0, help="start nothing after this")
    parser.add_argument("--check", action="store_true", help="check results only")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    left_out: list[str] = []
    if arguments.check:
        rows = check_only()
        for row in rows:
            print(f"  {row['case']:32} {row['wrong']} wrong")
    elif not torch.cuda.is_available():
        parser.error("no GPU to time on; --check runs the checks through Triton's interpreter")
    else:
        rows, left_out = measure_all(arguments.seconds)
    report = {"rows": rows, "left out": left_out, "environment": environment()}
    if not arguments.check:
        report["summary"] = summarize(rows)
        report["device"] = torch.cuda.get_device_name()
    print(json.dumps(report))
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Everything that needs a GPU, in one run of at most eight minutes, without a network.

    build       the extensions for this GPU, with the packages laid out as installed
    tests       `pytest -m gpu`
    times       the optimizer's pass and the all-reduce, against the device's own copy
    linear      the linear layer's kernels, against cuBLAS and torch.compile
    memcheck, racecheck     compute-sanitizer over every kernel, on small sizes

Each part is a process with a time limit of its own, and runs whatever became of the others; only
the build is needed by all. What a part prints goes to a file in $OUT (build/gpu-check by default),
beside report.json; a table comes last. Nothing is downloaded: what is missing is named.

    python bench/gpu_check.py               make gpu-check
    python bench/gpu_check.py --rehearse    the same on the CPU, tiny: the script itself is tested
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 475.0  # seconds for everything
NEEDED = ("torch", "triton", "pybind11", "ninja", "setuptools", "pytest", "hypothesis", "tqdm")


@dataclass
class Part:
    """A command, and what became of it."""

    name: str
    seconds: float  # it is ended after
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    folder: Path = ROOT  # where it runs: Python looks for packages there first of all
    outcome: str = "not run"
    took: float = 0.0
    output: str = ""

    @property
    def good(self) -> bool:
        """Whether it ended well."""
        return self.outcome == "passed"


def run(part: Part, folder: Path, deadline: float) -> None:
    """Run one part, within its time and what is left; its output goes to a file, too."""
    left = min(part.seconds, deadline - time.monotonic())
    if left < 1:
        part.outcome = "not run: no time left"
        return
    print(f"== {part.name}, at most {left:.0f} s", flush=True)
    start, log = time.monotonic(), folder / f"{part.name}.txt"
    with log.open("w") as file:
        try:
            process = subprocess.Popen(
                part.command,
                cwd=part.folder,
                env=os.environ | part.environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its children end with it
            )
        except OSError as error:
            part.outcome = f"did not start: {error}"
            return
        try:
            status = process.wait(left)
            part.outcome = "passed" if status == 0 else f"failed, status {status}"
        except subprocess.TimeoutExpired:
            part.outcome = f"ended after {left:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and whatever it left behind
            process.wait()
    part.took = time.monotonic() - start
    part.output = log.read_text(errors="replace")
    print(f"   {part.outcome} ({part.took:.0f} s)", flush=True)
    if not part.good:
        print("\n".join(f"   | {line}" for line in part.output.splitlines()[-15:]), flush=True)


def facts(rehearse: bool) -> dict[str, Any]:
    """What this runs on, and what is missing."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "missing": []}
    for name in NEEDED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found["missing"].append(f"Python package {name}")
    tools = ("g++",) if rehearse else ("g++", "nvcc", "compute-sanitizer", "nvidia-smi")
    found["missing"] += [f"program {tool}" for tool in tools if shutil.which(tool) is None]
    if not rehearse and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv"]
        told = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
        found["gpu"] = told.stdout.strip()
    return found


def capability() -> str:
    """Of this GPU, as PK_CUDA_ARCHS names it."""
    code = "import torch; print(*torch.cuda.get_device_capability(), sep='')"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    return told.stdout.strip() or "90"


def parts(folder: Path, rehearse: bool) -> list[Part]:
    """What is run, in order of importance; the first makes what the others use."""
    python, library = sys.executable, ROOT / "build" / "gpu-check-library"
    installed = {"PYTHONPATH": str(library), "PYTHONUNBUFFERED": "1"}
    if rehearse:
        installed |= {"PARALLELKIT_TEST_DEVICE": "cpu", "TRITON_INTERPRET": "1"}
    built_for = {"PK_CUDA": "0"} if rehearse else {"PK_CUDA": "1", "PK_CUDA_ARCHS": capability()}
    tiny = ["--rehearse"] if rehearse else []
    tests = [str(path) for path in sorted((ROOT / "tests").glob("test_cuda_*.py"))]
    chosen = ["-k", "finite or graphs"] if rehearse else []
    linear = ["--check"] if rehearse else ["--seconds", "140"]
    sanitizer = [] if rehearse else ["compute-sanitizer", "--error-exitcode", "9"]

    def sanitized(tool: str) -> Part:
        command = [*sanitizer, *(["--tool", tool] if sanitizer else [])]
        small = [python, "bench/gpu_small.py", *tiny]
        return Part(tool, 30, [*command, *small], installed)

    build = ["setup.py", "--quiet", "build", "--build-lib", str(library)]
    return [
        Part("build", 120, [python, *build], {"PK_CPU": "1", **built_for}),
        Part(
            "tests", 60,
            [python, "-m", "pytest", "-q", "-m", "gpu", "-rf", "-p", "no:cacheprovider",
             "--maxfail=20", *chosen, *tests],
            installed, library,
        ),
        Part(
            "times", 60,
            [python, "bench/gpu_times.py", "--seconds", "40", *tiny,
             "--out", str(folder / "times.json")],
            installed,
        ),
        Part("linear", 165, [python, "bench/bench_linear.py", *linear], installed),
        sanitized("memcheck"),
        sanitized("racecheck"),
    ]  # fmt: skip


def last_json(text: str) -> dict[str, Any]:
    """The object in the last line; empty where there is none."""
    try:
        found = json.loads(text.splitlines()[-1])
    except (IndexError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def table(done: list[Part], times: dict[str, Any], linear: dict[str, Any]) -> list[str]:
    """The short one that comes last."""
    lines = [f"{part.name:12}{part.took:6.0f} s  {part.outcome}" for part in done]
    for part in done:
        if part.name == "tests" and part.output:
            lines.append(f"{'':12}{part.output.splitlines()[-1]}")
    lines.append(f"device copy {times.get('copy GB/s', 'not measured')} GB/s")
    for row in times.get("rows", []):
        if "wrong" in row:
            lines.append(f"  {row['what']:56} WRONG")
        elif row["what"].startswith(("AdamW", "one pass")) or row.get("bytes", 0) in (
            2**16,
            2**26,
            2**30,
        ):
            goal = f", goal {row['goal']:.0%}" if "goal" in row else ""
            lines.append(f"  {row['what']:56}{row['ms']:10.3f} ms {row['of copy']:7.1%}{goal}")
    ms = {row["what"]: row["ms"] for row in times.get("rows", []) if "ms" in row}
    fast, slow = "AdamW, all bf16, stochastic, parallelkit", "AdamW, fp32, torch, fused"
    if fast in ms and slow in ms:
        lines.append(f"  {fast}: {ms[slow] / ms[fast]:.2f} times as fast as {slow}, goal 1.85")
    for kind, ratios in linear.get("summary", {}).items():
        told = ", ".join(f"{name} {value}" for name, value in ratios.items())
        lines.append(f"  linear, {kind}: {told}")
    left_out = [*times.get("left out", []), *linear.get("left out", [])]
    if left_out:
        lines.append(f"no time for {len(left_out)}: {', '.join(left_out[:4])} ...")
    return lines


def main() -> int:
    """Run every part; fail if one did not pass."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the CPU")
    arguments = parser.parse_args()
    begin = time.monotonic()
    folder = Path(os.environ.get("OUT") or ROOT / "build" / "gpu-check").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "times.json").unlink(missing_ok=True)  # of an earlier run
    found = facts(arguments.rehearse)
    print(f"# {json.dumps(found)}", flush=True)
    for name in found["missing"]:
        print(f"missing: {name}", flush=True)

    done = parts(folder, arguments.rehearse)
    results = folder / "times.json"
    for part in done:
        run(part, folder, begin + LIMIT)
        times = json.loads(results.read_text()) if results.exists() else {}
        linear = next((last_json(p.output) for p in done if p.name == "linear"), {})
        report = {
            "facts": found,
            "rehearsal": arguments.rehearse,
            "parts": [
                {"name": p.name, "outcome": p.outcome, "seconds": round(p.took, 1)} for p in done
            ],
            "times": times,
            "linear": linear,
        }
        (folder / "report.json").write_text(json.dumps(report, indent=1))
        if part.name == "build" and not part.good:
            break
    print(f"\n{'rehearsal, on the CPU: no figure means anything' if arguments.rehearse else ''}")
    print("\n".join(table(done, times, linear)))
    return 0 if all(part.good for part in done) else 1


if __name__ == "__main__":
    raise SystemExit(main())

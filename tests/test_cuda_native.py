"""The CUDA extension where there is no GPU: its kernels on the host, and what nvcc made of them.

csrc/cuda keeps the bodies of its kernels in headers that a host compiler takes too. Here threads
run them as ranks, under ThreadSanitizer, and every result must be the CPU backend's to the bit.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FLAGS = ["-std=c++20", "-g1", "-O1", "-fsanitize=thread", "-ffp-contract=off", "-pthread"]
SPEC = importlib.util.find_spec("parallelkit._cuda")


# ---- the kernels as threads of the host run them


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of tests/race that run the kernels, compiled for ThreadSanitizer."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("cuda")
    names = {"cuda_collectives": "tests/race/", "cuda_step": "tests/race/"}
    names["kernels_portable"] = "csrc/cpu/"
    compilers = [
        subprocess.Popen(
            ["g++", *FLAGS, "-Icsrc", "-c", f"{place}{name}.cpp", "-o", folder / f"{name}.o"],
            cwd=ROOT,
        )
        for name, place in names.items()
    ]
    assert [compiler.wait() for compiler in compilers] == [0, 0, 0]
    for name in ("cuda_collectives", "cuda_step"):
        objects = [folder / f"{name}.o", folder / "kernels_portable.o"]
        subprocess.run(["g++", *FLAGS, *objects, "-o", folder / name], check=True)
    probe = subprocess.run([folder / "cuda_step"], capture_output=True)
    if b"FATAL: ThreadSanitizer" in probe.stderr:
        pytest.skip("ThreadSanitizer cannot run on this kernel")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "ranks", "threads", "blocks"),
    [
        ("cuda_collectives", 1, 2, 1),
        ("cuda_collectives", 2, 2, 2),
        ("cuda_collectives", 3, 1, 3),
        ("cuda_collectives", 8, 1, 1),
        ("cuda_step", 1, 2, 1),
        ("cuda_step", 2, 2, 2),
        ("cuda_step", 5, 1, 2),
        ("cuda_step", 8, 1, 1),
    ],
)
def test_the_kernels_have_no_race_and_compute_what_the_cpu_does(
    programs: Path, program: str, ranks: int, threads: int, blocks: int
) -> None:
    done = subprocess.run(
        [programs / program, *map(str, (ranks, threads, blocks))],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]


# ---- the extension as it is built

needs_module = pytest.mark.skipif(SPEC is None, reason="parallelkit._cuda is not built")


@pytest.fixture(scope="module")
def module() -> Any:
    return importlib.import_module("parallelkit._cuda")


@pytest.fixture(scope="module")
def library() -> Path:
    assert SPEC is not None and SPEC.origin is not None
    return Path(SPEC.origin)


@needs_module
def test_it_imports_without_a_driver_and_says_what_is_missing() -> None:
    code = """if True:
        import parallelkit._cuda as cuda
        assert (cuda.device_count() == 0) == (cuda.unavailable() != ""), cuda.unavailable()
        assert cuda.versions()[0] >= 12000
        """
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_module
def test_it_links_neither_the_driver_nor_a_runtime_nor_torch(library: Path) -> None:
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf")
    listed = subprocess.run(
        ["readelf", "-d", library], capture_output=True, text=True, check=True
    ).stdout
    needed = set(re.findall(r"NEEDED.*\[(\w+)", listed))
    assert needed <= {"libstdc", "libgcc_s", "libc", "libm", "ld", "libpthread", "libdl", "librt"}


@needs_module
def test_it_has_what_its_stub_says_and_nothing_else(module: Any) -> None:
    stub = ast.parse((ROOT / "parallelkit/_cuda.pyi").read_text())

    def names(body: list[ast.stmt]) -> set[str]:
        found = set()
        for part in body:
            if isinstance(part, (ast.FunctionDef, ast.ClassDef)):
                found.add(part.name)
            elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                found.add(part.target.id)
        return found

    def public(namespace: Any) -> set[str]:
        return {name for name in vars(namespace) if not name.startswith("_")}

    assert names(stub.body) == public(module)
    for part in stub.body:
        if isinstance(part, ast.ClassDef):
            assert names(part.body) - {"__init__"} == public(getattr(module, part.name)), part.name


@needs_module
def test_outcomes_are_those_of_the_cpu(module: Any) -> None:
    from parallelkit.ops import cpu

    assert cpu is not None
    assert module.outcomes == cpu.outcomes
    assert module.max_ranks == cpu.max_ranks


@needs_module
def test_small_all_reduces_are_one_shot_and_the_limit_falls_with_the_ranks(module: Any) -> None:
    def limit(size: int) -> int:
        ways = [module.algorithms[module.choose_algorithm(1 << e, size)] for e in range(30)]
        one_shot = ways.count("one-shot")
        assert ways == ["one-shot"] * one_shot + ["direct"] * (30 - one_shot)
        return one_shot

    limits = [limit(size) for size in (2, 4, 8, 16, 64)]
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] > 10 and limits[0] < 25


@needs_module
def test_errors_name_the_call_and_what_it_wanted(module: Any) -> None:
    with pytest.raises(ValueError, match=r"0 <= rank < size"):
        module.Communicator(2, 2, 0, [0, 0], 1, 1.0, 0)
    with pytest.raises(ValueError, match=r"VirtualRanks: size must be 1 to \d+, got 100"):
        module.VirtualRanks(100)
    with pytest.raises(ValueError, match=r"handle must have 64 bytes, got 3"):
        module.Memory.open_ipc(0, b"abc", 1024)
    if module.device_count() == 0:
        for make in (module.Memory.plain, module.Memory.shareable):
            with pytest.raises(RuntimeError, match=r"^cuda\w+: .+ \(cudaError\w+\)$"):
                make(0, 1024)


# ---- the machine code


@pytest.fixture(scope="module")
def tools() -> Path:
    """NVIDIA's disassemblers, as Triton brings them."""
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        pytest.skip("needs triton")
    folder = Path(triton.origin).parent / "backends/nvidia/bin"
    if not (folder / "nvdisasm").exists():
        pytest.skip("this triton brings no nvdisasm")
    return folder


def dump(tools: Path, *arguments: object) -> str:
    return subprocess.run(
        [tools / "cuobjdump", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"},
    ).stdout


@needs_module
def test_no_kernel_spills_on_any_architecture(module: Any, library: Path, tools: Path) -> None:
    used = re.findall(
        r"Function (\S+):\s+REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)",
        dump(tools, "-res-usage", library),
    )
    kernels = {name for name, _, _ in used if "run_calls" in name}
    assert len(kernels) >= 20
    assert len([u for u in used if u[0] in kernels]) == len(kernels) * len(module.architectures)
    assert [u for u in used if u[1:] != ("0", "0")] == []


@needs_module
def test_streaming_kernels_move_sixteen_bytes_and_read_peers_coherently(
    module: Any, library: Path, tools: Path
) -> None:
    with ThreadPoolExecutor() as pool:
        texts = pool.map(
            lambda a: dump(tools, "-sass", "-arch", f"sm_{a}", library), module.architectures
        )
    for text in texts:
        code = dict(zip(*[iter(re.split(r"Function : (\S+)", text)[1:])] * 2, strict=True))
        streaming = [n for n in code if re.search("ReduceCall|GatherCall|Update", n)]
        assert len(streaming) == 18
        for name in streaming:
            wide = r"\.E(\.\w+)*\.(128|256)\b"
            assert re.search(f"LDG{wide}", code[name]), name
            assert re.search(f"STG{wide}", code[name]), name
        # The non-coherent path would read what peers wrote from a cache that nobody clears.
        assert re.findall(r"LDG?\S*\.CONSTANT\S*", text) == []

"""No access out of bounds, no use after free and no undefined behaviour in the native collectives.

The program of tests/race, which runs and checks every collective, under AddressSanitizer and UBSan,
once for each instruction set. `make sanitize` builds the whole extension so, and takes minutes.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Without optimization it compiles in a third of the time, and runs fast enough.
FLAGS = ["-std=c++20", "-O0", "-fsanitize=address,undefined", "-ffp-contract=off", "-pthread"]
NATIVE = ("communicator", "control", "process", "segment", "kernels")
SOURCES = {
    "tests/race/communicator.cpp": [],
    **{f"csrc/cpu/{name}.cpp": [] for name in NATIVE},
    "csrc/cpu/kernels_portable.cpp": [],
}
if platform.machine() == "x86_64":
    SOURCES["csrc/cpu/kernels.cpp"] = ["-DPK_X86_DISPATCH=1"]
    SOURCES["csrc/cpu/kernels_avx2.cpp"] = ["-mavx2", "-mfma", "-mf16c"]
    SOURCES["csrc/cpu/kernels_avx512.cpp"] = [
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c")
    ]

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sanitized")
    objects, waiting = [], list(SOURCES.items())
    running: list[subprocess.Popen[bytes]] = []
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            source, flags = waiting.pop()
            objects.append(folder / (source.replace("/", "-") + ".o"))
            command = ["g++", *FLAGS, *flags, "-Icsrc", "-c", source, "-o", objects[-1]]
            running.append(subprocess.Popen(command, cwd=ROOT))
        assert running.pop(0).wait() == 0
    subprocess.run(["g++", *FLAGS, *objects, "-o", folder / "program"], check=True)
    return folder / "program"


@pytest.mark.parametrize("path", ["portable", "avx2", "avx512"])
@pytest.mark.parametrize(("ranks", "threads"), [(1, 1), (3, 2), (8, 1)], ids=lambda n: str(n))
def test_the_collectives_touch_their_own_memory_only(program, path, ranks, threads):
    done = subprocess.run(
        [program, str(ranks), str(threads), "1"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ
        | {"PARALLELKIT_ISA": path, "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"},
    )
    if "no such path" in done.stderr:
        pytest.skip(f"this processor has no {path}")
    assert done.returncode == 0, done.stderr[-4000:]

"""No data race in the collectives: csrc/protocol.h and the communicator under ThreadSanitizer.

Virtual ranks are threads of one process here, because no tool sees a race between processes. Where
an ordering is missing x86 still computes the right numbers, so only this finds it; that it does is
shown by variants of the protocol with one thing taken away.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RACE = 66  # ThreadSanitizer's exit status
FLAGS = ["-std=c++20", "-g1", "-O1", "-fsanitize=thread", "-ffp-contract=off", "-pthread"]
PRODUCT = [f"csrc/cpu/{part}.cpp" for part in ("communicator", "control", "process", "segment")]
KERNELS = [f"csrc/cpu/{part}.cpp" for part in ("kernels", "kernels_portable")]

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The two programs of tests/race, compiled for ThreadSanitizer."""
    folder = tmp_path_factory.mktemp("race")
    sources = {"communicator": [*PRODUCT, *KERNELS], "protocol": []}
    compilers = [
        subprocess.Popen(
            ["g++", *FLAGS, "-Icsrc", f"tests/race/{name}.cpp", *others, "-o", folder / name],
            cwd=ROOT,
        )
        for name, others in sources.items()
    ]
    assert [compiler.wait() for compiler in compilers] == [0, 0]
    probe = subprocess.run([folder / "protocol", "whole", "1", "1", "1"], capture_output=True)
    if b"FATAL: ThreadSanitizer" in probe.stderr:
        pytest.skip("ThreadSanitizer cannot run on this kernel")
    return folder


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1"},
    )


@pytest.mark.parametrize(
    ("ranks", "threads"), [(2, 2), (3, 1), (5, 2), (8, 1)], ids=lambda n: str(n)
)
def test_the_communicator_has_no_race_and_computes_the_mean(programs, ranks, threads):
    done = run(programs / "communicator", ranks, threads, 2)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(("ranks", "threads"), [(2, 2), (4, 3), (8, 1)], ids=lambda n: str(n))
def test_the_protocol_has_no_race(programs, ranks, threads):
    done = run(programs / "protocol", "whole", ranks, threads, 30)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("variant", ["no-release", "no-acquire", "no-credit", "no-sync"])
@pytest.mark.parametrize("ranks", [2, 5])
def test_a_protocol_with_one_thing_removed_is_reported(programs, variant, ranks):
    done = run(programs / "protocol", variant, ranks, 2, 30)
    assert done.returncode == RACE, (done.returncode, done.stderr[-4000:])
    assert "ThreadSanitizer: data race" in done.stderr

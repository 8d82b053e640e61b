"""Options and settings of the whole suite."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path

import hypothesis
import pytest

from parallelkit.ops import load_cuda

# The server that ranks are forked from imports a test module once, where each rank would.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# torch.compile's pool of compilers would be killed with the rank that began it, and leak.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

# Examples differ from run to run; a failing one is printed with what reproduces it. Ranks share two
# cores with whatever else runs, so no single example has a deadline.
hypothesis.settings.register_profile(
    "parallelkit",
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("parallelkit")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--large", action="store_true", help="also run the tests that need many gigabytes"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "large: needs many gigabytes; runs with --large")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--large"):
        for item in items:
            if item.get_closest_marker("large"):
                item.add_marker(pytest.mark.skip(reason="needs many gigabytes; runs with --large"))
    # Files with a slow test begin first: at the end both workers have something left to do.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    rehearsal = os.environ.get("PARALLELKIT_TEST_DEVICE") == "cpu"
    lacking = "" if rehearsal else load_cuda()[1]
    for item in items:
        if lacking and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {lacking}"))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the server that ranks are forked from; it loads once what takes seconds."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["preload"])
    forkserver.ensure_running()

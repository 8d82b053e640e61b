"""Where the tests that need a GPU run, and on how many virtual ranks.

They run by `make gpu-check`, or as `pytest -m gpu`, and are skipped where there is no GPU. The
rehearsal of that script sets PARALLELKIT_TEST_DEVICE=cpu: what is not about streams then runs on
the CPU.
"""

from __future__ import annotations

import functools
import os

import pytest

from parallelkit.testing import virtual_ranks

DEVICE = os.environ.get("PARALLELKIT_TEST_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
SIZES = (1, 2, 4, 8) if ON_GPU else (1, 2)

only_on_a_gpu = pytest.mark.skipif(not ON_GPU, reason="a GPU's streams, graphs or kernels")
on_device = functools.partial(virtual_ranks, device=DEVICE, timeout=20.0)

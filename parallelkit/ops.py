"""The native extension: the only file that loads it.

`cpu` is the module `parallelkit._cpu`, or None where it was not built, does not load or belongs to
another version of these sources; then one warning has said so and everything runs through plain
PyTorch.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

import torch

__all__ = ["DTYPE_CODES", "cpu"]

# The version of the calls between Python and C++; csrc/cpu/bindings.cpp has the same number.
_INTERFACE = 1


def _load() -> Any | None:
    if sys.platform != "linux":
        reason = f"there is none for {sys.platform}"
    else:
        try:
            module = importlib.import_module("parallelkit._cpu")
        except ImportError as error:
            reason = str(error)
        else:
            found = getattr(module, "interface", None)
            if found == _INTERFACE:
                return module
            reason = f"it is stale (interface {found}, wanted {_INTERFACE})"
    warnings.warn(
        f"parallelkit runs without its native extension: {reason}. Collectives go through "
        "torch.distributed, with the same results but slower; to build it, install a C++20 "
        "compiler and reinstall parallelkit (`parallelkit doctor` shows what is there).",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


cpu: Any | None = _load()

# The numbers of csrc/dtypes.h.
DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}

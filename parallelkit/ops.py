"""The native extensions: the only file that loads them.

`cpu` is the module `parallelkit._cpu`, or None where it was not built, does not load or belongs to
another version of these sources; then one warning has said so and everything runs through plain
PyTorch. `load_cuda` gives `parallelkit._cuda` to whoever has a GPU.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from typing import Any

import torch

__all__ = ["DTYPE_CODES", "cpu", "load_cuda", "wide_dtype"]

# The versions of the calls between Python and C++; their bindings have the same numbers.
_INTERFACES = {"parallelkit._cpu": 4, "parallelkit._cuda": 3}


def _load(name: str) -> tuple[Any | None, str]:
    """An extension, or None and why."""
    if sys.platform != "linux":
        return None, f"there is none for {sys.platform}"
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        return None, str(error)
    found, wanted = getattr(module, "interface", None), _INTERFACES[name]
    return (
        (module, "")
        if found == wanted
        else (None, f"it is stale (interface {found}, wanted {wanted})")
    )


def _load_cpu() -> Any | None:
    module, reason = _load("parallelkit._cpu")
    if module is not None:
        return module
    warnings.warn(
        f"parallelkit runs without its native extension: {reason}. Collectives go through "
        "torch.distributed, with the same results but slower; to build it, install a C++20 "
        "compiler and reinstall parallelkit (`parallelkit doctor` shows what is there).",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


@functools.cache
def load_cuda() -> tuple[Any | None, str]:
    """The CUDA extension; or None, and why it cannot be used here."""
    module, reason = _load("parallelkit._cuda")
    if module is None:
        return None, f"no CUDA extension: {reason}; reinstall parallelkit where nvcc is found"
    return (module, "") if module.device_count() else (None, str(module.unavailable()))


cpu: Any | None = _load_cpu()

# The numbers of csrc/dtypes.h.
DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of `dtype` are kept in: float32 for 16 bits, else itself."""
    return torch.promote_types(dtype, torch.float32)

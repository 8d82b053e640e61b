"""Who computes the linear layers: the Triton kernels or plain PyTorch."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from parallelkit.errors import InvalidArgumentError, InvalidTypeError, UsageError
from parallelkit.nn import torch_products

__all__ = ["HALVES", "LARGE_PRODUCT", "current_kernels", "run_product", "use_kernels"]

CHOICES = ("auto", "triton", "torch")
HALVES = (torch.float16, torch.bfloat16)

# From this many multiply-adds on (some 50 µs of an H200) starting a Triton kernel takes less time
# than the passes over memory that it saves. An estimate: not measured.
LARGE_PRODUCT = 2**34

# Of the process, not of the thread: autograd runs backward in threads of its own.
_choice: str | None = None


@contextmanager
def use_kernels(choice: str) -> Iterator[None]:
    """Choose who computes the linear layers called inside, their backward passes included.

    Args:
        choice: "auto", Triton on GPUs where it is expected to gain, plain PyTorch elsewhere;
            "triton", the kernels or an error (CPU tensors go through Triton's interpreter, which
            is slow and there for tests); "torch", plain PyTorch operators and their autograd.
            Outside of any such block the environment variable PARALLELKIT_KERNELS decides.
    Raises:
        InvalidArgumentError: choice is none of these.
    """
    global _choice
    previous, _choice = _choice, _checked(choice, "use_kernels: choice")
    try:
        yield
    finally:
        _choice = previous


def current_kernels() -> str:
    """The choice in force."""
    if _choice is not None:
        return _choice
    return _checked(os.environ.get("PARALLELKIT_KERNELS", "auto"), "PARALLELKIT_KERNELS")


def _checked(choice: str, name: str) -> str:
    if choice not in CHOICES:
        raise InvalidArgumentError(f"{name} must be one of {', '.join(CHOICES)}, got {choice!r}")
    return choice


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def run_product(kernels: str, name: str, pays: bool, *arguments: Any) -> Any:
    """One direction of the layer, by `parallelkit.kernels.linear` or by `torch_products`.

    Args:
        kernels: the choice.
        name: of the function; both modules have it, with the same arguments.
        pays: whether Triton is expected to gain if the matrices are aligned.
        arguments: first the two matrices whose product it is, or that it goes through.
    """
    function = getattr(torch_products, name)
    a, b = arguments[:2]
    if a.numel() > 0 and b.numel() > 0:  # else there is nothing to launch
        if kernels == "triton":
            function = getattr(_kernels(a), name)
        elif kernels == "auto" and a.is_cuda and a.dtype in HALVES and _has_triton():
            candidates = {"torch": function, "triton": getattr(_kernels(a), name)}
            function = candidates[_faster(name, candidates, pays, arguments)]
    if torch.is_autocast_enabled(a.device.type):  # its casts are the caller's; none in here
        with torch.autocast(a.device.type, enabled=False):
            return function(*arguments)
    return function(*arguments)


def _kernels(x: torch.Tensor) -> Any:
    """The module of the Triton kernels, if they can compute with tensors like x."""
    if not _has_triton():
        raise UsageError(
            'use_kernels("triton"): Triton is not installed; install it or use "auto" or "torch"'
        )
    from parallelkit.kernels import launch, linear

    if x.dtype not in (*HALVES, torch.float32):
        raise InvalidTypeError(
            f'use_kernels("triton"): the kernels take float16, bfloat16 and float32, got '
            f'{x.dtype}; use "auto" or "torch"'
        )
    if x.device.type == "cpu" and x.dtype == torch.bfloat16 and not launch.interpreter_knows_bf16():
        raise InvalidTypeError(
            'use_kernels("triton"): Triton\'s interpreter computes bfloat16 wrongly on the CPU; '
            'use float32 or float16 there, or "auto"'
        )
    return linear


def _faster(
    name: str, candidates: dict[str, Callable[..., Any]], pays: bool, arguments: tuple[Any, ...]
) -> str:
    """Which candidate is taken: the faster one if measuring is asked for, else a guess."""
    from parallelkit.kernels import tune
    from parallelkit.kernels.tiles import describable

    a, b = arguments[:2]
    if not tune.enabled(a.device):
        aligned = all(describable(t) or describable(t.T) for t in (a, b))
        return "triton" if pays and aligned else "torch"
    if name in ("add_weight_gradient", "partial_sum"):  # trials must not write where it counts
        arguments = a, b, *(torch.empty_like(t) if t is not None else t for t in arguments[2:])
    given = ["tensor" if isinstance(t, torch.Tensor) else t for t in arguments[2:]]
    key = f"{name} {tune.bucket(*a.shape, *b.shape)} {a.dtype} {given}"
    trials = {kind: partial(function, *arguments) for kind, function in candidates.items()}
    return tune.fastest(key, trials, a.device)

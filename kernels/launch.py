"""Starting a kernel: compiled on a GPU, interpreted for CPU tensors."""

import contextvars
import functools
import types
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


def run(kernel: Any, programs: int, device: torch.device, **arguments: Any) -> None:
    """Start `programs` programs of a `triton.jit` kernel on a device, all arguments by keyword."""
    if device.type == "cpu":
        interpreted(kernel)[(programs,)](**arguments)
        return
    # The allocator of descriptors' scratch memory is a context variable of Triton's: set in a
    # context of our own, it leaves the one that the program may have set alone.
    with torch.cuda.device(device):
        contextvars.copy_context().run(_run_compiled, kernel, programs, device, arguments)


def _run_compiled(
    kernel: Any, programs: int, device: torch.device, arguments: dict[str, Any]
) -> None:
    def scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    triton.set_allocator(scratch)
    kernel[(programs,)](**arguments)


@functools.cache
def interpreted(kernel: Any) -> Any:
    """The same kernel, and every kernel function it calls, for Triton's interpreter.

    TRITON_INTERPRET=1 would decide for the whole process, before the first import; this way CPU
    tensors can be interpreted beside GPU tensors.
    """
    if not isinstance(kernel, JITFunction):
        return kernel  # TRITON_INTERPRET=1: already interpreted
    function = kernel.fn
    scope = dict(function.__globals__)
    for name in function.__code__.co_names:
        if isinstance(scope.get(name), JITFunction):
            scope[name] = interpreted(scope[name])
    twin = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    twin.__annotations__ = function.__annotations__
    twin.__module__, twin.__qualname__ = function.__module__, function.__qualname__
    return InterpretedFunction(twin)


@triton.jit
def _add_kernel(x, out):
    tl.store(out, tl.load(x) + tl.load(x))


@functools.cache
def interpreter_knows_bf16() -> bool:
    """Whether the interpreter computes in bf16: Triton 3.6 to 3.9 work on the bit patterns."""
    x = torch.tensor([1.5], dtype=torch.bfloat16)
    out = torch.empty_like(x)
    run(_add_kernel, 1, x.device, x=x, out=out)
    return out.item() == 3.0

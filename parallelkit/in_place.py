"""Backward passes in which layers add weight gradients straight to what `.grad` holds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["gradient_buffer", "gradients_in_place"]

# The passes that run, each with the stream of whoever began it. Of the process, not of the thread:
# autograd runs backward in threads of its own, and several ranks may be threads of one process.
_lock = threading.Lock()
_passes: list[torch.cuda.Stream | None] = []


@contextmanager
def gradients_in_place() -> Iterator[None]:
    """Let backward passes inside add dW and db straight to what `.grad` holds, with no temporary.

    For a caller of `loss.backward()` that has attached gradient buffers (float32, or the operands'
    dtype). Not around torch.autograd.grad: it would find no gradients and `.grad` changed. Hooks
    after accumulation run as always; a parameter with tensor hooks keeps the ordinary way.
    """
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    with _lock:
        _passes.append(stream)
    try:
        yield
    finally:
        with _lock:
            _passes.remove(stream)


def gradient_buffer(parameter: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A parameter's gradient buffer, where operands of `dtype` may be added to it now."""
    if not _passes or torch.is_grad_enabled():
        return None
    if parameter is None or not parameter.is_leaf or parameter._backward_hooks:
        return None
    grad = parameter.grad
    if grad is None or grad.layout != torch.strided or grad.dtype not in (torch.float32, dtype):
        return None
    # Autograd waits for the streams of gradients that it is given, and for no others.
    if grad.is_cuda and torch.cuda.current_stream(grad.device) not in _passes:
        return None
    return grad

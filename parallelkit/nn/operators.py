"""Python functions as PyTorch operators: opaque to torch.compile, which keeps its graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Operators"]


class Operators:
    """A namespace of operators, alike on CPUs and GPUs.

    Made of `define` and `impl`, not of torch.library.custom_op: a tenth of the cost per call.

    Args:
        namespace: in torch.ops, of this object alone.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._library = torch.library.Library(namespace, "DEF")

    def define(self, schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
        """Register an operator and return it.

        Args:
            schema: name, arguments and results, as torch.library has them.
            run: what it does.
            shapes: gives empty results of the right shapes, for tracing.
        """
        name = schema.partition("(")[0]
        self._library.define(schema)
        for device in ("CPU", "CUDA"):
            self._library.impl(name, run, device)
        torch.library.register_fake(f"{self._namespace}::{name}", shapes, lib=self._library)
        return getattr(getattr(torch.ops, self._namespace), name).default

    def set_gradient(self, operator: Any, save: Any, backward: Any) -> None:
        """Give an operator its derivative: save(ctx, inputs, output), backward(ctx, *gradients)."""
        name = operator.name().partition(".")[0]
        torch.library.register_autograd(name, backward, setup_context=save, lib=self._library)

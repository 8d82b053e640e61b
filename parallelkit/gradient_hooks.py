"""Who is told of a parameter's gradients: whoever asked last, for as long as that lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping
from functools import partial

import torch
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["GradientHooks"]

Receive = Callable[[torch.Tensor], None]

_current: MutableMapping[torch.Tensor, GradientHooks] = WeakTensorKeyDictionary()


class GradientHooks:
    """Calls a method with each of the parameters whose gradient autograd has written.

    Attributes:
        retired: others have asked for some of the parameters since, and these hooks are gone.

    Args:
        parameters: trainable or frozen, which may thaw; integers have no gradients.
        receive: the method; its object is not kept alive, and the hooks end with it.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], receive: Receive) -> None:
        self.retired = False
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        hook = partial(_tell, weakref.WeakMethod(receive, self._remove))
        for parameter in parameters:
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            if before := _current.get(parameter):
                before.retired = True
                before._remove()
            _current[parameter] = self
            trainable = parameter.requires_grad
            parameter.requires_grad_(True)  # a frozen one takes no hook
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
            parameter.requires_grad_(trainable)

    def _remove(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


def _tell(receive: weakref.WeakMethod[Receive], parameter: torch.Tensor) -> None:
    """The hook of a parameter, which may outlive whoever is told."""
    method = receive()
    if method is not None:
        method(parameter)

"""Who is told of a parameter's gradients: whoever asked last, for as long as that lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping
from functools import partial
from typing import TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["GradientHooks"]

Owner = TypeVar("Owner")

_current: MutableMapping[torch.Tensor, GradientHooks] = WeakTensorKeyDictionary()


class GradientHooks:
    """Calls a method of an object with each parameter whose gradient autograd has written.

    Attributes:
        retired: others have asked for some of the parameters since, and these hooks are gone.

    Args:
        parameters: trainable or frozen, which may thaw; integers have no gradients.
        owner: the object, which is not kept alive; the hooks end with it.
        receive: its method, as a function of the object and the parameter.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        owner: Owner,
        receive: Callable[[Owner, torch.Tensor], None],
    ) -> None:
        self.retired = False
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        # A WeakMethod would print an error where both ends go together, as when a program ends.
        hook = partial(_tell, weakref.ref(owner, self._remove), receive)
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


def _tell(
    owner: weakref.ref[Owner],
    receive: Callable[[Owner, torch.Tensor], None],
    parameter: torch.Tensor,
) -> None:
    """The hook of a parameter, which may outlive whoever is told."""
    told = owner()
    if told is not None:
        receive(told, parameter)

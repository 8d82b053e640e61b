"""Between a split model and the unsplit one: weights and gradients, gathered and cut again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from parallelkit.errors import InvalidArgumentError, InvalidTypeError
from parallelkit.nn.split import split_of
from parallelkit.together import together

__all__ = ["gather_gradients", "gather_state_dict", "load_full_state_dict"]

Tensor = torch.Tensor


def gather_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the unsplit model, on every rank; collective.

    For a Hugging Face model: every rank calls this, and one of them
    `model.save_pretrained(path, state_dict=dict(state))` with what it gave.
    """
    state: dict[str, Tensor] = {}
    gathered: dict[int, Tensor] = {}  # tied tensors stay one
    for name, tensor in model.state_dict(keep_vars=True).items():
        split = split_of(tensor)
        if id(tensor) not in gathered:
            whole = split.gather(tensor) if split else tensor.detach().clone()
            gathered[id(tensor)] = whole
        state[name] = gathered[id(tensor)]
    return state


def gather_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The unsplit model's gradients by parameter name, on every rank; collective.

    Parameters without a gradient on any rank are left out.
    """
    gradients: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        split, grad = split_of(parameter), parameter.grad
        if split is not None:
            if not any(split.group._gather_objects(grad is not None, "gather_gradients", name)):
                continue
            gradients[name] = split.gather(torch.zeros_like(parameter) if grad is None else grad)
        elif grad is not None:
            gradients[name] = grad.detach().clone()
    return gradients


def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Load the unsplit model's state dict into a split model: each rank takes its part. Collective.

    Args:
        model: split by `tensor_parallel`.
        state_dict: of the unsplit model, equal on every rank; may be memory-mapped.
    Raises:
        InvalidArgumentError: missing or unexpected names, or shapes that do not fit, on any rank;
            nothing was loaded.
    """
    state = model.state_dict(keep_vars=True)
    group = next((split.group for t in state.values() if (split := split_of(t))), None)
    if group is None:
        _check_fit(state, state_dict)
    else:
        together(group, lambda: _check_fit(state, state_dict), "load_full_state_dict")
    with torch.no_grad():
        for name, value in state_dict.items():
            split = split_of(state[name])
            state[name].copy_(value if split is None else split.take(value))


def _check_fit(state: Mapping[str, Tensor], state_dict: Mapping[str, Tensor]) -> None:
    """Raise unless the unsplit model's dict has what the split model's state wants."""
    if not isinstance(state_dict, Mapping):
        raise InvalidTypeError(
            f"load_full_state_dict: state_dict must be a dict, got {type(state_dict).__name__}"
        )
    missing, unexpected = state.keys() - state_dict.keys(), state_dict.keys() - state.keys()
    given = {id(state[name]) for name in state_dict.keys() & state.keys()}
    missing = {name for name in missing if id(state[name]) not in given}  # ties need one name
    if missing or unexpected:
        raise InvalidArgumentError(
            f"load_full_state_dict: missing {sorted(missing)}, unexpected {sorted(unexpected)}; "
            "nothing was loaded"
        )
    for name, value in state_dict.items():
        split, mine = split_of(state[name]), state[name]
        shape = mine.shape if split is None else split.whole_shape(mine)
        if value.shape != shape:
            raise InvalidArgumentError(
                f"load_full_state_dict: {name} must be {list(shape)}, got {list(value.shape)}; "
                "nothing was loaded"
            )

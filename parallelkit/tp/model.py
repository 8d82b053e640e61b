"""Whole models split over the ranks of a group.

`tensor_parallel` reads a plan, makes sure that every rank read the same one from the same model,
and only then replaces modules by those of parallelkit.nn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelkit.errors import InvalidArgumentError
from parallelkit.group import Group, default_group
from parallelkit.nn import (
    ColumnParallelLinear,
    FeatureParallelEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    sum_gradients,
)
from parallelkit.nn.functional import copy_to_group
from parallelkit.nn.shared_input import SharedInput
from parallelkit.together import together
from parallelkit.tp.plans import COLUMN, EMBEDDING, ROW, Planned, is_attention, is_conv1d, resolve
from parallelkit.tp.regions import check_sequence_parallel, mark_regions, stack_of

__all__ = ["tensor_parallel"]

Tensor = torch.Tensor
Model = TypeVar("Model", bound=nn.Module)

# What attention modules keep about all heads that their code applies to the projections' outputs.
_COUNTS = ("num_heads", "num_attention_heads", "split_size", "all_head_size")


def tensor_parallel(
    model: Model,
    group: Group | DeviceMesh | None = None,
    plan: str | Mapping[str, str] = "auto",
    sequence_parallel: bool = False,
) -> Model:
    """Split a model's linear layers and embeddings over a group, in place; collective.

    Args:
        model: the same on every rank: the modules named by the plan are nn.Linear, nn.Embedding or
            transformers' Conv1D.
        group: a Group or one-dimensional DeviceMesh. Default: all ranks.
        plan: names of modules (`*` for one component) to styles: "colwise", "rowwise",
            "colwise_gather_output", "rowwise_split_input", "packed_colwise", "packed_rowwise",
            "embedding_rowwise", "embedding_colwise", "replicate",
            "replicated_with_grad_allreduce", "mla_kv_a_proj". "auto" takes the plan of a Hugging
            Face model, or the one this package has for GPT-2, BERT and OPT.
        sequence_parallel: activations between the pairs of split layers are shards along dimension
            -2. A Hugging Face model still takes whole token ids and gives whole logits; another
            module takes and gives shards.
    Returns:
        The model. Every gradient is complete after `backward`, no further sums are needed.
    Raises:
        InvalidArgumentError: a plan this model or group size cannot follow (unknown names or
            styles, heads that do not divide), or models or plans that differ between ranks; on
            every rank, as is the next, with nothing changed.
        InvalidTypeError: what is no model, or no plan. A group that is none is refused on its rank:
            it cannot tell the others.
    """
    group = default_group(group)
    planned = _agree(group, model, plan, sequence_parallel)
    _replace(model, group, planned, sequence_parallel)
    mark_regions(model, group, planned, sequence_parallel)
    return model


def _agree(
    group: Group, model: nn.Module, plan: str | Mapping[str, str], sequence_parallel: bool
) -> list[Planned]:
    """What is planned, the same on every rank; or the same error, with nothing changed."""

    def describe() -> tuple[bool, list[Planned], dict[str, tuple[object, ...]]]:
        planned = resolve(model, plan, group.size)
        if sequence_parallel:
            check_sequence_parallel(model, planned)
        hashes = {name: _hash(tensor) for name, tensor in model.state_dict().items()}
        return sequence_parallel, planned, hashes

    told = together(group, describe, "tensor_parallel")
    sequence, planned, first = told[0]
    for rank, (theirs_sequence, theirs, values) in enumerate(told):
        pairs = zip_longest(
            (f"sequence_parallel={sequence}", *planned),
            (f"sequence_parallel={theirs_sequence}", *theirs),
        )
        odd = next((pair for pair in pairs if pair[0] != pair[1]), None)
        if odd is not None:
            raise InvalidArgumentError(
                f"tensor_parallel: ranks 0 and {rank} have different plans, {odd[0]} and {odd[1]}; "
                "give every rank the same. Nothing was changed"
            )
        differing = [name for name in first if values.get(name) != first[name]]
        if differing or values.keys() != first.keys():
            raise InvalidArgumentError(
                f"tensor_parallel: ranks 0 and {rank} have different models, beginning with "
                f"{(differing or ['their lists of parameters'])[0]}; seed alike or load the same "
                "checkpoint on every rank. Nothing was changed"
            )
    return planned


def _hash(tensor: Tensor) -> tuple[object, ...]:
    """Shape, dtype and the sum of all bits as integers: for telling models apart, cheaply."""
    same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
    value = 0
    if tensor.device.type != "meta" and tensor.numel() > 0:
        flat = tensor.detach().contiguous().view(-1)
        value = int(flat.view(same_size[tensor.element_size()]).sum(dtype=torch.int64))
    return tuple(tensor.shape), str(tensor.dtype), value


def _replace(
    model: nn.Module, group: Group, planned: list[Planned], sequence_parallel: bool
) -> None:
    """Put split modules in the places of whole ones."""
    modules = dict(model.named_modules(remove_duplicate=False))
    made: dict[int, nn.Parameter] = {}  # whole parameter -> its shard, so that ties stay
    whole: list[nn.Parameter] = []  # keeps the keys of `made` alive, and so unique
    siblings: dict[str, list[ColumnParallelLinear]] = {}
    stack = _inside_stack(model, planned)
    for each in planned:
        parent_name, _, child = each.name.rpartition(".")
        old, parent = modules[each.name], modules[parent_name]
        if each.style in (*COLUMN, *ROW, *EMBEDDING):
            new = _split(old, group, each, sequence_parallel and each.name in stack)
            for name, parameter in old._parameters.items():
                if parameter is not None:
                    whole.append(parameter)
                    shard = made.setdefault(id(parameter), new._parameters[name])  # type: ignore[arg-type]
                    new._parameters[name] = shard
            setattr(parent, child, new)
            if isinstance(new, ColumnParallelLinear):
                siblings.setdefault(parent_name, []).append(new)
        elif each.style == "replicated_with_grad_allreduce":
            sum_gradients(old.parameters(), group)
        elif each.style == "mla_kv_a_proj":
            config: Any = model.config
            old.register_forward_hook(_rotary_gradient(config.qk_rope_head_dim, group))
    for module in model.modules():  # containers that hold a split parameter too
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in made:
                module._parameters[name] = made[id(parameter)]
    for parent_name, layers in siblings.items():
        if len(layers) > 1 or sequence_parallel and is_attention(modules[parent_name]):
            shared = SharedInput(layers)
            for layer in layers:
                layer.shared_input = shared
        if is_attention(modules[parent_name]) and not any(c.gather_output for c in layers):
            copies = max(layer.copies for layer in layers)
            _count_own_heads(modules[parent_name], group.size, copies)


def _count_own_heads(attention: nn.Module, size: int, copies: int) -> None:
    """Let an attention module count this rank's heads, of which key-value ones have `copies`."""
    counts = dict.fromkeys(_COUNTS, size)
    counts |= {"num_key_value_heads": size // copies, "num_key_value_groups": copies}
    for name, parts in counts.items():
        count = getattr(attention, name, None)
        if isinstance(count, int):
            setattr(attention, name, count // parts)


def _inside_stack(model: nn.Module, planned: list[Planned]) -> set[str]:
    """The planned modules that sequence parallelism reaches: in a transformers model its layers."""
    stack = stack_of(model, planned)
    return {p.name for p in planned if stack is None or p.name.startswith(f"{stack}.")}


def _split(old: nn.Module, group: Group, each: Planned, sequence_parallel: bool) -> nn.Module:
    """A module's part for this rank."""
    if each.style in EMBEDDING:
        assert isinstance(old, nn.Embedding)
        kind = (
            VocabParallelEmbedding
            if each.style == "embedding_rowwise"
            else FeatureParallelEmbedding
        )
        return kind.from_embedding(old, group)
    weight = old.weight
    assert isinstance(weight, Tensor)
    outputs, inputs = weight.shape[::-1] if is_conv1d(old) else weight.shape
    arguments = (inputs, outputs, old.bias is not None)
    options: dict[str, Any] = {
        "group": group,
        "sequence_parallel": sequence_parallel,
        "device": "meta",
    }
    new: ColumnParallelLinear | RowParallelLinear
    if each.style in COLUMN:
        options["gather_output"] = each.style == "colwise_gather_output"
        new = ColumnParallelLinear(*arguments, **options)
    else:
        options["input_is_parallel"] = each.style != "rowwise_split_input"
        new = RowParallelLinear(*arguments, **options)
    new._take(old, is_conv1d(old), each.blocks, each.copies)
    return new


def _rotary_gradient(rotary: int, group: Group) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    """Latent attention's rotary part goes to the split heads without a column layer on the way."""

    def hook(module: nn.Module, args: Any, y: Tensor) -> Tensor:
        latent, rotated = y.split([y.shape[-1] - rotary, rotary], dim=-1)
        return torch.cat([latent, copy_to_group(rotated, group)], dim=-1)

    return hook

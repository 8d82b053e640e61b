"""What happens around split layers: where activations are sharded, and which random numbers differ.

    whole tokens → scatter → [ layer: norm → gather → attention → reduce-scatter → ... ] → gather

With sequence parallelism the stack of a Hugging Face model's layers works on shards of the
sequence. Attention modules shape their outputs by their inputs, so the gather happens at their
entrance, not in their projections.

Dropout between a column and a row layer acts on split activations, and must differ by rank; after
the row layer it acts on replicated ones, and must not. Inside a sequence-parallel stack it acts on
shards everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from parallelkit.errors import InvalidArgumentError
from parallelkit.group import Group
from parallelkit.nn import ColumnParallelLinear, RowParallelLinear, sum_gradients
from parallelkit.nn.functional import gather_from_group, scatter_to_group
from parallelkit.nn.random import SplitRandom
from parallelkit.nn.split import split_of
from parallelkit.tp.plans import COLUMN, ROW, Planned, is_attention

__all__ = ["check_sequence_parallel", "mark_regions", "stack_of"]

Tensor = torch.Tensor


def stack_of(model: nn.Module, planned: list[Planned]) -> str | None:
    """The name of a Hugging Face model's list of layers; None for another module."""
    if not hasattr(getattr(model, "config", None), "model_type"):
        return None
    lists = [name for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    linear = [p.name for p in planned if p.style in (*COLUMN, *ROW)]
    used = [name for name in lists if any(each.startswith(f"{name}.") for each in linear)]
    return used[0] if len(used) == 1 else ""


def check_sequence_parallel(model: nn.Module, planned: list[Planned]) -> None:
    """Raise unless the activations between a model's split layers can be shards."""
    stack = stack_of(model, planned)
    config = getattr(model, "config", None)
    crosses = any(
        getattr(config, name, False) for name in ("is_encoder_decoder", "add_cross_attention")
    )
    if stack == "" or crosses:
        raise InvalidArgumentError(
            "tensor_parallel: sequence_parallel needs a model with one stack of layers and no "
            f"cross-attention, which {type(model).__name__} is not"
        )
    modules = dict(model.named_modules())
    names = {p.name for p in planned}
    for each in planned:
        inside = stack is None or each.name.startswith(f"{stack}.")
        good = ("colwise", "packed_colwise", "rowwise", "packed_rowwise")
        if inside and each.style not in (*good, "replicated_with_grad_allreduce", "replicate"):
            raise InvalidArgumentError(
                f"tensor_parallel: {each.name!r} has style {each.style!r}, which does not work on "
                "shards of a sequence; pass sequence_parallel=False"
            )
        parent = modules[each.name.rpartition(".")[0]]
        if each.style in COLUMN and is_attention(parent):
            for child, module in parent.named_children():
                name = f"{each.name.rpartition('.')[0]}.{child}"
                if isinstance(module, nn.Linear) and name not in names:
                    raise InvalidArgumentError(
                        f"tensor_parallel: sequence_parallel needs every projection of attention "
                        f"in the plan; {name!r} is not"
                    )


def mark_regions(
    model: nn.Module, group: Group, planned: list[Planned], sequence_parallel: bool
) -> None:
    """Install the hooks that the header of this file describes."""
    attentions = [
        module
        for module in model.modules()
        if is_attention(module) and any(_splits(child) for child in module.children())
    ]
    if not sequence_parallel:
        for module in attentions:
            _differ_between(module, group)
        return
    stack = stack_of(model, planned)
    layers = model if stack is None else model.get_submodule(stack)
    for module in attentions:
        _gather_at_entrance(module)
    finished = {
        id(module.bias) for module in layers.modules() if isinstance(module, RowParallelLinear)
    }
    sum_gradients(
        (p for p in layers.parameters() if split_of(p) is None and id(p) not in finished), group
    )
    if isinstance(layers, nn.ModuleList) and stack is not None:
        _shard_between(layers, group)


def _splits(module: nn.Module) -> bool:
    return isinstance(module, ColumnParallelLinear) and not module.gather_output


def _with_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the hidden states changed: the first, or the one of that name."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}


def _gather_at_entrance(attention: nn.Module) -> None:
    """Give an attention module the whole sequence; its projections find it gathered."""
    column = next(child for child in attention.children() if _splits(child))
    assert isinstance(column, ColumnParallelLinear)
    shared = column.shared_input
    assert shared is not None
    shared.early = True

    def entered(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return column.enter(x)
        return shared.enter(x).x

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _with_first(args, kwargs, entered)

    attention.register_forward_pre_hook(enter, with_kwargs=True)


def _shard_between(layers: nn.ModuleList, group: Group) -> None:
    """Cut the sequence before the first layer, put it together after the last."""
    random = SplitRandom(group)
    tokens = 0  # of the sequence that is inside

    def cut(x: Tensor) -> Tensor:
        nonlocal tokens
        tokens = x.shape[-2]
        return scatter_to_group(x, group, -2)

    def scatter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        result = _with_first(args, kwargs, cut)
        if module.training and _drops(layers):
            random.begin()
        return result

    def gather(module: nn.Module, args: Any, y: Any) -> Any:
        random.end()
        if isinstance(y, tuple):
            return (gather_from_group(y[0], group, -2, length=tokens), *y[1:])
        return gather_from_group(y, group, -2, length=tokens)

    layers[0].register_forward_pre_hook(scatter, with_kwargs=True)
    layers[-1].register_forward_hook(gather)


def _differ_between(attention: nn.Module, group: Group) -> None:
    """Random numbers of each rank's own from an attention module's entrance to its row layer."""
    random = SplitRandom(group)

    def begin(module: nn.Module, args: Any) -> None:
        if module.training and _drops(module):
            random.begin()

    def end(*arguments: Any) -> None:
        random.end()

    attention.register_forward_pre_hook(begin)
    attention.register_forward_hook(end, always_call=True)
    for child in attention.children():
        if isinstance(child, RowParallelLinear):
            child.register_forward_pre_hook(end)


def _drops(module: nn.Module) -> bool:
    """Whether there is dropout anywhere in it: a module, or a rate that functions are given."""
    for each in module.modules():
        if isinstance(each, nn.Dropout) and each.p > 0:
            return True
        if any(isinstance(v, float) and v > 0 for k, v in vars(each).items() if "drop" in k):
            return True
    return False

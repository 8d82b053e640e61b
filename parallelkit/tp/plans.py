"""Which module of a model is split how: plans, their styles, and whether a model can follow one.

A plan maps names of modules to styles; `*` in a name stands for one component, such as a layer's
number. The styles' names are those of Hugging Face transformers; the number of blocks in a fused
projection may follow, "packed_colwise:3" for [q | k | v], and is 2 where it does not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from parallelkit.errors import InvalidArgumentError, InvalidTypeError

__all__ = ["COLUMN", "EMBEDDING", "ROW", "Planned", "is_attention", "is_conv1d", "resolve"]

COLUMN = ("colwise", "packed_colwise", "colwise_gather_output")
ROW = ("rowwise", "packed_rowwise", "rowwise_split_input")
EMBEDDING = ("embedding_rowwise", "embedding_colwise")
OTHER = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj")
STYLES = (*COLUMN, *ROW, *EMBEDDING, *OTHER)
_OLD_NAMES = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "rep": "replicate",
}
# torch.distributed.tensor.parallel's use of the same words.
_ON_EMBEDDINGS = {"rowwise": "embedding_rowwise", "colwise": "embedding_colwise"}

# For models whose configuration carries none; names begin inside the base model.
_BLOCKS = {
    "gpt2": {
        "h.*.attn.c_attn": "packed_colwise:3",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
        "wte": "embedding_rowwise",
    },
    "bert": {
        "encoder.layer.*.attention.self.query": "colwise",
        "encoder.layer.*.attention.self.key": "colwise",
        "encoder.layer.*.attention.self.value": "colwise",
        "encoder.layer.*.attention.output.dense": "rowwise",
        "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
        "embeddings.word_embeddings": "embedding_rowwise",
    },
    "opt": {
        "decoder.layers.*.self_attn.q_proj": "colwise",
        "decoder.layers.*.self_attn.k_proj": "colwise",
        "decoder.layers.*.self_attn.v_proj": "colwise",
        "decoder.layers.*.self_attn.out_proj": "rowwise",
        "decoder.layers.*.fc1": "colwise",
        "decoder.layers.*.fc2": "rowwise",
        "decoder.embed_tokens": "embedding_rowwise",
    },
}
_HEADS = {"gpt2": "lm_head", "bert": "cls.predictions.decoder", "opt": "lm_head"}


@dataclass(frozen=True)
class Planned:
    """One module and how it is split."""

    name: str
    style: str
    blocks: int = 1  # of a fused projection
    copies: int = 1  # neighbouring ranks that have the same part


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D: a linear layer whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_attention(module: nn.Module) -> bool:
    """Whether its projections are cut into heads: by the name of its class, as everybody does."""
    return "Attention" in type(module).__name__


def resolve(model: nn.Module, plan: str | Mapping[str, str], size: int) -> list[Planned]:
    """The modules to split over `size` ranks, in the model's order.

    Raises:
        InvalidArgumentError: no plan, an unknown style or name, or what cannot be split so.
        InvalidTypeError: what is no model, or no plan.
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(
            f"tensor_parallel: model must be a torch.nn.Module, got {type(model).__name__}"
        )
    entries, automatic = _entries(model, plan)
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, str] = {}
    blocks: dict[str, int] = {}
    for pattern, given in entries.items():
        style, _, count = given.partition(":")
        style = _OLD_NAMES.get(style, style)
        expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        names = [name for name in modules if expression.fullmatch(name)]
        if style not in STYLES or count and not (count.isdecimal() and "packed" in style):
            if names or any(expression.fullmatch(name) for name in parameters):
                raise InvalidArgumentError(
                    f"tensor_parallel: {pattern!r} has style {given!r}, which is not supported "
                    f"(mixture-of-experts styles are not); known are {', '.join(STYLES)}"
                )
            continue  # for a part that this model does not have
        if not names and not automatic:
            raise InvalidArgumentError(
                f"tensor_parallel: the plan's {pattern!r} matches no module of "
                f"{type(model).__name__}; its modules are {_some(list(modules))}"
            )
        for name in names:
            if isinstance(modules[name], nn.Embedding):
                style = _ON_EMBEDDINGS.get(style, style)
            if count:
                blocks[name] = int(count)
            if found.setdefault(name, style) != style:
                raise InvalidArgumentError(
                    f"tensor_parallel: the plan has both {found[name]!r} and {style!r} for {name!r}"
                )
    _complete_ties(modules, found, automatic)
    if not any(style in (*COLUMN, *ROW, *EMBEDDING) for style in found.values()):
        raise InvalidArgumentError(
            f"tensor_parallel: the plan splits nothing of {type(model).__name__}"
        )
    config = getattr(model, "config", None)
    planned = []
    for name in modules:
        if name in found:
            each = Planned(name, found[name], blocks.get(name, 2) if "packed" in found[name] else 1)
            _check(each, modules, config, size)
            planned.append(replace(each, copies=_copies(each, modules, config, size)))
    return planned


def _entries(model: nn.Module, plan: str | Mapping[str, str]) -> tuple[dict[str, str], bool]:
    """A plan's patterns, from the top of the model, and whether they were found here."""
    if isinstance(plan, Mapping):
        for name, style in plan.items():
            if not (isinstance(name, str) and isinstance(style, str)):
                raise InvalidTypeError(
                    "tensor_parallel: plan must map names of modules to names of styles, got "
                    f"{name!r}: {style!r}"
                )
        return dict(plan), False
    if not isinstance(plan, str) or plan != "auto":
        raise InvalidArgumentError(
            f'tensor_parallel: plan must be "auto" or a mapping of names to styles, got {plan!r}'
        )
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", "")
    base = getattr(model, "base_model_prefix", "")
    prefix = f"{base}." if base and hasattr(model, base) else ""
    own = dict(getattr(model, "_tp_plan", None) or {})
    inside = getattr(config, "base_model_tp_plan", None) or _BLOCKS.get(kind, {})
    entries = {prefix + name: style for name, style in inside.items()} | own
    if kind in _HEADS and not own:
        entries[_HEADS[kind]] = "colwise_gather_output"
    if not entries:
        raise InvalidArgumentError(
            f"tensor_parallel: {type(model).__name__} carries no plan; pass one, such as "
            '{"layers.*.up": "colwise", "layers.*.down": "rowwise"}'
        )
    return entries, True


def _complete_ties(modules: dict[str, nn.Module], found: dict[str, str], automatic: bool) -> None:
    """Split every module that shares a split weight, or none of them."""
    owners: dict[int, list[str]] = {}
    for name, module in modules.items():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    for names in owners.values():
        planned = [n for n in names if found.get(n) in (*COLUMN, *ROW, *EMBEDDING)]
        others = [
            n for n in names
            if n not in planned and not any(p.startswith(f"{n}.") for p in planned)
        ]  # fmt: skip
        if not planned or len(set(names)) == 1:
            continue
        for name in others:
            style = None
            if _can_split_embedding(modules[name]):
                style = "embedding_rowwise"
            elif type(modules[name]) is nn.Linear:
                style = "colwise_gather_output"
            if style is not None and name not in found:
                found[name] = style
                planned.append(name)
            elif automatic:  # then nothing that shares the parameter is split
                for each in planned:
                    del found[each]
                planned = []
                break
            else:
                raise InvalidArgumentError(
                    f"tensor_parallel: {name!r} shares a parameter with {planned[0]!r} but cannot "
                    "be split with it; leave both out of the plan"
                )
        if len({_cut_dim(found[n]) for n in planned}) > 1:
            raise InvalidArgumentError(
                f"tensor_parallel: {' and '.join(map(repr, planned))} share a parameter, but the "
                "plan cuts it along different dimensions"
            )


def _cut_dim(style: str) -> int:
    """The dimension of a weight [out, in], or of a table [rows, features], that a style cuts."""
    return 0 if style in COLUMN or style == "embedding_rowwise" else 1


def _check(each: Planned, modules: dict[str, nn.Module], config: Any, size: int) -> None:
    """Raise unless this module can be split so over `size` ranks."""
    module, style = modules[each.name], each.style
    if style in OTHER:
        return
    where = f"tensor_parallel: {each.name!r} ({style})"
    if style in EMBEDDING:
        if not _can_split_embedding(module):
            raise InvalidArgumentError(
                f"{where} must be an nn.Embedding without max_norm, sparse or scale_grad_by_freq, "
                f"got {module}"
            )
        return
    if type(module) is not nn.Linear and not is_conv1d(module):
        raise InvalidArgumentError(
            f"{where} must be an nn.Linear, got {type(module).__name__}, "
            "whose own computation would be lost"
        )
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    outputs, inputs = weight.shape if not is_conv1d(module) else weight.shape[::-1]
    length = outputs if style in COLUMN else inputs
    if length % each.blocks:
        raise InvalidArgumentError(f"{where} cannot be {each.blocks} blocks of {length} features")
    parent = modules[each.name.rpartition(".")[0]]
    if is_attention(parent) and style in ("colwise", "packed_colwise"):
        for count in ("num_attention_heads", "num_key_value_heads"):
            heads = _heads(parent, config, count)
            if heads is None or heads % size == 0:
                continue
            if count == "num_attention_heads" or not _copies_of_heads(each, parent, config, size):
                raise InvalidArgumentError(
                    f"{where}: {heads} heads ({count}) cannot be split over {size} ranks; use a "
                    f"group whose size divides {heads}, or leave attention out of the plan"
                )


def _copies(each: Planned, modules: dict[str, nn.Module], config: Any, size: int) -> int:
    """How many neighbouring ranks get the same part of a module that passed `_check`."""
    parent = modules[each.name.rpartition(".")[0]]
    if each.style != "colwise" or not is_attention(parent):
        return 1
    copies, width = _copies_of_heads(each, parent, config, size), _head_width(parent, config)
    weight = modules[each.name].weight
    assert isinstance(weight, nn.Parameter)
    heads = _heads(parent, config, "num_key_value_heads")
    return copies if copies and heads and width and len(weight) == heads * width else 1


def _copies_of_heads(each: Planned, attention: nn.Module, config: Any, size: int) -> int | None:
    """How many ranks share each key-value head where those are fewer than ranks.

    None where there are not, they do not come out even, or the module does not let its count of
    query heads for each be changed.
    """
    heads = _heads(attention, config, "num_key_value_heads")
    if each.style != "colwise" or not heads or heads >= size or size % heads:
        return None
    known = hasattr(attention, "num_key_value_groups") and _head_width(attention, config)
    return size // heads if known else None


def _head_width(attention: nn.Module, config: Any) -> int | None:
    """Features of one head."""
    for holder in (attention, config):
        width = getattr(holder, "head_dim", None)
        if isinstance(width, int):
            return width
    heads = _heads(attention, config, "num_attention_heads")
    hidden = getattr(config, "hidden_size", None)
    return hidden // heads if heads and isinstance(hidden, int) else None


def _can_split_embedding(module: nn.Module) -> bool:
    """Whether it looks rows up as nn.Embedding does, whatever it does with them then."""
    if not isinstance(module, nn.Embedding):
        return False
    forward = type(module).forward
    looks_up = forward is nn.Embedding.forward or "super" in forward.__code__.co_names
    return looks_up and not (module.max_norm or module.sparse or module.scale_grad_by_freq)


def _heads(attention: nn.Module, config: Any, count: str) -> int | None:
    names = (count, "num_heads", "n_head") if count == "num_attention_heads" else (count,)
    for holder in (attention, config):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int):
                return value
    return None


def _some(names: list[str]) -> str:
    shown = [name for name in names if name][:12]
    return ", ".join(shown) + (", ..." if len(names) > 13 else "")

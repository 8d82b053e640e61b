"""Exact gradient averaging, a sharded optimizer step and split linear layers for PyTorch.

`import parallelkit as pk`; docs and examples: README.md. Names load when they are first used, so
that `parallelkit --help` starts without torch.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import checkpoint, nn, testing
    from .collectives import (
        Work,
        all_gather_flat,
        shard_bounds,
        weighted_all_reduce_,
        weighted_reduce_scatter,
    )
    from .data_parallel import DataParallel
    from .ddp_hook import ddp_comm_hook
    from .errors import (
        CollectiveMismatchError,
        CollectiveTimeoutError,
        ParallelKitError,
        PeerLostError,
        ReplicaMismatchError,
    )
    from .grad_scaler import GradScaler
    from .group import Group, init
    from .nn.kernel_choice import use_kernels
    from .optimizer import ShardedAdamW
    from .tp.model import tensor_parallel
    from .tp.state import gather_gradients, gather_state_dict, load_full_state_dict

try:
    __version__ = version("parallelkit")
except PackageNotFoundError:  # run from the sources, not installed
    __version__ = "0+unknown"

# Where each public name is defined; a module's own name stands for the module.
_HOMES = {
    "CollectiveMismatchError": "errors",
    "CollectiveTimeoutError": "errors",
    "DataParallel": "data_parallel",
    "GradScaler": "grad_scaler",
    "Group": "group",
    "ParallelKitError": "errors",
    "PeerLostError": "errors",
    "ReplicaMismatchError": "errors",
    "ShardedAdamW": "optimizer",
    "Work": "collectives",
    "all_gather_flat": "collectives",
    "checkpoint": "checkpoint",
    "ddp_comm_hook": "ddp_hook",
    "gather_gradients": "tp.state",
    "gather_state_dict": "tp.state",
    "init": "group",
    "load_full_state_dict": "tp.state",
    "nn": "nn",
    "shard_bounds": "collectives",
    "tensor_parallel": "tp.model",
    "testing": "testing",
    "use_kernels": "nn.kernel_choice",
    "weighted_all_reduce_": "collectives",
    "weighted_reduce_scatter": "collectives",
}

__all__ = [
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DataParallel",
    "GradScaler",
    "Group",
    "ParallelKitError",
    "PeerLostError",
    "ReplicaMismatchError",
    "ShardedAdamW",
    "Work",
    "__version__",
    "all_gather_flat",
    "checkpoint",
    "ddp_comm_hook",
    "gather_gradients",
    "gather_state_dict",
    "init",
    "load_full_state_dict",
    "nn",
    "shard_bounds",
    "tensor_parallel",
    "testing",
    "use_kernels",
    "weighted_all_reduce_",
    "weighted_reduce_scatter",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'parallelkit' has no attribute {name!r}")
    module = importlib.import_module(f".{home}", __name__)
    found = globals()[name] = module if home == name else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return __all__

"""Exact gradient averaging, a sharded optimizer step and split linear layers for PyTorch.

`import parallelkit as pk`; docs and examples: README.md. Names load when they are first used, so
that `parallelkit plan` and `parallelkit --help` start without torch.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import testing
    from .collectives import (
        Work,
        all_gather_flat,
        shard_bounds,
        weighted_all_reduce_,
        weighted_reduce_scatter,
    )
    from .errors import (
        CollectiveMismatchError,
        CollectiveTimeoutError,
        ParallelKitError,
        PeerLostError,
        ReplicaMismatchError,
    )
    from .group import Group, init

try:
    __version__ = version("parallelkit")
except PackageNotFoundError:  # run from the sources, not installed
    __version__ = "0+unknown"

# Where each public name is defined; a module's own name stands for the module.
_HOMES = {
    "CollectiveMismatchError": "errors",
    "CollectiveTimeoutError": "errors",
    "Group": "group",
    "ParallelKitError": "errors",
    "PeerLostError": "errors",
    "ReplicaMismatchError": "errors",
    "Work": "collectives",
    "all_gather_flat": "collectives",
    "init": "group",
    "shard_bounds": "collectives",
    "testing": "testing",
    "weighted_all_reduce_": "collectives",
    "weighted_reduce_scatter": "collectives",
}

__all__ = [
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "Group",
    "ParallelKitError",
    "PeerLostError",
    "ReplicaMismatchError",
    "Work",
    "__version__",
    "all_gather_flat",
    "init",
    "shard_bounds",
    "testing",
    "weighted_all_reduce_",
    "weighted_reduce_scatter",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'parallelkit' has no attribute {name!r}")
    module = importlib.import_module(f".{home}", __name__)
    return module if home == name else getattr(module, name)


def __dir__() -> list[str]:
    return __all__

"""The checkpoints of a run, from which it goes on exactly.

All three ways are in one checkpoint, written by the ranks that have them, together with what was
seen so far. The number of steps done is the position in the data, since batches are drawn from the
seed; nothing else in a run is random.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from .. import checkpoint
from ..checkpoint_files import opened
from ..errors import InvalidArgumentError
from ..group import Group
from ..optimizer import ShardedAdamW
from ..together import together
from .result import Result


def check_folders(save: Path | None, resume: Path | None) -> None:
    """Refuse folders that a run could not go on from, or would destroy."""
    same = save is not None and resume is not None and save.resolve() == resume.resolve()
    if resume is not None and not _has_checkpoint("--resume", resume) and not same:
        raise InvalidArgumentError(
            f"--resume {resume} must hold a checkpoint; name the folder that --save had, or give "
            "both the same folder to start afresh where it is empty"
        )
    if save is None:
        return
    if not same and _has_checkpoint("--save", save):
        raise InvalidArgumentError(
            f"--save {save} must not hold another run's checkpoint; add --resume {save} to go on "
            "from it, or name another folder"
        )
    try:
        save.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(
            f"--save {save} must be a folder to write in, got: {error.strerror}"
        ) from None


def _has_checkpoint(option: str, folder: Path) -> bool:
    try:
        return checkpoint.exists(folder)
    except checkpoint.CheckpointError as error:
        raise InvalidArgumentError(f"{option} {error}") from None


def settings_of(
    pieces: Sequence[bytes], batch: int, micro_batch: int, lr: float, seed: int
) -> dict[str, Any]:
    """What decides the numbers of a run, by option; of the text its hash."""
    text = hashlib.sha256(b"\0".join(pieces)).hexdigest()[:12]
    return {
        "--batch": batch,
        "--micro-batch": micro_batch,
        "--lr": lr,
        "--seed": seed,
        "--data": f"text of SHA-256 {text}...",  # last: the seed decides it, too
    }


class Checkpoints:
    """Saves a run and resumes it.

    Args:
        parts: the models that this rank has, by way.
        optimizer: of the parallel one.
        group: all ranks.
        settings: what decides the numbers of a run; one that goes on has the same.
    """

    def __init__(
        self,
        parts: Mapping[str, nn.Module],
        optimizer: ShardedAdamW,
        group: Group,
        settings: Mapping[str, Any],
    ) -> None:
        self._model, self._optimizer = nn.ModuleDict(dict(parts)), optimizer
        self._group, self._settings = group, dict(settings)

    def save(self, folder: Path, steps: int, result: Result) -> None:
        """Write all that the next step needs; collective."""
        extra = {"steps": steps, "settings": self._settings, "result": result.so_far()}
        checkpoint.save(folder, self._model, self._optimizer, extra=extra, group=self._group)

    def load(self, folder: Path, result: Result) -> int:
        """Read what was saved, if anything, by any number of ranks; the steps done. Collective.

        Raises:
            InvalidArgumentError: it is of a run with other settings. Nothing was changed.
        """
        if not together(self._group, lambda: checkpoint.exists(folder), "--resume")[0]:
            return 0
        notes = together(self._group, lambda: opened(folder)[1]["extra"], "--resume")[0]
        if not isinstance(notes, dict) or "settings" not in notes:
            raise InvalidArgumentError(
                f"--resume {folder} must hold a checkpoint of `parallelkit train`, got another's"
            )
        saved = notes["settings"]
        for name, value in self._settings.items():
            if saved.get(name) != value:
                raise InvalidArgumentError(
                    f"--resume {folder}: {name} must be as in the run that was saved, "
                    f"{saved.get(name)}, got {value}"
                )
        extra = checkpoint.load(folder, self._model, self._optimizer, group=self._group)
        result.go_on_from(extra["result"])
        steps: int = extra["steps"]
        return steps

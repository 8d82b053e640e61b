"""The demonstration itself: one model trained three ways on the same batches."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

import parallelkit as pk

from ..errors import InvalidArgumentError
from .checks import GradientChecker, digest
from .data import TEXT_BYTES, global_batches, micro_batches, read_pieces
from .model import HEADS, ByteGPT
from .one_process import mean_of_means, mean_over_tokens
from .result import WAYS, Result
from .saving import Checkpoints, check_folders, settings_of
from .ways import OneProcessRun, ParallelRun, split_ranks

CHECKS = 6  # steps whose gradients are compared, the first and the last among them


@dataclass(frozen=True)
class Options:
    """What the command line decides; its help says what each means."""

    data: Path | None
    steps: int
    batch: int
    micro_batch: int
    lr: float
    seed: int
    device: str | None
    out: Path
    save_every: int
    tp: int = 1
    save: Path | None = None
    resume: Path | None = None


class ThreeWays:
    """The model trained by all ranks, in one process, and by a plain mean."""

    def __init__(self, options: Options, group: pk.Group) -> None:
        self.options, self.group = options, group
        torch.manual_seed(options.seed)
        module = ByteGPT().to(group.device)
        # Each costs a whole batch a step, so two ranks share them.
        self.plain_rank = 1 % group.size
        self.single = OneProcessRun(module, options.lr) if group.rank == 0 else None
        self.plain = OneProcessRun(module, options.lr) if group.rank == self.plain_rank else None
        self.checker = GradientChecker(module, options.seed) if group.rank == 0 else None
        parameters = sum(p.numel() for p in module.parameters())
        self.data_group, tensor_group = split_ranks(group, options.tp)
        self.parallel = ParallelRun(module, self.data_group, tensor_group, options.lr)
        self.result = Result(
            size=group.size,
            transport=group.transport,
            parameters=parameters,
            gradient_bytes=sum(p.numel() * p.element_size() for p in module.parameters()),
            tp=options.tp,
        )

    def models(self) -> dict[str, nn.Module]:
        """Those that this rank has."""
        found = zip(WAYS, (self.parallel.model, self.single, self.plain), strict=True)
        return {way: model for way, model in found if model is not None}

    def step(self, step: int, batch: Sequence[bytes], check: bool) -> None:
        """Train on one global batch; collective.

        Args:
            check: hold the gradients against those of one process.
        """
        limit, device = self.options.micro_batch, self.group.device
        whole = micro_batches(batch, limit, device)
        data_ranks = self.data_group.size
        shares = [
            micro_batches(batch[rank::data_ranks], limit, device) for rank in range(data_ranks)
        ]
        result, losses = self.result, self.result.losses
        result.tokens.append([sum(b.tokens for b in share) for share in shares])

        self.group.barrier()  # what ranks did for comparison took them different times
        start = time.perf_counter()
        losses["parallel"].append(self.parallel.backward(shares[self.data_group.rank]))
        backward_end = time.perf_counter()
        if check:
            trained = self.parallel.whole()
            if self.checker is not None:
                result.checks.append(self.checker.check(trained, step, whole, shares))
        step_start = time.perf_counter()
        self.parallel.optimizer.step()
        result.seconds.append(time.perf_counter() - step_start + backward_end - start)

        if self.single is not None:
            losses["one process"].append(self.single.step(mean_over_tokens(whole)))
        if self.plain is not None:
            losses["plain mean"].append(self.plain.step(mean_of_means(shares)))

    def collect(self) -> Result:
        """The result, complete on rank 0; collective."""
        means = self.group._gather_objects(self.result.losses["plain mean"])
        self.result.losses["plain mean"] = means[self.plain_rank]
        return self.result


def train(options: Options, group: pk.Group) -> Result:
    """Train the three ways, comparing as it goes. The result is complete on rank 0 alone."""
    pieces = prepare_once(options, group)
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks_here))
    tqdm.set_lock(threading.RLock())  # its own would be one of multiprocessing, and leak

    def tell(what: str) -> None:
        if group.rank == 0:
            tqdm.write(what, file=sys.stdout)
            sys.stdout.flush()

    run = ThreeWays(options, group)
    settings = settings_of(pieces, options.batch, options.micro_batch, options.lr, options.seed)
    checkpoints = Checkpoints(run.models(), run.parallel.optimizer, group, settings)
    done = 0
    if options.resume is not None:
        done = checkpoints.load(options.resume, run.result)
        if done > options.steps:
            raise InvalidArgumentError(
                f"--steps must be at least the {done} that {options.resume} has done, got "
                f"{options.steps}"
            )
        found = f"going on after step {done} of {options.steps}" if done else "nothing saved yet"
        tell(f"{options.resume}: {found}")

    checked = {round(i * (options.steps - 1) / (CHECKS - 1)) for i in range(CHECKS)}
    batches = global_batches(pieces, options.batch, options.steps, options.seed)
    quiet = None if group.rank == 0 else True
    with tqdm(total=options.steps, initial=done, unit="step", disable=quiet) as bar:
        for step, batch in enumerate(itertools.islice(batches, done, None), done):
            run.step(step, batch, step in checked)
            bar.set_postfix_str(f"loss {run.result.losses['parallel'][-1]:.3f}", refresh=False)
            bar.update()
            now = step + 1
            if options.save and (now % options.save_every == 0 or now == options.steps):
                checkpoints.save(options.save, now, run.collect())
                tell(f"{options.save}: saved step {now} of {options.steps}")

    result = run.collect()
    result.digests = group._gather_objects(digest(run.parallel.whole()))
    return result


def prepare_once(options: Options, group: pk.Group) -> list[bytes]:
    """What rank 0 prepared, or its error, on every rank: files may differ from host to host."""
    outcome: list[bytes] | InvalidArgumentError | None = None
    if group.rank == 0:
        try:
            outcome = prepare(options, group.size)
        except InvalidArgumentError as error:
            outcome = error
    outcome = group._gather_objects(outcome)[0]
    if isinstance(outcome, InvalidArgumentError):
        raise outcome
    assert outcome is not None
    return outcome


def prepare(options: Options, size: int) -> list[bytes]:
    """Make the folder for the results and read enough pieces of text for size ranks."""
    if size % options.tp or HEADS % options.tp:
        raise InvalidArgumentError(
            f"--tp must divide the {size} ranks and the model's {HEADS} attention heads, "
            f"got {options.tp}"
        )
    size //= options.tp  # what shares a batch
    if options.batch < size:
        raise InvalidArgumentError(
            f"--batch must give each of the {size} ranks a piece of text, got "
            f"{options.batch}; take --batch {size} or more, or fewer ranks"
        )
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(
            f"--out {options.out} must be a folder to write in, got: {error.strerror}"
        ) from None
    check_folders(options.save, options.resume)
    pieces = read_pieces(options.data, enough=TEXT_BYTES, seed=options.seed)
    if len(pieces) < size:
        raise InvalidArgumentError(
            f"--data {options.data} must hold a paragraph for each of the {size} ranks, "
            f"got {len(pieces)}; give more text, or fewer ranks"
        )
    return pieces

"""The demonstration itself: one model trained three ways on the same batches.

The ways, and their names in the results:
    parallel     all ranks, through parallelkit
    one process  plain PyTorch on the whole batch
    plain mean   plain PyTorch, the means of the ranks' micro-batches averaged without weights
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

import parallelkit as pk

from ..errors import InvalidArgumentError
from .checks import GradientCheck, GradientChecker, digest
from .data import CONTEXT, MicroBatch, global_batches, micro_batches, read_pieces
from .model import HEADS, PLAN, ByteGPT
from .one_process import Weighted, backward, mean_of_means, mean_over_tokens

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
    tp: int = 1


@dataclass
class Result:
    """What a run showed; the lists have an entry for each step, or say what else."""

    size: int
    transport: str
    parameters: int
    gradient_bytes: int  # of a rank
    tp: int = 1  # ranks that hold one model together
    losses: dict[str, list[float]] = field(default_factory=dict)  # of each way, over all tokens
    tokens: list[list[int]] = field(default_factory=list)  # of each data-parallel rank
    seconds: list[float] = field(default_factory=list)  # of the parallel run
    checks: list[GradientCheck] = field(default_factory=list)  # for each step compared
    digests: list[str] = field(default_factory=list)  # for each rank, of its parameters at the end

    @property
    def gradients_ok(self) -> bool:
        """Whether every gradient lay within its bound at every step compared."""
        return all(check.ok for check in self.checks)

    @property
    def replicas_ok(self) -> bool:
        """Whether all ranks ended with the same bits."""
        return len(set(self.digests)) == 1

    @property
    def ok(self) -> bool:
        """Whether all checks passed."""
        return self.gradients_ok and self.replicas_ok

    @property
    def tokens_per_second(self) -> float:
        """Speed of the parallel run; the first step, which warms up, counts only if alone."""
        start = min(1, len(self.seconds) - 1)
        return sum(map(sum, self.tokens[start:])) / sum(self.seconds[start:])

    @property
    def bytes_per_step(self) -> float:
        """What a rank sends in a step: its gradients by reduce-scatter, then by all-gather."""
        data_ranks = self.size // self.tp
        return 2 * (data_ranks - 1) / data_ranks * self.gradient_bytes


class ParallelRun:
    """Training by all ranks, through parallelkit.

    Args:
        module: whole; split in place over `tensor_group`, if there is one.
        group: ranks with different parts of a batch.
    """

    def __init__(
        self, module: nn.Module, group: pk.Group, tensor_group: pk.Group | None, lr: float
    ) -> None:
        self.group = group
        self._whole = copy.deepcopy(module)
        if tensor_group is not None:
            pk.tensor_parallel(module, tensor_group, PLAN)
        self.model = pk.DataParallel(module, group)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def backward(self, share: Sequence[MicroBatch]) -> float:
        """Set the gradients of the global batch, this rank having a share; return its loss."""
        self.optimizer.zero_grad()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.group.device)
        for index, batch in enumerate(share, 1):
            loss = self.model(batch.inputs, batch.targets)
            self.model.backward(loss, weight=batch.tokens, sync=index == len(share))
            loss_sum += loss.detach() * batch.tokens
        tokens = sum(batch.tokens for batch in share)
        pk.weighted_all_reduce_([loss_sum], tokens, self.group, reduction="sum")
        return loss_sum.item()

    def whole(self) -> nn.Module:
        """The model, unsplit, with the parameters and gradients of now; collective."""
        self._whole.load_state_dict(pk.gather_state_dict(self.model.module))
        gradients = pk.gather_gradients(self.model.module)
        for name, parameter in self._whole.named_parameters():
            parameter.grad = gradients.get(name)
        return self._whole


class OneProcessRun:
    """Training in one process, in plain PyTorch."""

    def __init__(self, module: nn.Module, lr: float) -> None:
        self.model = copy.deepcopy(module)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.losses: list[float] = []

    def step(self, weighted: Weighted) -> None:
        """Train on one batch."""
        self.losses.append(backward(self.model, weighted))
        self.optimizer.step()


def train(options: Options, group: pk.Group) -> Result:
    """Train the three ways, comparing as it goes. The result is complete on rank 0 alone."""
    pieces = prepare_once(options, group)
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks_here))

    torch.manual_seed(options.seed)
    module = ByteGPT().to(group.device)
    # Each costs a whole batch a step, so two ranks share them.
    single = OneProcessRun(module, options.lr) if group.rank == 0 else None
    plain = OneProcessRun(module, options.lr) if group.rank == 1 % group.size else None
    checker = GradientChecker(module, options.seed) if group.rank == 0 else None
    parameters = sum(p.numel() for p in module.parameters())
    data_group, tensor_group = split_ranks(group, options.tp)
    parallel = ParallelRun(module, data_group, tensor_group, options.lr)

    result = Result(
        size=group.size,
        transport=group.transport,
        parameters=parameters,
        gradient_bytes=sum(p.numel() * p.element_size() for p in module.parameters()),
        tp=options.tp,
    )
    losses: list[float] = []
    checked = {round(i * (options.steps - 1) / (CHECKS - 1)) for i in range(CHECKS)}
    batches = global_batches(pieces, options.batch, options.steps, options.seed)
    tqdm.set_lock(threading.RLock())  # its own would be one of multiprocessing, and leak
    bar = tqdm(total=options.steps, unit="step", disable=None if group.rank == 0 else True)
    for step, batch in enumerate(batches):
        whole = micro_batches(batch, options.micro_batch, group.device)
        shares = [
            micro_batches(batch[rank :: data_group.size], options.micro_batch, group.device)
            for rank in range(data_group.size)
        ]
        result.tokens.append([sum(b.tokens for b in share) for share in shares])

        group.barrier()  # what ranks did for comparison took them different times
        start = time.perf_counter()
        losses.append(parallel.backward(shares[data_group.rank]))
        backward_end = time.perf_counter()
        if step in checked:
            trained = parallel.whole()
            if checker is not None:
                result.checks.append(checker.check(trained, step, whole, shares))
        step_start = time.perf_counter()
        parallel.optimizer.step()
        result.seconds.append(time.perf_counter() - step_start + backward_end - start)

        if single is not None:
            single.step(mean_over_tokens(whole))
        if plain is not None:
            plain.step(mean_of_means(shares))
        bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
        bar.update()
    bar.close()

    result.losses = {
        "parallel": losses,
        "one process": single.losses if single else [],
        "plain mean": all_gather_object(plain and plain.losses, group)[1 % group.size],
    }
    result.digests = all_gather_object(digest(parallel.whole()), group)
    return result


def split_ranks(group: pk.Group, tp: int) -> tuple[pk.Group, pk.Group | None]:
    """The ranks with other data, and those that hold the model together with this one."""
    if tp == 1:
        return group, None
    shape = (group.size // tp, tp)
    mesh = init_device_mesh(group.device.type, shape, mesh_dim_names=("dp", "tp"))
    return pk.Group.from_mesh(mesh["dp"]), pk.Group.from_mesh(mesh["tp"])


def prepare_once(options: Options, group: pk.Group) -> list[bytes]:
    """What rank 0 prepared, or its error, on every rank: files may differ from host to host."""
    outcome: list[bytes] | InvalidArgumentError | None = None
    if group.rank == 0:
        try:
            outcome = prepare(options, group.size)
        except InvalidArgumentError as error:
            outcome = error
    outcome = all_gather_object(outcome, group)[0]
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
    enough = options.steps * options.batch * CONTEXT
    pieces = read_pieces(options.data, enough=enough, seed=options.seed)
    if len(pieces) < size:
        raise InvalidArgumentError(
            f"--data {options.data} must hold a paragraph for each of the {size} ranks, "
            f"got {len(pieces)}; give more text, or fewer ranks"
        )
    return pieces


def all_gather_object(value: Any, group: pk.Group) -> list[Any]:
    """Every rank's value, in rank order, on every rank."""
    values = [value] * group.size
    if group.size > 1:
        dist.all_gather_object(values, value)
    return values

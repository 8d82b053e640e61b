"""Weighted means inside torch's own DistributedDataParallel.

DDP compares the hook's annotations with classes, so here they are not strings.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .arguments import Weight
from .collectives import weighted_all_reduce_
from .group import Group, default_group
from .transport.cuda_peer import CudaPeer

__all__ = ["WeightedMean", "ddp_comm_hook"]


class WeightedMean:
    """The state of the hook.

    Attributes:
        weight: number of items (examples, tokens) that this rank's next loss is a mean over; set it
            before each backward. 0 leaves this rank out. Default: 1, DDP's own mean of means.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.weight: Weight = 1.0
        self._error: Exception | None = None  # of this backward, until it has ended
        # Buckets are averaged while backward runs, one after the other in the order they come.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parallelkit-ddp")


Hook = Callable[[WeightedMean, dist.GradBucket], torch.futures.Future[torch.Tensor]]  # type: ignore[name-defined]


def ddp_comm_hook(group: Group | DeviceMesh | None = None) -> tuple[WeightedMean, Hook]:
    """A communication hook for DistributedDataParallel that counts items instead of ranks.

        state, hook = pk.ddp_comm_hook()
        model.register_comm_hook(state, hook)
        ...
        state.weight = tokens_of_this_rank
        loss.backward()                         # .grad <- sum_r weight_r grad_r / sum_r weight_r

    Args:
        group: the ranks of the wrapped model, a Group or one dimension of a DeviceMesh. Default:
            all (`pk.init()`).

    Returns:
        (state, hook), for `DistributedDataParallel.register_comm_hook`. A bad `state.weight` on any
        rank makes the backward raise on all of them, as `weighted_all_reduce_` does; the gradients
        are not averaged then.
    """
    return WeightedMean(default_group(group)), _average


def _average(
    state: WeightedMean,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    gradients: torch.Tensor = bucket.buffer()
    weight = state.weight

    def done(wait: Callable[[], object]) -> torch.Tensor:
        try:
            wait()
        except Exception as error:
            state._error = state._error or error
        return gradients

    if bucket.index() == 0:
        state._error = None  # of a backward that did not come to its end
    if bucket.is_last():  # DDP's own end of the backward comes between the two
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(partial(_raise, state)))
    if isinstance(state.group._transport, CudaPeer):  # ordered by streams, without a thread
        work = weighted_all_reduce_(gradients, weight, state.group, async_op=True)
        return work.get_future().then(lambda future: done(future.wait))
    on_gpu = gradients.is_cuda
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[gradients.device] if on_gpu else None
    )
    stream = torch.cuda.stream(torch.cuda.current_stream()) if on_gpu else nullcontext()

    def average() -> None:
        weighted_all_reduce_(gradients, weight, state.group)

    def run() -> None:
        with stream:
            future.set_result(done(average))

    state._thread.submit(run)
    return future


def _raise(state: WeightedMean) -> None:
    """Raise what a bucket's mean raised: given to DDP, it would come out as an error of a cast."""
    error, state._error = state._error, None
    if error is not None:
        raise error

"""Start ranks on this machine, as torchrun would, and end them all when one ends early."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

GRACE_S = 3.0  # for the other ranks to say what they make of a rank's end


def start_ranks(size: int, entry: Callable[..., int], *args: object) -> int:
    """Run entry(*args) in size processes and return the exit status: the first that is not 0.

    The processes see torchrun's variables. None is left when this returns or raises, whatever
    happened; where this process is killed, they die with it.
    """
    # The ranks meet in a store of this process, as with torchrun: no port is guessed, and the
    # store outlives any of them.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Ctrl-C goes to every process of the terminal. This one alone answers; a rank that ignores
    # it from its first instruction on prints no traceback of a half-done import.
    answer = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        context = start_processes(
            _rank, (size, store.port, entry, args), nprocs=size, join=False, start_method="spawn"
        )
    finally:
        signal.signal(signal.SIGINT, answer)
    try:
        while not context.join(grace_period=GRACE_S):
            pass
        return 0
    except ProcessExitedException as ended:
        if ended.signal_name is None:
            return ended.exit_code
        sys.stderr.write(
            f"\nparallelkit: rank {ended.error_index} of {size} was killed by "
            f"{ended.signal_name}; the others were stopped\n"
        )
        return 1
    except ProcessRaisedException as raised:  # a fault of the program: its text is a traceback
        sys.stderr.write(f"{raised}\n")
        return 1
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def _rank(
    rank: int, size: int, port: int, entry: Callable[..., int], args: tuple[object, ...]
) -> None:
    # What torch.multiprocessing has the kernel send when the parent is gone: die of it, silently.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is the parent's
        TORCHELASTIC_RESTART_COUNT="0",
    )
    sys.exit(entry(*args))

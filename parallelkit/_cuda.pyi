"""parallelkit._cuda: the native collectives and the fused step on GPUs, on raw addresses.

Every call only enqueues work on the stream it is given and never waits for the GPU, so it can be
captured in a CUDA graph; what a kernel found wrong is told by `Communicator.status`, at the next
call. `parallelkit.ops` is its only importer; the module loads without a driver.

Conventions. An *address* is an int, 0 where there is none; device memory unless said otherwise. A
*stream* is a cudaStream_t as an int. Dtypes are the codes of csrc/dtypes.h: 0 float32, 1 float64,
2 bfloat16, 3 float16. What a rank says of a call is a `Call` of parallelkit.transport, equal in
meaning to the CPU's; a weight that lies on the device goes by `weight_at`, the address of a float64
that counts in place of the one in the call.

Errors of CUDA raise RuntimeError with its own text; bad arguments ValueError.
"""

from collections.abc import Sequence

from .transport import Call

interface: int
"""Version of these calls; parallelkit.ops wants the same number."""

outcomes: tuple[str, ...]
"""What the number of an outcome means; the same as parallelkit._cpu.outcomes."""

algorithms: tuple[str, ...]
"""("auto", "one-shot", "direct", "ring"): what the number of an algorithm means."""

max_ranks: int
"""Of one communicator."""

max_virtual_ranks: int
"""In one launch on one GPU, see `VirtualRanks`."""

architectures: tuple[int, ...]
"""Compute capabilities compiled for, times ten; newer GPUs run the PTX of the last."""

def device_count() -> int:
    """GPUs that this process sees; 0 where there is no driver. Never raises."""

def unavailable() -> str:
    """Why device_count() is 0, in CUDA's words; "" where it is not."""

def versions() -> tuple[int, int]:
    """(runtime, driver) as CUDA counts them, 13000 for 13.0; driver 0 where there is none."""

def device_facts(device: int) -> dict[str, int | str]:
    """Of one GPU: "name", "uuid" (32 hex digits, equal in every process), "capability" (90 for
    9.0), "multiprocessors", "bytes", and 0 or 1 for "vmm_fd" (memory exportable as a file
    descriptor) and "multicast".
    """

def can_access_peer(device: int, peer: int) -> bool:
    """Whether `device` can read and write the memory of `peer`; true for itself."""

def max_blocks(device: int) -> int:
    """Blocks of which every kernel of this module can have that many on the device at once.

    All ranks of a communicator must have equally many: the least over the ranks.
    """

def choose_algorithm(nbytes: int, size: int) -> int:
    """What "auto" means for an all-reduce of so many bytes over so many ranks."""

class Memory:
    """Device memory that other ranks can reach, or a mapping of another rank's.

    Freed by `close`, or with its last reference; both wait for nothing, so let streams finish
    first. `close` twice is harmless. Memory given out is zeroed.
    """

    @staticmethod
    def plain(device: int, nbytes: int) -> Memory:
        """From cudaMalloc; can be exported by `ipc_handle`, and serves virtual ranks."""
    @staticmethod
    def shareable(device: int, nbytes: int) -> Memory:
        """Of the driver's virtual memory; can be exported by `export_fd`. `nbytes` rounds up."""
    @staticmethod
    def open_ipc(device: int, handle: bytes, nbytes: int) -> Memory:
        """What another process exported by `ipc_handle`, reached from `device`."""
    @staticmethod
    def open_fd(device: int, fd: int, nbytes: int) -> Memory:
        """What `export_fd` exported, reached from `device`. The descriptor stays the caller's."""
    def ipc_handle(self) -> bytes:
        """64 bytes for `open_ipc` in another process of this host."""
    def export_fd(self) -> int:
        """A new file descriptor for `open_fd`; the caller closes it."""
    def close(self) -> None:
        """Unmap and free."""
    @property
    def address(self) -> int:
        """Of the first byte."""
    @property
    def nbytes(self) -> int:
        """What can be used; at least what was asked for."""

class VirtualRanks:
    """Makes one launch of the calls of `size` ranks in this process, all on one GPU.

    Ranks are threads. A call on a communicator made with this waits on the host until every rank
    has made the same call, then the last launches one cooperative kernel for all of them: blocks
    that wait for each other are on the GPU together. Each rank's stream is ordered before and after
    the launch. Ranks that make different calls, or wait longer than the timeout, find that in
    `status`.
    """

    def __init__(self, size: int) -> None: ...

class TensorList:
    """Tensors as one call works on them; made by `Communicator.tensors`."""

    @property
    def nbytes(self) -> int:
        """Of all, each rounded up to a line."""
    @property
    def in_place(self) -> bool:
        """Whether every rank reaches all of them where they are."""
    @property
    def table_bytes(self) -> int:
        """Device memory that `upload` wants; 0: none, and `upload` does nothing."""
    def upload(self, table: int, stream: int) -> None:
        """Write the list to `table` on a stream; before the first call, which is ordered after it.

        The memory must live and stay as it is as long as calls use the list. Nothing of the host is
        read later, so this can be captured too.
        """

class ShardedStep:
    """The optimizer's pass over what this rank owns, with its tables.

    As on the CPU: `add_parameter` and `add_piece` once, `set` and `upload` before each step.
    """

    def __init__(self, communicator: Communicator, averaged: bool, multicast: bool = False) -> None:
        """
        Args:
            averaged: gradients are the global mean already, and only the own ones are read.
            multicast: let the NVLink switch add up gradients and spread parameters (sm_90 and
                newer), where everything shared lies in segments with a multicast address. It adds
                in no fixed order, and rounds a bfloat16 sum; only where all ranks' weight and scale
                come to the same factor, else, and for float16, as without. Has never run yet.
        """
    def add_parameter(
        self, dtype: int, stochastic: bool, in_norm: int, shared_param: bool, shared_grad: bool
    ) -> None:
        """The next parameter.

        Args:
            dtype: of the parameter.
            stochastic: without a master, bfloat16: round stochastically.
            in_norm: how its squares count in the norm, a number of `optimizer_norm.InNorm`.
            shared_param, shared_grad: it, and its gradient, lie in a segment, and are written to
                and read from every rank.
        """
    def add_piece(
        self,
        parameter: int,
        number: int,
        first: int,
        count: int,
        master: int,
        kind: int,
        moments: tuple[int, int, int],
        scales: tuple[int, int, int],
    ) -> None:
        """What this rank owns of a parameter: `count` elements from `first` on.

        Args:
            parameter: its index, in the order of `add_parameter`.
            number: of the parameter, equal at any world size; keys the random bits.
            first: a multiple of 256.
            count: above 0; not a multiple of 256 only where the parameter ends.
            master: address of its float32 masters, or 0.
            kind: of the moments: 0 as computed, 1 bfloat16, 2 int8 with a scale for 256 elements.
            moments: addresses of exp_avg, exp_avg_sq and max_exp_avg_sq (0: no amsgrad).
            scales: of the same three, float32; 0 where not int8.
        """
    def set(
        self,
        rows: Sequence[tuple[int, int, int, int, int]],
        settings: Sequence[tuple[float, float, float, float, float, bool]],
    ) -> None:
        """What the next steps do.

        Args:
            rows: for every parameter (its address, address of its gradient or 0 where it does not
                move, dtype of the gradient, index of its setting, address of its step count: a
                float32 on the device, which the step reads, and raises by 1 unless it skips).
            settings: (lr, beta1, beta2, eps, weight_decay, maximize).
        """
    @property
    def table_bytes(self) -> int:
        """Device memory that `upload` wants, as last `set`."""
    def upload(self, table: int, stream: int) -> None:
        """Write the tables to device memory on a stream; again after each `set`, and only then."""

class Communicator:
    """One rank's end of the collectives. Making one is not collective, its calls are.

    Calls of one communicator run in the order they were made, also on different streams.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: int,
        controls: Sequence[int],
        blocks: int,
        timeout_seconds: float,
        algorithm: int,
        virtual: VirtualRanks | None = None,
    ) -> None:
        """
        Args:
            rank, size: as everywhere; at most `max_ranks`.
            device: of this rank.
            controls: address here of each rank's control memory: `control_bytes(size, blocks)` of
                zeroed `Memory`, the rank's own for its own entry. The caller keeps it.
            blocks: at most `max_blocks`, equal on every rank; with virtual ranks their share.
            timeout_seconds: how long a kernel waits for a peer before it gives up and breaks the
                group.
            algorithm: number of one; equal on every rank.
            virtual: for ranks of one process that share a GPU.
        """
    @staticmethod
    def control_bytes(size: int, blocks: int) -> int:
        """Of control memory of one rank."""
    def add_segment(self, addresses: Sequence[int], nbytes: int, multicast: int = 0) -> None:
        """Make memory known that every rank reaches, by the address here of each rank's part.

        Lists and steps made later find tensors in it. All ranks call this in one order, or their
        segments have different names. Waits for the copy of a few bytes.

        Args:
            addresses: of each rank's part, multiples of 16.
            nbytes: of one part.
            multicast: the address of all parts at once, for `ShardedStep`'s multicast.
        """
    def remove_segment(self, address: int) -> None:
        """Forget the segment whose own part begins here; lists and steps on it must be gone."""
    def tensors(self, tensors: Sequence[tuple[int, int, int]]) -> TensorList:
        """A list of (address, bytes, dtype) of contiguous tensors."""
    def all_reduce(
        self,
        tensors: TensorList,
        call: Call,
        stream: int,
        *,
        weight_at: int = 0,
        total_at: int = 0,
    ) -> None:
        """In place; the total weight goes to the float64 at `total_at`, where not 0."""
    def reduce_scatter(
        self,
        tensors: TensorList,
        shard: int,
        unit_bytes: int,
        call: Call,
        stream: int,
        *,
        weight_at: int = 0,
        total_at: int = 0,
    ) -> None:
        """This rank's part of the one tensor to `shard`, cut on whole units as shard_bounds does.

        The tensor stays as it is; `shard` may be its own part of it.
        """
    def all_gather(
        self,
        tensors: TensorList,
        shard: int,
        unit_bytes: int,
        call: Call,
        stream: int,
    ) -> None:
        """Every rank's `shard` into the one tensor, cut as in `reduce_scatter`."""
    def gradient_norm(
        self,
        step: ShardedStep,
        call: Call,
        stream: int,
        *,
        squares_at: int,
    ) -> None:
        """Sums of squares of the whole mean gradient, of all ranks' shards, to every rank.

        `squares_at`: float64 [2]: of parameters that are whole, and of those that are split. Equal
        to the bit on every rank.
        """
    def sharded_step(
        self,
        step: ShardedStep,
        call: Call,
        stream: int,
        *,
        squares_at: int = 0,
        max_norm: float = 0.0,
        skip_nonfinite: bool = False,
        report_at: int = 0,
    ) -> None:
        """Reduce-scatter, AdamW on what this rank owns, all-gather, in one pass.

        On a communicator of one rank it is AdamW over many tensors.

        Args:
            squares_at: float64 [2] as `gradient_norm` leaves them; 0: the norm is not known.
            max_norm: clip to it where above 0; wants `squares_at`.
            skip_nonfinite: where the norm is not finite nothing moves; wants `squares_at`.
            report_at: float64 [3]: gets the norm before clipping, 1.0 where the step was skipped
                and else 0.0, and the total weight.
        """
    def barrier(self, stream: int) -> None:
        """Later work on the stream starts after every rank has come here."""
    def status(self) -> tuple[int, int]:
        """(outcome, rank) of what a kernel found wrong, as far as kernels have come; 0: nothing.

        "mismatch", "bad_weight", "fault" and "layouts" are told once, the last of them, with rank
        -1: those calls changed nothing and the group works on. "timeout", "peer_lost" and
        "interrupted" break the group, name the rank to blame (-1: not known), and stay.
        """
    def abort(self, outcome: int, rank: int) -> None:
        """Break the group from the host: kernels that wait give up at once, on every rank."""
    def close(self) -> None:
        """Free what this end holds; its streams must be done. Twice is harmless."""

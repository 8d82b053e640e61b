"""Collectives in the background on a GPU: a stream of their own beside the caller's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from ..errors import ParallelKitError
from . import Reply

__all__ = ["OnSideStream", "SideStream"]


class OnSideStream:
    """A collective under way there; a `Pending` of the transport."""

    def __init__(
        self, device: torch.device, collective: Callable[[], Reply], side: torch.cuda.Stream
    ) -> None:
        self.devices: Sequence[torch.device] = [device]
        self._reply: Reply | None = None
        self._error: ParallelKitError | None = None
        with torch.cuda.stream(side):
            try:
                self._reply = collective()
            except ParallelKitError as error:  # raised by `wait`, as of any collective
                self._error = error
            self._end = side.record_event()

    def done(self) -> bool:
        return bool(self._end.query())

    def wait(self) -> Reply:
        if self._error is not None:
            raise self._error
        assert self._reply is not None
        current = torch.cuda.current_stream(self.devices[0])
        current.wait_event(self._end)
        if isinstance(self._reply.total, torch.Tensor):
            self._reply.total.record_stream(current)
        return self._reply


class SideStream:
    """One GPU's, made when it is first needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def start(
        self, collective: Callable[[], Reply], tensors: Iterable[torch.Tensor]
    ) -> OnSideStream:
        """Run it there, on `tensors`, after what the current stream was given."""
        current = torch.cuda.current_stream(self._device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(current)
        if not torch.cuda.is_current_stream_capturing():
            for tensor in tensors:
                tensor.record_stream(self._stream)  # not used anew before that is through with it
        return OnSideStream(self._device, collective, self._stream)

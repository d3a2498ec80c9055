"""How a resync travels: records and digests over the private channel, bulk on accelerators over a group of theirs."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncstate.errors import PeerError, SyncStateError, SyncTimeout
from syncstate.topology import Topology
from syncstate.wire.bits import as_tensor
from syncstate.wire.channel import Channel, Operation, Wait
from syncstate.wire.handing import hand_round
from syncstate.wire.meeting import Groups, Meeting

__all__ = ["Line"]

_LOOK_SECONDS = 0.1  # how often one who waits for an accelerator looks for news of a failure
_LONGEST_PAUSE = 1e-3


class Line:
    """The ranks that hold the same tensors, and what travels between them.

    Args:
        topology: These ranks.
        members: Global ranks of the whole group, of which these may be a part.
        channel: Their private channel.
        meeting: Where they compare texts; None for one rank alone.
        timeout: Seconds that each wait may take.
        group: A process group of the same ranks for bulk that lies on an accelerator; None to take it over the CPU.
        direct: Send bulk on the CPU over that group too; for tests.

    Attributes:
        topology, members: As given.
        sent: Payload bytes so far.
        step: Where training is, for messages.
        apart: The error that all ranks raise together, after which the line still works.
    """

    def __init__(
        self,
        topology: Topology,
        members: Sequence[int],
        channel: Channel,
        meeting: Meeting | None,
        timeout: float,
        group: Any = None,
        *,
        direct: bool = False,
    ) -> None:
        self.topology = topology
        self.members = members
        self.sent = 0
        self.step = 0
        self.apart: SyncStateError | None = None
        # Errors of a part of the group count its ranks from 0.
        part = f" of shards, among the global ranks {list(topology.global_ranks)}, here numbered from 0,"
        self._what = "resync" if topology.global_ranks == tuple(members) else "resync" + part
        self._channel = channel
        self._meeting = meeting
        self._timeout = timeout
        self._group = group
        self._direct = direct

    def named(self, ranks: Iterable[int]) -> list[int]:
        """Ranks of this line as ranks of the whole group."""
        return sorted(self.members.index(self.topology.global_ranks[rank]) for rank in ranks)

    def compare(self, record: str, text: str) -> Groups:
        """Compare texts through the store, for what is rare; see `Meeting.compare`."""
        if self._meeting is None:
            return {record: ([0], text)}
        return self._meeting.compare(self._what, record, text, self.step)

    def gather(self, mine: bytes) -> list[bytes]:
        """Equally long records of all ranks, in rank order, on main; nothing elsewhere."""
        size, topology = len(mine), self.topology
        buffer = as_tensor(mine)
        outputs = None
        if topology.is_main:
            outputs = list(torch.empty((topology.world_size, size), dtype=torch.uint8))
        self.sent += size * (topology.world_size - 1)
        self._channel.finish(self._channel.begin_gather(buffer, outputs, self._wait()))
        return [] if outputs is None else [output.numpy().tobytes() for output in outputs]

    def spread(self, data: bytes | None, size: int, root: int | None = None) -> bytes:
        """Bring bytes of one rank to all.

        Args:
            data: The bytes, on the rank that sends.
            size: How many; all ranks know it.
            root: Who sends; None is main.
        """
        sender = self.topology.main if root is None else root
        if self.topology.rank == sender and data is not None:
            buffer = as_tensor(data)
        else:
            buffer = torch.empty(size, dtype=torch.uint8)
        self.sent += size * (self.topology.world_size > 1)
        self._channel.finish(self._channel.begin_broadcast(buffer, self._wait(), root=sender))
        return buffer.numpy().tobytes()

    def hand_round(self, data: bytes | None, root: int | None = None) -> bytes:
        """Bring bytes to all ranks that do not know how many come."""
        came = hand_round(self._channel, data, self.topology.main if root is None else root, self._wait())
        self.sent += (8 + len(came)) * (self.topology.world_size > 1)
        return came

    def carries(self, device: torch.device) -> bool:
        """Whether bulk on this device travels from there, and not over buckets on the CPU."""
        if device.type == "cpu" or self._group is None:
            return device.type == "cpu"
        try:
            self._group._get_backend(device)
        except RuntimeError:
            return False
        return True

    def begin_broadcast(self, buffer: Tensor, root: int) -> Any:
        """Post a broadcast of a bucket; `finish` waits for it."""
        self.sent += buffer.numel() * buffer.element_size()
        if buffer.is_cpu and not self._direct:
            return self._channel.begin_broadcast(buffer, self._wait(), root=root)
        return _Remote(dist.broadcast(buffer, group_src=root, group=self._group, async_op=True), self._wait())

    def begin_all_reduce(self, buffer: Tensor) -> Any:
        """Post a sum of a bucket over all ranks; `finish` waits for it."""
        self.sent += buffer.numel() * buffer.element_size()
        if buffer.is_cpu and not self._direct:
            return self._channel.begin_all_reduce(buffer, self._wait())
        return _Remote(dist.all_reduce(buffer, group=self._group, async_op=True), self._wait())

    def finish(self, operation: Any) -> None:
        """Wait for what `begin_broadcast` or `begin_all_reduce` returned.

        Raises:
            SyncStateError: A rank failed, died or did not come in time.
        """
        if isinstance(operation, Operation):
            self._channel.finish(operation)
            return
        wait, look, pause = operation.wait, time.monotonic() + _LOOK_SECONDS, 2e-5
        try:
            while not operation.work.is_completed():
                now = time.monotonic()
                if now >= look:
                    look = now + _LOOK_SECONDS
                    self._channel.listen(wait.step)
                if now - wait.begun >= wait.timeout:
                    raise SyncTimeout(f"{wait}: rank {self.topology.rank} waited {wait.timeout:g} s for a bucket")
                time.sleep(pause)
                pause = min(1.5 * pause, _LONGEST_PAUSE)
            operation.work.wait()  # so that what is computed next on the device comes after it
        except SyncStateError:
            raise
        except RuntimeError as error:
            self._channel.listen(wait.step)
            raise PeerError(f"{wait}: the module's process group failed: {error}") from error

    def _wait(self) -> Wait:
        return Wait(self._what, self.step, self._timeout, time.monotonic())


class _Remote:
    """A collective on an accelerator that was posted."""

    __slots__ = ("wait", "work")

    def __init__(self, work: Any, wait: Wait) -> None:
        self.work = work
        self.wait = wait

"""Where the frames of one kind of sync travel: their lanes, their numbers, and the memory for them."""

import time
from typing import Any

import torch

from syncstate.loop.batch import Batch
from syncstate.loop.pool import Pool
from syncstate.loop.rules import Rules
from syncstate.wire.channel import Channel, Operation, Wait
from syncstate.wire.frame import HEADER_BYTES, Frame, Stamp
from syncstate.wire.shelf import Shelf
from syncstate.wire.vocabulary import aligned

__all__ = ["Line"]


class Line:
    """The blocking syncs of a channel, or the asynchronous ones.

    Args:
        channel: The private groups.
        rules: The engine's.
        frames, bodies: Lanes for frames, and for what does not fit into them.
        in_flight: How many frames can be on their way at one time.

    Attributes:
        channel, rules: As given.
        blocking: Whether each sync is waited for, so that one frame is enough.
        pool, shelf: Memory for what is received.
    """

    def __init__(self, channel: Channel, rules: Rules, frames: str, bodies: str, in_flight: int) -> None:
        self.channel = channel
        self.rules = rules
        self.blocking = in_flight == 1
        self.pool = Pool(in_flight + 1)
        self.shelf = Shelf()
        self._frames, self._bodies = frames, bodies
        self._sequence = 0
        self._frame = Frame(rules.frame_bytes, rules.max_bytes)
        self._buffers = Pool(in_flight + 1)

    def stamp(self, batch: Batch, fields: dict[str, Any]) -> Stamp:
        """The stamp of the next sync."""
        self._sequence += 1
        return Stamp(self._sequence, fields["step"], fields["epoch"], self.rules.plan, batch.digest)

    def wait(self, batch: Batch, stamp: Stamp) -> Wait:
        """What to say when this sync fails; its time begins now."""
        return Wait(batch.label, stamp.step, batch.timeout, time.monotonic())

    def frame(self, batch: Batch) -> Frame:
        """A frame for a batch, of a size that all ranks know: what the payloads before needed.

        A blocking sync always uses the same one, and sends what does not fit as a body at once. An asynchronous body
        could be received only when its frame was looked at, so its frames grow instead.
        """
        if self.blocking:
            return self._frame
        nbytes = self.rules.frame_bytes
        if HEADER_BYTES + batch.largest > nbytes:
            nbytes = aligned(HEADER_BYTES + batch.largest)
        return Frame(nbytes, self.rules.max_bytes, self._buffers.take(nbytes))

    def release(self, frame: Frame) -> None:
        """The frame has arrived and was read."""
        if not self.blocking:
            self._buffers.put(frame.buffer)

    def broadcast_frame(self, frame: Frame, wait: Wait) -> Operation:
        """Post a frame."""
        return self.channel.begin_broadcast(frame.buffer, wait, lane=self._frames)

    def broadcast_body(self, body: torch.Tensor, wait: Wait) -> Operation:
        """Post what does not fit into a frame."""
        return self.channel.begin_broadcast(body, wait, lane=self._bodies)

    def scatter(self, item: torch.Tensor, items: list[torch.Tensor] | None, wait: Wait) -> Operation:
        """Post an item for each rank."""
        return self.channel.begin_scatter(item, items, wait, lane=self._bodies)

    def gather(self, frame: Frame, frames: list[torch.Tensor] | None, wait: Wait) -> Operation:
        """Post a frame to main."""
        return self.channel.begin_gather(frame.buffer, frames, wait, lane=self._frames)

    def send(self, body: torch.Tensor, wait: Wait, number: int) -> Operation:
        """Post to main what does not fit into a gathered frame."""
        return self.channel.begin_send(body, self.channel.topology.main, number, wait, lane=self._bodies)

    def receive(self, body: torch.Tensor, source: int, wait: Wait, number: int) -> Operation:
        """Main: post the receipt of what did not fit into a gathered frame."""
        return self.channel.begin_receive(body, source, number, wait, lane=self._bodies)

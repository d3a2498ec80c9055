"""One sync on the wire: main sends a frame, every rank receives it and decodes the same values."""

import time
from typing import Any

import torch

from syncstate.errors import CodecError, MismatchError
from syncstate.loop.batch import Batch
from syncstate.loop.guard import RandomGuard
from syncstate.loop.pool import Pool
from syncstate.loop.sources import Failure, Refused, compute
from syncstate.wire.channel import Channel, Wait
from syncstate.wire.codec import Parcel, decode, encode, unpack
from syncstate.wire.frame import Frame, Kind, Stamp
from syncstate.wire.shelf import Shelf

__all__ = ["Exchange"]


class Exchange:
    """Runs syncs over a channel.

    Args:
        channel: The private group.
        plan: First 8 bytes of the plan's digest.
        seed: The engine's seed.
        frame_bytes, max_bytes: Size of a frame and the largest payload.
        allow_pickle: Whether values may travel by pickle.
    """

    def __init__(
        self, channel: Channel, plan: bytes, seed: int, frame_bytes: int, max_bytes: int, allow_pickle: bool
    ) -> None:
        self._channel = channel
        self._plan = plan
        self._seed = seed
        self._pickle = allow_pickle
        self._frame = Frame(frame_bytes, max_bytes)
        self._guard = RandomGuard()
        self._pool = Pool()
        self._shelf = Shelf()
        self._sequence = 0

    def run(self, batch: Batch, fields: dict[str, Any]) -> list[Any] | Failure:
        """Compute on main, broadcast, and return what every rank received, in the order of the batch.

        Args:
            batch: What is due.
            fields: What the contexts of these computations have in common, `step` and `epoch` among it.

        Raises:
            SyncStateError: The sync failed for a reason that ends the engine.
        """
        step: int = fields["step"]
        self._sequence += 1
        stamp = Stamp(self._sequence, step, fields["epoch"], self._plan, batch.digest)
        if not self._channel.topology.is_main:
            return self._receive(batch, stamp)
        with self._guard:
            return self._send(batch, stamp, fields)

    def warm_up(self, wait: Wait) -> None:
        """Send one frame that says nothing: connections are made, and every rank has them.

        Raises:
            SyncStateError: The group does not work.
        """
        self._channel.broadcast(self._frame.buffer, wait)

    def hand_round(self, value: Any, root: int, wait: Wait) -> Any:
        """Bring a value of one rank to all: its length in a first message, itself in a second.

        Args:
            value: The value on the rank `root`; ignored elsewhere.
            root: The rank that has it.
            wait: What to say when it fails.
        """
        data = b""
        head = torch.zeros(1, dtype=torch.int64, device="cpu")
        if self._channel.topology.rank == root:
            data = encode(value, allow_pickle=self._pickle)
            head[0] = len(data)
        self._channel.broadcast(head.view(torch.uint8), wait, root=root)
        body = torch.zeros(int(head[0]), dtype=torch.uint8, device="cpu")
        if data:
            body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._channel.broadcast(body, wait, root=root)
        return decode(body.numpy().tobytes(), allow_pickle=self._pickle)

    def _send(self, batch: Batch, stamp: Stamp, fields: dict[str, Any]) -> list[Any] | Failure:
        frame, channel = self._frame, self._channel
        try:
            parcel = compute(batch, fields, self._seed, channel.topology.rank, self._pickle)
            body = frame.write(stamp, Kind.VALUES, parcel)
        except (Refused, CodecError) as error:
            failure = _failure(error, batch, stamp.step, channel.topology.rank)
            frame.write(stamp, Kind.ERROR, failure.pack(frame.capacity))
            channel.broadcast(frame.buffer, _wait(batch, stamp))
            return failure
        # Main decodes its own copy, so that no rank holds an alias of what the source keeps; in the shadow of the wire.
        wait = _wait(batch, stamp)
        own: list[Any] = []

        def shadow() -> None:
            self._guard.restore()
            if body is None:
                own.extend(self._unpack(None, copy=True))

        channel.broadcast(frame.buffer, wait, shadow)
        if body is not None:
            channel.broadcast(body, wait, lambda: own.extend(self._unpack(self._own(body, parcel), copy=False)))
        return own

    def _own(self, body: torch.Tensor, parcel: Parcel) -> torch.Tensor:
        """The body, or a copy where it is the source's own memory and not a buffer made for this sync."""
        if not parcel.blobs or body.data_ptr() != parcel.blobs[0].data_ptr():
            return body
        copy = self._pool.take(body.numel())
        return copy.copy_(body)

    def _receive(self, batch: Batch, stamp: Stamp) -> list[Any] | Failure:
        frame, wait, prefix = self._frame, _wait(batch, stamp), stamp.prefix()
        self._channel.broadcast(frame.buffer, wait, self._shelf.stock)
        if not frame.begins(prefix):
            raise self._apart(batch, stamp, frame.stamp())
        lengths = frame.lengths()
        body = None
        if lengths.body:
            body = self._pool.take(lengths.body)
            self._channel.broadcast(body, wait)
        tree, region = frame.payload(lengths, body)
        values: list[Any] = unpack(tree, region, copy=body is None, allow_pickle=self._pickle, shelf=self._shelf)
        self._shelf.turn()
        if lengths.kind == Kind.ERROR:
            return Failure.read(values)
        if type(values) is not list or len(values) != len(batch.entries):
            raise CodecError(
                f"{batch.label} at step {stamp.step}: received something else than {len(batch.names)} values"
            )
        return values

    def _unpack(self, body: torch.Tensor | None, *, copy: bool) -> list[Any]:
        tree, region = self._frame.payload(self._frame.lengths(), body)
        values: list[Any] = unpack(tree, region, copy=copy, allow_pickle=self._pickle)
        return values

    def _apart(self, batch: Batch, mine: Stamp, theirs: Stamp) -> MismatchError:
        """How the frame that came differs from the one that this rank expected."""
        rank, main = self._channel.topology.rank, self._channel.topology.main
        here, there = f"rank {rank}", f"main (rank {main})"
        if mine.step != theirs.step or mine.epoch != theirs.epoch:
            what = (
                f"{here} is at step {mine.step} (epoch {mine.epoch}), {there} is at step {theirs.step} "
                f"(epoch {theirs.epoch})"
            )
        elif mine.sequence != theirs.sequence:
            what = f"{here} makes its sync number {mine.sequence}, {there} its number {theirs.sequence}"
        else:
            what = f"{there} sends other values than {here} expects at step {mine.step}"
        return MismatchError(
            f"{batch.label}: {what}. Every rank must call the engine at the same steps and in the same order"
        )


def _wait(batch: Batch, stamp: Stamp) -> Wait:
    return Wait(batch.label, stamp.step, batch.timeout, time.monotonic())


def _failure(error: Refused | CodecError, batch: Batch, step: int, rank: int) -> Failure:
    if isinstance(error, Refused):
        return error.failure
    text = f"{batch.label} at step {step} on main (rank {rank}): CodecError: {error}"
    return Failure("compute", text, list(batch.names), error)

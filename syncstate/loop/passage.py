"""One frame on its way from main to every rank, with the body or the items behind it."""

import torch

from syncstate.errors import CodecError, MismatchError
from syncstate.loop.batch import Batch
from syncstate.loop.line import Line
from syncstate.loop.payload import Contents, Sealed, item_of, items_for, open_payload
from syncstate.loop.sources import Failure
from syncstate.wire.channel import Operation, Wait
from syncstate.wire.codec import Parcel, unpack
from syncstate.wire.frame import Frame, Kind, Lengths, Stamp
from syncstate.wire.vocabulary import aligned

__all__ = ["Inbound", "Outbound", "Passage", "aliases", "apart"]


class Outbound:
    """Main's side. Everything is posted at once.

    Main decodes its own copy, so that no rank holds an alias of what the source keeps.

    Args:
        line: Where it travels.
        batch, stamp: What travels.
        frame: The frame to send it in.
    """

    __slots__ = ("_batch", "_body", "_frame", "_line", "_operations", "_stamp", "result")

    def __init__(self, line: Line, batch: Batch, stamp: Stamp, frame: Frame) -> None:
        self._line, self._batch, self._stamp, self._frame = line, batch, stamp, frame
        self._operations: list[Operation] = []
        self._body: torch.Tensor | None = None
        self.result: Contents | Failure | None = None

    @property
    def room(self) -> int:
        """Bytes that the payload needs, for the frames to come."""
        return _room(self._frame.lengths(), self._frame.capacity)

    def write(self, sealed: Sealed) -> None:
        """Fill the frame with values.

        Raises:
            CodecError: They are larger than `max_bytes`; nothing was posted.
        """
        self._body = self._frame.write(self._stamp, Kind.VALUES, sealed.parcel)

    def send(self, sealed: Sealed) -> None:
        """Post what was written, and decode it in the shadow of the wire."""
        line, frame, body = self._line, self._frame, self._body
        wait = line.wait(self._batch, self._stamp)  # what main computes before takes no time of it
        lent = body is not None and aliases(body, sealed.parcel)
        if body is not None and lent and not line.blocking:
            body, lent = line.pool.take(body.numel()).copy_(body), False  # the source may change while it travels
        self._operations.append(line.broadcast_frame(frame, wait))
        if body is not None:
            self._operations.append(line.broadcast_body(body, wait))
        if sealed.items is not None:
            item = torch.empty_like(sealed.items[0])
            self._operations.append(line.scatter(item, sealed.items, wait))
        self._keep(sealed, line.pool.take(body.numel()).copy_(body) if body is not None and lent else body)

    def _keep(self, sealed: Sealed, body: torch.Tensor | None) -> None:
        """Main's own copy of what it sends."""
        batch, frame, line = self._batch, self._frame, self._line
        lengths = frame.lengths()
        tree, region = frame.payload(lengths, body)
        copy = body is None and (line.blocking or len(frame.buffer) == line.rules.frame_bytes)
        parts = unpack(tree, region, copy=copy, allow_pickle=line.rules.allow_pickle)
        contents = open_payload(batch, parts, line.rules.max_bytes)
        if sealed.items is not None:
            each = [item_of(item, batch, line.rules.allow_pickle) for item in sealed.items]
            for place, index in enumerate(batch.scattered):
                contents.values[index] = [items[place] for items in each]
        self._body = body
        self.result = contents

    def refuse(self, failure: Failure) -> None:
        """Post why there are no values."""
        self._frame.write(self._stamp, Kind.ERROR, failure.pack(self._frame.capacity))
        wait = self._line.wait(self._batch, self._stamp)
        self._operations.append(self._line.broadcast_frame(self._frame, wait))
        self.result = failure

    @property
    def posted(self) -> bool:
        """Whether nothing is left to be posted."""
        return True

    def advance(self) -> None:
        """Post what can be posted by now: nothing, as all of it was at once."""

    def finish(self) -> Contents | Failure:
        """Wait until everything is sent; returns what every rank receives. Raises what `Channel.finish` raises."""
        line = self._line
        for operation in self._operations:
            line.channel.finish(operation)
        if not line.blocking and self._operations:
            line.release(self._frame)
        self._operations = []
        if self._body is not None:
            line.pool.put(self._body)
            self._body = None
        if self.result is None:
            raise CodecError(f"{self._batch.label}: nothing was sent")
        return self.result


class Inbound:
    """The side of the ranks that receive. The frame is posted at once; what is behind it when the frame was seen.

    Args:
        line: Where it travels.
        batch, stamp: What this rank expects.
        frame: The frame to receive it in.
    """

    def __init__(self, line: Line, batch: Batch, stamp: Stamp, frame: Frame) -> None:
        self._line, self._batch, self._stamp, self._frame = line, batch, stamp, frame
        self._prefix = stamp.prefix()  # made now: what is done after the frame has come is time that training waits
        self._wait: Wait = line.wait(batch, stamp)
        self._head = line.broadcast_frame(frame, self._wait)
        self._lengths: Lengths | None = None
        self._body: torch.Tensor | None = None
        self._rest: list[Operation] = []
        self._fault: CodecError | MismatchError | None = None
        self._contents: Contents | None = None
        self._item: torch.Tensor | None = None
        self.result: Contents | Failure | None = None

    @property
    def room(self) -> int:
        """Bytes that the payload needs, for the frames to come."""
        return 0 if self._lengths is None else _room(self._lengths, self._frame.capacity)

    @property
    def posted(self) -> bool:
        """Whether nothing is left to be posted."""
        return self.result is not None or (self._lengths is not None and not self._batch.scattered)

    def advance(self) -> None:
        """Post what is behind the frame, if the frame has come."""
        try:
            if self._fault is None and self._lengths is None and self._head.done():
                self._look()
            if self._fault is None and self._lengths is not None and all(one.done() for one in self._rest):
                for operation in self._rest:
                    self._line.channel.finish(operation)  # which is over; well or not, is said here
                self._open()
        except (CodecError, MismatchError) as error:
            self._fault = error  # for `finish`: every rank raises at the same step, whenever it came

    def finish(self) -> Contents | Failure:
        """Wait for everything; returns what came. Raises what `Channel.finish` raises.

        Raises:
            MismatchError: Main is elsewhere than this rank.
            CodecError: What came is no frame.
        """
        if self._fault is not None:
            raise self._fault
        if self._line.blocking:
            self._line.shelf.stock()
        while self.result is None:
            if self._lengths is None:
                self._look()
            for operation in self._rest:
                self._line.channel.finish(operation)
            self._open()
        return self.result

    def _look(self) -> None:
        """The frame is here, or is waited for: read its head, and post what is behind it."""
        line, frame = self._line, self._frame
        line.channel.finish(self._head)
        if not frame.begins(self._prefix):
            raise _apart(line, self._batch, self._stamp, frame.stamp())
        self._lengths = frame.lengths()
        if self._lengths.body:
            self._body = line.pool.take(self._lengths.body)
            self._rest.append(line.broadcast_body(self._body, self._wait))

    def _open(self) -> None:
        """Decode what has come, and post the receipt of this rank's item if there is one."""
        line, batch, lengths = self._line, self._batch, self._lengths
        if lengths is None or self.result is not None:
            return
        pickle = line.rules.allow_pickle
        if self._item is not None and self._contents is not None:
            for index, value in zip(batch.scattered, item_of(self._item, batch, pickle), strict=True):
                self._contents.values[index] = value
            self._conclude(self._contents)
            return
        tree, region = self._frame.payload(lengths, self._body)
        copy = self._body is None and (line.blocking or len(self._frame.buffer) == line.rules.frame_bytes)
        shelf = line.shelf if line.blocking else None
        parts = unpack(tree, region, copy=copy, allow_pickle=pickle, shelf=shelf)
        if shelf is not None:
            shelf.turn()
        if lengths.kind == Kind.ERROR:
            self._conclude(Failure.read(parts))
            return
        contents = open_payload(batch, parts, line.rules.max_bytes)
        if contents.item_bytes:
            self._contents = contents
            self._item = torch.empty(contents.item_bytes, dtype=torch.uint8, device="cpu")
            self._rest.append(line.scatter(self._item, None, self._wait))
            return
        if batch.scattered:
            rank = line.channel.topology.rank
            contents = contents._replace(values=items_for(rank, batch, contents.values))
        self._conclude(contents)

    def _conclude(self, result: Contents | Failure) -> None:
        self._line.release(self._frame)
        if self._body is not None:
            self._line.pool.put(self._body)
        self._body = None
        self.result = result


Passage = Outbound | Inbound


def _room(lengths: Lengths, capacity: int) -> int:
    """Room for payloads like this one; what has grown may grow further."""
    nbytes = (aligned(lengths.tree) if lengths.region else lengths.tree) + lengths.region
    return nbytes if nbytes <= capacity else nbytes + nbytes // 8


def aliases(body: torch.Tensor, parcel: Parcel) -> bool:
    """Whether the body is the source's own memory and not a buffer made for this sync."""
    return bool(parcel.blobs) and body.data_ptr() == parcel.blobs[0].data_ptr()


def _apart(line: Line, batch: Batch, mine: Stamp, theirs: Stamp) -> MismatchError:
    """How the frame that came differs from the one that this rank expected."""
    topology = line.channel.topology
    return apart(batch, mine, theirs, f"rank {topology.rank}", f"main (rank {topology.main})")


def apart(batch: Batch, mine: Stamp, theirs: Stamp, here: str, there: str) -> MismatchError:
    """How two stamps differ that should be equal.

    Args:
        batch: What this rank syncs.
        mine, theirs: The stamps.
        here, there: Whose they are.
    """
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

"""What the ranks collect for a sync, on its way to the main process."""

from typing import Any

import torch

from syncstate.context import Context
from syncstate.errors import CodecError
from syncstate.loop.batch import Batch
from syncstate.loop.guard import RandomGuard
from syncstate.loop.line import Line
from syncstate.loop.passage import aliases, apart
from syncstate.loop.reduction import reduce_results
from syncstate.loop.sources import Failure
from syncstate.wire.channel import Operation
from syncstate.wire.codec import pack, unpack
from syncstate.wire.frame import Frame, Kind, Stamp
from syncstate.wire.notes import describe_error, traced

__all__ = ["Collection"]


class Collection:
    """The results of one sync: a frame from each rank, and what does not fit into it behind.

    Making one runs the collecting functions of this rank and posts their results. A rank whose function fails sends
    that instead, so that every rank learns of it from main.

    Args:
        line: Where it travels.
        batch, stamp: The sync.
        fields: What the contexts of these values have in common on this rank.
        guard: Keeps the global random generators.

    Attributes:
        cause: This rank's own exception, if it failed.
    """

    def __init__(self, line: Line, batch: Batch, stamp: Stamp, fields: dict[str, Any], guard: RandomGuard) -> None:
        self._line, self._batch, self._stamp = line, batch, stamp
        self._wait = line.wait(batch, stamp)
        self._observed: list[tuple[str, torch.Tensor]] = []
        self.cause: BaseException | None = None
        with guard:
            self._frame, body = self._written(fields)
        world_size = line.channel.topology.world_size
        frame_bytes = len(self._frame.buffer)
        self._gathered: list[torch.Tensor] | None = None
        if line.channel.topology.is_main:
            self._gathered = [torch.empty(frame_bytes, dtype=torch.uint8, device="cpu") for _ in range(world_size)]
        self._operations: list[Operation] = [line.gather(self._frame, self._gathered, self._wait)]
        self._body = body
        if body is not None and self._gathered is None:
            self._operations.append(line.send(body, self._wait, self._number))

    @property
    def _number(self) -> int:
        return self._stamp.sequence & 0x7FFFFFFF

    def _written(self, fields: dict[str, Any]) -> tuple[Frame, torch.Tensor | None]:
        """This rank's frame, and what does not fit into it."""
        rules = self._line.rules
        frame = Frame(rules.frame_bytes, rules.max_bytes)
        results: list[Any] = []
        for index, collect in self._batch.collectors:
            entry, job = self._batch.entries[index], self._batch.jobs[index]
            context = Context.of(fields, entry.record.sent, rules.seed, job.stream, entry.record.version + 1)
            try:
                results.append(collect(context))
            except Exception as error:
                self._refuse(frame, entry.name, error)
                return frame, None
            if entry.definition.collect == "observed":
                self._observed.append((entry.name, results[-1]))
        try:
            parcel = pack(results, allow_pickle=rules.allow_pickle)
            body = frame.write(self._stamp, Kind.VALUES, parcel)
        except CodecError as error:
            self._refuse(frame, *self._guilty(results, error))
            return frame, None
        if body is not None and aliases(body, parcel) and not self._line.blocking:
            body = body.clone()  # what the function returned may change while it travels
        return frame, body

    def _guilty(self, results: list[Any], error: CodecError) -> tuple[str, CodecError]:
        """The value whose result cannot travel, and why; the first where they are only too large together."""
        names = [self._batch.entries[index].name for index, _ in self._batch.collectors]
        for name, result in zip(names, results, strict=True):
            try:
                pack(result, allow_pickle=self._line.rules.allow_pickle)
            except CodecError as fault:  # its path begins inside the result
                return name, fault
        return names[0], error

    def _refuse(self, frame: Frame, name: str, error: Exception) -> None:
        rank, step = self._line.channel.topology.rank, self._stamp.step
        told = f"value {name!r} at step {step}: collect failed on rank {rank}: {describe_error(error)}"
        text = traced(told, error, rank)
        self.cause = error
        frame.write(self._stamp, Kind.ERROR, Failure("compute", text, [name]).pack(frame.capacity))

    def finish(self) -> dict[int, Any] | Failure | None:
        """Wait until this rank's part is over; main gets what was collected, by index, or why nothing was.

        Raises:
            SyncStateError: A rank failed, is elsewhere, or did not answer.
        """
        line = self._line
        for operation in self._operations:
            line.channel.finish(operation)
        if self._gathered is None:
            return None
        frames = [Frame(len(buffer), line.rules.max_bytes, buffer) for buffer in self._gathered]
        main = line.channel.topology.main
        for rank, frame in enumerate(frames):
            if not frame.begins(self._stamp.prefix()):
                raise apart(self._batch, self._stamp, frame.stamp(), f"main (rank {main})", f"rank {rank}")
        bodies = self._receive(frames, main)
        results: list[list[Any]] = []
        failures: list[Failure] = []
        for frame, body in zip(frames, bodies, strict=True):
            lengths = frame.lengths()
            tree, region = frame.payload(lengths, body)
            parts = unpack(tree, region, copy=body is None, allow_pickle=line.rules.allow_pickle)
            if lengths.kind == Kind.ERROR:
                failures.append(Failure.read(parts))
            elif type(parts) is not list or len(parts) != len(self._batch.collectors):
                raise CodecError(f"{self._batch.label}: received something else than what ranks collect")
            else:
                results.append(parts)
        if failures:
            return self._failed(failures)
        return self._reduced(results)

    def _receive(self, frames: list[Frame], main: int) -> list[torch.Tensor | None]:
        """What does not fit into the frames of the ranks."""
        bodies: list[torch.Tensor | None] = []
        operations = []
        for rank, frame in enumerate(frames):
            nbytes = frame.lengths().body
            if rank == main:
                bodies.append(self._body)
                continue
            body = torch.empty(nbytes, dtype=torch.uint8, device="cpu") if nbytes else None
            if body is not None:
                operations.append(self._line.receive(body, rank, self._wait, self._number))
            bodies.append(body)
        for operation in operations:
            self._line.channel.finish(operation)
        return bodies

    def _failed(self, failures: list[Failure]) -> Failure:
        names = list(dict.fromkeys(name for failure in failures for name in failure.names))
        return Failure("compute", "\n".join(failure.text for failure in failures), names, self.cause)

    def _reduced(self, results: list[list[Any]]) -> dict[int, Any] | Failure:
        collected = {}
        for place, (index, _) in enumerate(self._batch.collectors):
            entry = self._batch.entries[index]
            try:
                collected[index] = reduce_results(entry.definition.reduce, [each[place] for each in results])
            except Exception as error:
                main = self._line.channel.topology.main
                text = (
                    f"value {entry.name!r} at step {self._stamp.step} on main (rank {main}): what the ranks collected "
                    f"cannot be reduced: {describe_error(error)}"
                )
                return Failure("compute", text, [entry.name], error)
        return collected

    def give_back(self) -> None:
        """The sync failed: what this rank has observed is kept for the next one."""
        for name, numbers in self._observed:
            self._batch.state._return_observed(name, numbers)
        self._observed.clear()

"""Values come into force on this rank: they are derived, put on their device, held and applied."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from syncstate.context import Context
from syncstate.loop.batch import Batch
from syncstate.state import SharedState
from syncstate.wire.channel import Channel, Wait
from syncstate.wire.notes import Note, describe_error, traced

__all__ = ["Holder"]


class Holder:
    """Brings values of a state into force.

    Args:
        state: The values.
        seed: The engine's seed.
        channel: How ranks hear that all could apply what they received.

    Attributes:
        urgent: Whether main must ask before it sends again.
    """

    def __init__(self, state: SharedState, seed: int, channel: Channel) -> None:
        self._state = state
        self._seed = seed
        self._channel = channel
        self._unsettled: Batch | None = None
        self.urgent = False

    def put(
        self, batch: Batch, values: Sequence[Any], fields: dict[str, Any], applied_at: int, *, urgent: bool = True
    ) -> None:
        """New values: their records go on by a version, and they are held.

        Args:
            batch: Whose values.
            values: In the order of the batch.
            fields: What their contexts have in common; `step` is that of the computation.
            applied_at: The step of this call.
            urgent: Whether main asks before it sends again that all ranks could apply them.
        """
        steps = (fields["step"], applied_at)
        for record, value in zip(batch.records, values, strict=True):
            record.version += 1
            record.sent = value
            record.steps = steps
        if batch.lagged:
            for record in batch.records:
                if record.ahead:
                    record.ahead.pop(0)
        self.hold(batch, values, fields, urgent=urgent)

    def hold(self, batch: Batch, values: Sequence[Any], fields: dict[str, Any], *, urgent: bool = True) -> None:
        """Let the state hold what the records say, and run what the user wants to be run then."""
        if not batch.derives and not batch.applies and not batch.devices and not batch.scattered:
            self._state._update(batch.names, values)
            return
        held = list(values)
        if fields["is_main"]:
            for index in batch.scattered:
                held[index] = values[index][fields["rank"]]
        contexts = [
            Context.of(fields, entry.record.sent, self._seed, job.stream, entry.record.version)
            for entry, job in zip(batch.entries, batch.jobs, strict=True)
        ]
        for index, derive in batch.derives:
            with self._telling("derive", batch.names[index], fields):
                held[index] = derive(held[index], contexts[index])
        for index, device in batch.devices:
            with self._telling("placing the tensors", batch.names[index], fields):
                held[index] = _on_device(held[index], device)
        self._state._update(batch.names, held)
        for index, apply in batch.applies:
            with self._telling("apply", batch.names[index], fields):
                apply(held[index], contexts[index])
        self._channel.acknowledge()
        self._unsettled = batch
        self.urgent |= urgent

    def settle(self, step: int, *, leaving: bool = False) -> None:
        """Wait until every rank has applied what it received, if it had anything to apply.

        Args:
            step: Where training is.
            leaving: Whether this rank ends here.

        Raises:
            SyncStateError: A rank failed to, or did not answer in time.
        """
        batch, self._unsettled, self.urgent = self._unsettled, None, False
        if batch is not None:
            what = f"{batch.label}, waiting until every rank has applied it"
            self._channel.settle(Wait(what, step, batch.timeout, time.monotonic()), leaving=leaving)

    @contextmanager
    def _telling(self, what: str, name: str, fields: Mapping[str, Any]) -> Iterator[None]:
        """Run a user's function on this rank; its error reaches the others with value, step, rank and traceback."""
        try:
            yield
        except Exception as error:
            rank, step = self._channel.topology.rank, fields["step"]
            told = f"{what} of value {name!r} failed at step {step} on rank {rank}: {describe_error(error)}"
            self._channel.tell(Note("peer", rank, step, traced(told, error, rank)))
            error.add_note(f"syncstate: raised by {what} of value {name!r} at step {step} on rank {rank}")
            raise


def _on_device(value: Any, device: torch.device) -> Any:
    """A value with its tensors on a device; containers are made anew."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _on_device(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_device(item, device) for item in value)
    return value

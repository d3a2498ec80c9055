"""Parameter resyncs inside an engine: due by a schedule like values, run after them."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from syncstate.loop.opening import Opened, tell
from syncstate.loop.options import Resync
from syncstate.loop.rhythm import Rhythm
from syncstate.record import Record
from syncstate.schedule import Every
from syncstate.topology import process_group

__all__ = ["Chore", "bind_all"]


class Chore:
    """One resync of a run. What is due asks it the same questions as the entry of a value.

    Args:
        resync: The resync.
        number: Which of the engine's.
    """

    def __init__(self, resync: Resync, number: int) -> None:
        self.resync = resync
        self.name = f"resync {number}"
        self.schedule = resync.every
        self.rhythm = Rhythm(self.schedule, 1) if isinstance(self.schedule, Every) and self.schedule.announced else None
        self.again = self.schedule.unit == "once"
        self.record = Record()
        self.record.version = 1  # there is no first value to be computed

    def run(self, place: Mapping[str, Any], opened: Opened) -> Any:
        """Compare the replicas; returns the report. Collective.

        Args:
            place: `step` and `model` of this call.
            opened: What the engine talks through.
        """
        begun = time.monotonic()
        self.resync.host_model = place["model"]
        report = self.resync.serve(place["step"])
        if self.rhythm is not None:
            interval = self.rhythm.decide(place["step"], begun) if opened.topology.is_main else 0
            told = torch.tensor([interval], dtype=torch.int64, device="cpu")
            opened.channels[0].broadcast(told.view(torch.uint8), opened.wait("announcing the next resync"))
            self.rhythm.follow(place["step"], int(told[0]))
            self.rhythm.spend(time.monotonic() - begun)
        self.again = False
        return report


def bind_all(resyncs: Sequence[Resync], opened: Opened, group: Any, part: Callable[[str, int], Any]) -> list[Chore]:
    """Let resyncs run inside an engine.

    Args:
        resyncs: Which.
        opened: What the engine talks through.
        group: The engine's, as users give it.
        part: Makes a user's call a part of the engine's run.
    """
    bulk = process_group(group, opened.topology)
    try:
        for resync in resyncs:
            resync.bind(opened.topology, opened.channels[0], opened.meeting, opened.timeout, part, group=bulk)
    except BaseException as error:
        tell(opened, error, 0)
        opened.close(abrupt=True)
        raise
    return [Chore(resync, number) for number, resync in enumerate(resyncs)]

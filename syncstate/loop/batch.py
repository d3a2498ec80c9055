"""The values of one sync, with everything that every sync of the same values needs, worked out once."""

from collections.abc import Sequence

from syncstate.digest import digest_text
from syncstate.loop.plan import Entry

__all__ = ["Batch"]

_LABEL_NAMES = 4


class Batch:
    """The entries of one sync.

    Args:
        entries: In the plan's order, at least one.

    Attributes:
        entries, names, records: The entries, and what they are called and what the state keeps of them.
        timeout: Seconds; the largest of the entries'.
        digest: 8 bytes that tell this set of names from another.
        label: The names, for messages.
        jobs: (name, compute, record, spec) of each entry, for the main process.
        derives, applies: What runs on every rank when the values come into force, by index and by name.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = tuple(entries)
        self.names = tuple(entry.name for entry in entries)
        self.records = tuple(entry.record for entry in entries)
        self.timeout = max(entry.timeout for entry in entries)
        self.digest = digest_text("\0".join(self.names))[:8]
        # Tuples, because a sync of many small values spends its time on looking up attributes.
        self.jobs = tuple((entry.name, entry.compute, entry.record, entry.definition.spec) for entry in entries)
        derives = ((index, entry.definition.derive) for index, entry in enumerate(entries))
        self.derives = tuple((index, derive) for index, derive in derives if derive is not None)
        applies = ((entry.name, entry.definition.apply) for entry in entries)
        self.applies = tuple((name, apply) for name, apply in applies if apply is not None)
        shown = ", ".join(map(repr, self.names[:_LABEL_NAMES]))
        rest = len(self.names) - _LABEL_NAMES
        self.label = f"sync of {shown}" + (f" and {rest} more" if rest > 0 else "")

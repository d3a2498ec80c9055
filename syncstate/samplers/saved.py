"""What of a stamping batch sampler goes into a checkpoint: numbers and byte tensors only.

{"epoch": int,
 "batches": int or None,                      batches of the epoch that were trained on; None: a host skips them
 "drawn": int,                                batches of the epoch that have a stamp
 "stamps": [[int, uint8 tensor], ...],        from which batch on, the encoded values; those before "batches" apart
 "sampler": {...}}                            of the SharedIndexSampler below, where there is one
"""

from collections.abc import Mapping
from typing import Any

from syncstate.errors import CodecError, ConfigError
from syncstate.samplers.stamps import Stamp
from syncstate.samplers.walk import History
from syncstate.schedule import whole
from syncstate.wire.bits import as_bytes, as_tensor

__all__ = ["beginning", "check", "history", "saved"]


def beginning(epoch: int) -> dict[str, Any]:
    """The state at the beginning of an epoch."""
    return saved(epoch, 0, History())


def saved(epoch: int, batches: int | None, stamps: History) -> dict[str, Any]:
    """The state in an epoch."""
    kept = [[number, as_tensor(packed)] for number, packed in stamps.since(batches)]
    return {"epoch": epoch, "batches": batches, "drawn": stamps.drawn, "stamps": kept}


def history(state: Mapping[str, Any]) -> History:
    """The stamps of a saved state."""
    return History(state["drawn"], [(number, as_bytes(packed)) for number, packed in state["stamps"]])


def check(owner: str, state: Mapping[str, Any], names: tuple[str, ...], allow_pickle: bool) -> None:
    """Check what a user loads.

    Raises:
        ConfigError: Not such a state, or the stamps hold other values than `names`.
    """
    missing = [key for key in ("epoch", "batches", "drawn", "stamps") if key not in state]
    if missing:
        raise ConfigError(f"{owner}: the saved state has no {' and no '.join(missing)}")
    for key in ("epoch", "drawn") if state["batches"] is None else ("epoch", "batches", "drawn"):
        whole(owner, key, state[key], 0)
    try:
        stamps = [tuple(Stamp(as_bytes(packed), allow_pickle)) for _, packed in state["stamps"]]
    except (CodecError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{owner}: the saved stamps cannot be read: {error}") from error
    for stamp in stamps:
        if set(stamp) != set(names):
            raise ConfigError(f"{owner}: the saved stamps hold {', '.join(stamp)}, this sampler {', '.join(names)}")

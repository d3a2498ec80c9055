"""What all syncs of an engine have in common."""

from typing import NamedTuple

__all__ = ["Rules"]


class Rules(NamedTuple):
    """What all syncs of an engine have in common.

    Attributes:
        plan: First 8 bytes of the plan's digest.
        seed: The engine's seed.
        frame_bytes, max_bytes: Size of a frame and the largest payload.
        allow_pickle: Whether values may travel by pickle.
    """

    plan: bytes
    seed: int
    frame_bytes: int
    max_bytes: int
    allow_pickle: bool

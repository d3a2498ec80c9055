"""Bytes that one rank has and all others need, when they do not know how many come."""

import torch

from syncstate.wire.bits import as_bytes, as_tensor
from syncstate.wire.channel import Channel, Wait

__all__ = ["hand_round"]


def hand_round(channel: Channel, data: bytes | None, root: int, wait: Wait) -> bytes:
    """Bring bytes of one rank to all: their number in a first message, themselves in a second. Collective.

    Args:
        channel: The group.
        data: The bytes on the rank `root`; None elsewhere.
        root: The rank that has them.
        wait: What to say when it fails.

    Raises:
        SyncStateError: A rank failed, died or did not answer.
    """
    count = torch.tensor([0 if data is None else len(data)], dtype=torch.int64, device="cpu")
    channel.broadcast(count.view(torch.uint8), wait, root=root)
    if not int(count[0]):
        return b""
    body = torch.empty(int(count[0]), dtype=torch.uint8, device="cpu") if data is None else as_tensor(data)
    channel.broadcast(body, wait, root=root)
    return as_bytes(body)

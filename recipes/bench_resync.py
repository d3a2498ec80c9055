"""What a parameter resync takes: 256 tensors, beside what people use today. The rows are in `bench_rows`."""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from bench_lab import Lab, Operation
from bench_peers import installed
from torch import Tensor

from syncstate import Every, ParameterResync
from syncstate.digest import digest_tensor

__all__ = ["average_all", "compare_equal", "copy_all", "repair_one"]

_TENSORS = 256
_SHARE = 1 / 15  # of the configured repetitions


def compare_equal(lab: Lab) -> None:
    """A check that finds nothing, over one broadcast of all the bytes."""
    tensors, whole = _tensors(lab), _whole(lab)
    with _resync(tensors, "check") as resync:
        lab.ratio(
            "syncstate", _operation(resync.run, tensors), over=_raw(whole, tensors), want=_told(tensors),
            target={2: 0.30, 4: 0.20}, share=_SHARE,
        )  # fmt: skip
        lab.meet()
    peers = {"SHA-1 of every tensor": lambda: _operation(lambda _: _sha1(tensors), tensors)}
    for name, peer in installed(peers if lab.settings.peers else {}):
        lab.ratio(name, peer, over=_raw(whole, tensors), want=_told(tensors), share=_SHARE)


def repair_one(lab: Lab) -> None:
    """One number of one tensor is wrong on the last rank, over a check and the broadcast of a bucket."""
    tensors = _tensors(lab)
    want, bucket = _told(tensors), _whole(lab)[: 25 << 20]
    with _resync(tensors, "check") as check, _resync(tensors, "repair") as repair:

        def run(step: int) -> None:
            if lab.rank == lab.ranks - 1:
                tensors["tensor 100"][7] += 1.0
            repair.run(step)

        def check_and_send(step: int) -> None:
            check.run(step)
            dist.broadcast(bucket, src=0)

        lab.ratio(
            "syncstate", _operation(run, tensors), over=_operation(check_and_send, tensors), want=want,
            target={2: 1.2, 4: 1.2}, share=_SHARE,
        )  # fmt: skip
        lab.meet()


def copy_all(lab: Lab) -> None:
    """Everything is copied, over one broadcast of all the bytes and two copies of them in memory."""
    tensors, whole, other = _tensors(lab), _whole(lab), _whole(lab)
    want = _told(tensors)

    def send(_: int) -> None:
        other.copy_(whole)
        dist.broadcast(whole, src=0)
        other.copy_(whole)

    over = _operation(send, tensors)
    with _resync(tensors, "copy") as resync:

        def run(step: int) -> None:
            if lab.rank:  # no tensor is what it should be, so none can be passed over
                for tensor in tensors.values():
                    tensor[5] = step
            resync.run(step)

        limits = {2: 1.1, 4: 1.1}
        lab.ratio("syncstate", _operation(resync.run, tensors), over=over, want=want, target=limits, share=_SHARE)
        lab.ratio("syncstate, all differ", _operation(run, tensors), over=over, want=want, target=limits, share=_SHARE)
        lab.meet()
    peers: dict[str, Callable[[], Operation]] = {
        "a broadcast for each": lambda: _operation(lambda _: _send_each(tensors), tensors),
        "accelerate": lambda: _operation(_accelerate(tensors), tensors),
        "torch, coalesced": lambda: _operation(lambda _: _coalesced(tensors), tensors),
    }
    for name, peer in installed(peers if lab.settings.peers else {}):
        lab.ratio(name, peer, over=over, want=want, share=_SHARE)


def average_all(lab: Lab) -> None:
    """Everything is averaged, over one reduction of all the bytes and two copies of them in memory."""
    tensors, whole, other = _tensors(lab), _whole(lab).view(torch.float32), _whole(lab).view(torch.float32)

    def reduce(_: int) -> None:
        other.copy_(whole)
        dist.all_reduce(whole)
        other.copy_(whole)

    over = _operation(reduce, tensors)
    with _resync(tensors, "average") as resync:
        lab.ratio(
            "syncstate", _operation(resync.run, tensors), over=over, want=_told(tensors),
            target={2: 1.15, 4: 1.15}, share=_SHARE,
        )  # fmt: skip
        lab.meet()
    peers = {"torch, a reduction for each": lambda: _operation(lambda _: _reduce_each(tensors), tensors)}
    for name, peer in installed(peers if lab.settings.peers else {}):
        lab.ratio(name, peer, over=over, want=_told(tensors), share=_SHARE)


def _tensors(lab: Lab) -> dict[str, Tensor]:
    """The same on every rank; whole numbers, of which a mean over ranks is exact."""
    numbers, size = torch.Generator().manual_seed(0), (lab.settings.resync,)
    return {
        f"tensor {i}": torch.randint(-99, 99, size, generator=numbers).float() for i in range(_TENSORS)
    }  # fmt: skip


def _whole(lab: Lab) -> Tensor:
    return torch.zeros(4 * lab.settings.resync * _TENSORS, dtype=torch.uint8)


def _resync(tensors: dict[str, Tensor], mode: str) -> ParameterResync:
    return ParameterResync(tensors, every=Every(steps=1), mode=mode, on_drift=lambda report: None)


def _told(tensors: dict[str, Tensor]) -> list[str]:
    return [digest_tensor(tensor).hex() for tensor in tensors.values()]


def _operation(run: Callable[[int], Any], tensors: dict[str, Tensor]) -> Operation:
    step = 0

    def once() -> None:
        nonlocal step
        step += 1
        run(step)

    return Operation(once, lambda: _told(tensors))


def _raw(whole: Tensor, tensors: dict[str, Tensor]) -> Operation:
    return _operation(lambda _: dist.broadcast(whole, src=0), tensors)


def _sha1(tensors: dict[str, Tensor]) -> None:
    """As frameworks do that check for drift: a digest of all parameters, gathered as an object."""
    digest = hashlib.sha1(usedforsecurity=False)
    for tensor in tensors.values():
        digest.update(tensor.numpy().data)
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, digest.hexdigest())
    if len(set(held)) > 1:
        raise RuntimeError("the tensors differ")


def _send_each(tensors: dict[str, Tensor]) -> None:
    for tensor in tensors.values():
        dist.broadcast(tensor, src=0)


def _accelerate(tensors: dict[str, Tensor]) -> Callable[[int], Any]:
    from accelerate import PartialState
    from accelerate.utils import broadcast

    PartialState(cpu=True)
    return lambda _: broadcast(tensors)


def _coalesced(tensors: dict[str, Tensor]) -> None:
    group = dist.distributed_c10d._get_default_group()
    dist._broadcast_coalesced(group, list(tensors.values()), 25 << 20, 0)


def _reduce_each(tensors: dict[str, Tensor]) -> None:
    for tensor in tensors.values():
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()

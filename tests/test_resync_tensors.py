"""Which tensors a resync looks at, what it sees of them, and how it cuts and compares them."""

import math
from typing import Any

import pytest
import torch
from exact import tensor_bits
from expect import refuses
from hypothesis import given
from hypothesis import strategies as st
from ranks import returned, run_ranks
from torch import Tensor, nn

from syncstate import Every
from syncstate.digest import digest_tensor
from syncstate.errors import ConfigError
from syncstate.resync import ParameterResync
from syncstate.resync.bits import EQUAL, difference, parts, whole
from syncstate.resync.buckets import fill
from syncstate.resync.digests import Digests
from syncstate.resync.items import tensor_item
from syncstate.resync.tensors import Survey
from syncstate.resync.walk import unwrap

EACH = Every(steps=1)
CPU = torch.device("cpu")


def names(
    module: Any, include: tuple[str, ...] = ("parameters", "buffers"), exclude: tuple[Any, ...] = ()
) -> list[str]:
    selection = Survey(include, exclude, (0,)).look(module)
    selection.check_matched()
    return [item.name for item in selection.items]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Part()
        self.second = Part()
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.register_buffer("nothing", None)


# ---------------------------------------------------------------- names


def test_frozen_parameters_and_buffers_that_are_not_saved_count() -> None:
    norm = ["bias", "num_batches_tracked", "running_mean", "running_var", "weight"]
    linear = ["bias", "weight"]
    inside = [f"{part}.inner.{key}" for part in ("first", "second") for key in linear]
    inside += [f"{part}.norm.{key}" for part in ("first", "second") for key in norm]
    assert names(Whole()) == sorted([*inside, "frozen", "hidden"])
    assert names(Whole(), ("buffers",)) == [
        *(f"first.norm.{key}" for key in norm[1:4]),
        "hidden",
        *(f"second.norm.{key}" for key in norm[1:4]),
    ]
    assert "hidden" not in names(Whole(), ("parameters",))


def test_tied_tensors_count_once_under_their_first_name() -> None:
    module = Whole()
    module.second.inner.weight = module.first.inner.weight
    module.second.norm.running_mean = module.first.norm.running_mean
    # Not the same object, but the very same memory.
    module.second.inner.bias = nn.Parameter(module.first.inner.bias.detach())
    found = names(module)
    assert "first.inner.weight" in found
    for tied in ("second.inner.weight", "second.inner.bias", "second.norm.running_mean"):
        assert tied not in found
    # A part of another tensor is one of its own.
    assert names({"a": module.frozen, "b": module.frozen[:1]}) == ["a", "b"]


@pytest.mark.parametrize(
    ("exclude", "gone"),
    [
        (("first.*",), "first."),
        (("*.weight", "frozen"), "frozen"),
        ((nn.BatchNorm1d,), "norm"),
        ((Part,), "inner"),
    ],
)
def test_patterns_and_classes_are_left_out(exclude: tuple[Any, ...], gone: str) -> None:
    left = names(Whole(), exclude=exclude)
    assert left
    assert [name for name in left if gone in name] == []


def test_a_tied_tensor_is_left_out_by_any_of_its_names() -> None:
    module = Whole()
    module.second.inner.weight = module.first.inner.weight
    assert "first.inner.weight" not in names(module, exclude=("second.inner.weight",))


@pytest.mark.parametrize(
    ("exclude", "told"), [("frist.*", "'frist.*'"), (nn.Conv2d, "Conv2d"), ("optimizer.*", "'optimizer.*'")]
)
def test_what_matches_nothing_is_refused(exclude: Any, told: str) -> None:
    resync = ParameterResync(Whole(), every=EACH, exclude=["*.bias", exclude])
    with refuses(
        f"resync: exclude: {told} matches no parameter, buffer or module; the names are frozen, hidden, "
        "first.inner.weight, first.inner.bias, first.norm.weight, first.norm.bias, first.norm.running_mean, "
        "first.norm.running_var, ..."
    ):
        resync.run(0)


def test_wrappers_leave_no_trace_in_names() -> None:
    module = Whole()
    plain = names(module)
    module.first = torch.compile(module.first, backend="eager")  # type: ignore[assignment]
    compiled: Any = torch.compile(module, backend="eager")
    assert names(compiled) == plain
    assert unwrap(compiled) is module
    assert names(nn.DataParallel(compiled)) == plain
    own = nn.ModuleDict({"module": nn.Linear(1, 1), "a_orig_mod": nn.Linear(1, 1)})
    assert names(own) == ["a_orig_mod.bias", "a_orig_mod.weight", "module.bias", "module.weight"]


def test_a_mapping_goes_by_its_keys_in_any_order() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    assert names({"b": b, "a": a}) == names({"a": a, "b": b}) == ["a", "b"]
    with refuses("resync: a mapping must hold tensors under names, got 3 under 'a'"):
        names({"a": 3})
    with refuses("resync: a mapping must hold tensors under names, got tensor([1.]) under 5"):
        names({5: b})


def freed(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def test_what_was_seen_holds_until_a_tensor_is_replaced_moved_or_resized() -> None:
    module = Whole()
    survey = Survey(("parameters", "buffers"), (), (0,))
    first = survey.look(module)
    with torch.no_grad():
        module.frozen.add_(1)
    assert survey.look(module) is first
    changes: list[Any] = [
        lambda: setattr(module, "frozen", nn.Parameter(torch.zeros(2))),
        lambda: setattr(module.frozen, "data", torch.zeros(2)),
        lambda: module.double(),
        lambda: module.hidden.resize_(1),  # type: ignore[operator]
        lambda: module.register_buffer("more", torch.zeros(1)),
    ]
    for change in changes:
        change()
        seen = survey.look(module)
        assert seen is not first
        assert survey.look(module) is seen
        first = seen
    kept = module.frozen.untyped_storage().nbytes()
    freed(module.frozen)
    with pytest.raises(ConfigError, match=r"^resync: 'frozen' is a tensor whose memory was freed"):
        survey.look(module)
    module.frozen.untyped_storage().resize_(kept)
    flipped = {"z": torch.ones(2, dtype=torch.complex64)}
    survey.look(flipped)
    flipped["z"].data = flipped["z"].data.conj()
    with pytest.raises(ConfigError, match=r"^resync: 'z' is a lazily conjugated view"):
        survey.look(flipped)
    found = {item.name: item.about for item in first.items}
    assert found["frozen"] == "float64 [2] cpu"
    assert found["hidden"] == "float64 [1] cpu"
    assert found["more"] == "float32 [1] cpu"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "layout torch.strided, nested"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "lazily conjugated"),
        (lambda: freed(torch.ones(2)), "whose memory was freed"),
        (lambda: torch._efficientzerotensor((2,)), "or that never had any"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_without_bits_of_its_own_is_refused_unless_left_out(make: Any, told: str) -> None:
    module = nn.Module()
    module.register_buffer("odd", make())
    module.register_buffer("even", torch.ones(2))
    with pytest.raises(ConfigError, match=f"^resync: 'odd' is .*{told}.* leave it out with exclude$"):
        names(module)
    assert names(module, exclude=("odd",)) == ["even"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": None}, "resync: every must be Every(...), At([...]) or Once(), got None"),
        ({"mode": "fix"}, "resync: mode must be 'check' or 'repair' or 'copy' or 'average', got 'fix'"),
        ({"source": 1}, "resync: source must be 'main' or 'majority', got 1"),
        (
            {"source": "majority", "mode": "copy"},
            "resync: source='majority' compares, so mode must be 'check' or 'repair', got 'copy'",
        ),
        ({"include": ()}, "resync: include must name some of 'parameters', 'buffers', got ()"),
        ({"include": ["grads"]}, "resync: include must name some of 'parameters', 'buffers', got ['grads']"),
        (
            {"exclude": [3]},
            "resync: exclude takes name patterns such as 'head.*' and module classes such as torch.nn.BatchNorm2d, "
            "got 3",
        ),
        ({"exclude": 3}, "resync: exclude must be a list of name patterns and module classes, got 3"),
        ({"optimizer": 3}, "resync: optimizer must be a torch.optim.Optimizer or a list of them, got 3"),
        ({"bucket_bytes": 8}, "resync: bucket_bytes must be a whole number of at least 16, got 8"),
        ({"on_drift": "ignore"}, "resync: on_drift must be 'warn' or 'raise' or a callable, got 'ignore'"),
        ({"timeout": 0}, "resync: timeout must be a finite number of seconds above 0 or a timedelta, got 0"),
        ({"module": 3}, "resync: module must be a torch.nn.Module or a mapping of tensors, got 3"),
    ],
)
def test_an_impossible_setting_is_refused(settings: dict[str, Any], message: str) -> None:
    with refuses(message):
        ParameterResync(**{"every": EACH, **settings})


def test_without_a_host_a_module_is_needed_and_every_always() -> None:
    with refuses("resync: no module was given, and there is no host whose model could be taken"):
        ParameterResync(every=EACH).run(0)
    with pytest.raises(TypeError, match="every"):
        ParameterResync(nn.Linear(1, 1))  # type: ignore[call-arg]


# ---------------------------------------------------------------- every kind of tensor


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]


def kinds(seed: int) -> dict[str, Tensor]:
    """Every dtype and layout, with any bits."""
    generator = torch.Generator().manual_seed(seed)

    def anything(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if dtype is torch.bool:
            return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
        size = math.prod(shape) * dtype.itemsize
        return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)

    found = {str(dtype): anything((5, 7), dtype) for dtype in DTYPES}
    found |= {
        "0-dim": anything((1,), torch.float64).reshape(()),
        "0-dim bool": anything((1,), torch.bool).reshape(()),
        "empty": torch.zeros(0, 3),
        "meta": torch.zeros(4, device="meta"),
        "column": anything((6, 9), torch.float32)[:, 2],
        "transposed": anything((6, 9), torch.bfloat16).t(),
        "stepped": anything((40,), torch.int16)[::3],
        "channels last": anything((2, 3, 4, 5), torch.float32).to(memory_format=torch.channels_last),
        "expanded": anything((1, 3), torch.int64).expand(4, 3),
        "long rows": anything((3, 30), torch.float64),
        "deep": anything((1, 2, 1, 3, 9), torch.complex128),
        "offset": anything((9,), torch.uint8)[3:],
    }
    return found


def repairs_every_kind(rank: int, mode: str, on_device: bool, bucket_bytes: int) -> Any:
    tensors = kinds(rank)
    if rank == 1:
        # The layout is each rank's own affair.
        tensors["channels last"] = tensors["channels last"].contiguous()
        tensors["expanded"] = tensors["expanded"].contiguous()
    around = tensors["column"].as_strided((6, 9), (9, 1), 0)
    neighbours = around[:, [0, 1, 3]].clone()
    with ParameterResync(tensors, every=EACH, mode=mode, timeout=30, bucket_bytes=bucket_bytes) as resync:
        resync._on_device = on_device
        report, again = resync.run(0), resync.run(1)
    assert again.drifted == []
    assert torch.equal(around[:, [0, 1, 3]].view(torch.int32), neighbours.view(torch.int32))
    return {name: tensor_bits(tensor) for name, tensor in tensors.items() if not tensor.is_meta}, len(report.drifted)


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "as on an accelerator"])
@pytest.mark.parametrize("bucket_bytes", [16, 1 << 20])
@pytest.mark.parametrize("mode", ["repair", "copy"])
def test_every_kind_of_tensor_ends_equal_to_the_bit(mode: str, bucket_bytes: int, on_device: bool) -> None:
    want, had = (
        {name: tensor_bits(tensor) for name, tensor in kinds(seed).items() if not tensor.is_meta} for seed in (0, 1)
    )
    (ours, first), (theirs, second) = returned(run_ranks(repairs_every_kind, 2, mode, on_device, bucket_bytes))
    assert ours == want
    assert theirs == want
    assert first == second == sum(want[name] != had[name] for name in want)


# ---------------------------------------------------------------- cutting


@given(
    shapes=st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=6),
    limit=st.integers(16, 400),
    seed=st.integers(0, 99),
)
def test_buckets_hold_every_element_once_in_order_and_are_cut_alike_for_any_layout(
    shapes: list[list[int]], limit: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtypes = [torch.uint8, torch.int16, torch.int32, torch.int64]
    views = []
    for number, shape in enumerate(shapes):
        count = math.prod(shape)
        views.append((number, torch.arange(count).to(dtypes[(number + seed) % 4]).reshape(shape)))
    buckets = fill(views, limit, CPU, torch.uint8)
    turned = []
    for number, view in views:
        order = torch.randperm(view.ndim, generator=generator).tolist()
        back = sorted(range(view.ndim), key=order.__getitem__)
        turned.append((number, view.permute(order).contiguous().permute(back)))
    again = fill(turned, limit, CPU, torch.uint8)
    layout = [[(p.key, p.offset, p.view.shape) for p in bucket.pieces] for bucket in buckets]
    assert layout == [[(p.key, p.offset, p.view.shape) for p in bucket.pieces] for bucket in again]
    for number, view in views:
        row = [p.view.reshape(-1) for bucket in buckets for p in bucket.pieces if p.key == number]
        assert torch.equal(torch.cat(row), view.reshape(-1))
    for bucket in buckets:
        assert bucket.size <= limit
        end = 0
        for piece in bucket.pieces:
            assert piece.offset % 8 == 0
            assert piece.offset >= end
            end = piece.offset + piece.view.numel() * piece.view.element_size()
        assert end <= bucket.size


def test_a_large_tensor_fills_buckets_to_the_brim() -> None:
    found = parts(torch.zeros(1000, 1000), 4_000_000, 400_000, 4)
    assert [sum(part.numel() for part in bucket) for bucket in found] == [1_000_000]
    found = parts(torch.zeros(1000, 1000), 40_000, 400_000, 4)
    assert [sum(part.numel() for part in bucket) for bucket in found] == [10_000, *[100_000] * 9, 90_000]


# ---------------------------------------------------------------- comparing


@pytest.mark.parametrize(
    ("a", "b", "dtype", "largest"),
    [
        ([1.0, 2.0], [1.0, 2.5], torch.float32, 0.5),
        ([math.nan, 1.0], [math.nan, 3.0], torch.float32, 2.0),
        ([math.nan, 1.0], [0.0, 1.0], torch.float32, math.inf),
        ([math.inf, 1.0], [math.inf, 2.0], torch.float64, 1.0),
        ([math.inf], [-math.inf], torch.float64, math.inf),
        ([0.0], [-0.0], torch.float32, 0.0),
        ([True, False], [True, True], torch.bool, 1.0),
        ([-3, 4], [5, 4], torch.int8, 8.0),
        ([1 + 1j], [4 + 5j], torch.complex64, 5.0),
        ([1 + 1j, 2], [1 + 1j, 2 + 1j], torch.complex128, 1.0),
        ([1.5], [1.0], torch.float8_e5m2, 0.5),
        ([2**53, 7], [2**53 + 1, 7], torch.int64, 1.0),
        ([-(2**63)], [2**63 - 1], torch.int64, 2.0**64),
        ([2**64 - 2, 0], [2**64 - 1, 0], torch.uint64, 1.0),
        ([0], [2**64 - 1], torch.uint64, 2.0**64),
    ],
)
def test_the_largest_difference_of_numbers(a: Any, b: Any, dtype: torch.dtype, largest: float) -> None:
    mine, other = torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype)
    assert difference(whole(mine), whole(other), dtype) == largest
    assert difference(whole(mine), whole(mine.clone()), dtype) == EQUAL


def test_what_torch_cannot_convert_to_numbers_differs_by_infinity() -> None:
    mine, other = (torch.tensor(bits, dtype=torch.uint8).view(torch.float4_e2m1fn_x2) for bits in ([1, 2], [1, 3]))
    assert difference(whole(mine), whole(other), mine.dtype) == math.inf
    assert difference(whole(mine), whole(mine), mine.dtype) == EQUAL


def test_a_difference_is_found_wherever_it_is() -> None:
    a = torch.zeros(300, 400)
    for index in ((0, 0), (299, 399), (150, 7)):
        b = a.clone()
        b[index] = 3
        assert difference(whole(a), whole(b), torch.float32) == 3
        assert difference(whole(a.t()), whole(b.t()), torch.float32) == 3


# ---------------------------------------------------------------- digests


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "as on an accelerator"])
def test_a_digest_depends_on_every_bit_and_its_place_and_not_on_the_layout(on_device: bool) -> None:
    digests = Digests(on_device)

    def digest(tensor: Tensor) -> bytes:
        item = tensor_item("x", tensor)
        (one,) = digests.each([item])
        assert len(one) == 16
        return one

    base = torch.randn(64, 33, generator=torch.Generator().manual_seed(1))
    want = digest(base)
    assert digest(base.clone()) == want
    assert digest(base.t().contiguous().t()) == want
    for position in (0, 1, 1056, 2111):
        for bit in range(32):
            changed = base.clone()
            changed.view(torch.int32).view(-1)[position] ^= torch.tensor(-(1 << 31) if bit == 31 else 1 << bit).int()
            assert digest(changed) != want
    # What sums and exclusive ors are blind to: an exchange, two equal changes, two signs, a shift.
    swapped = base.clone()
    swapped[3, 4], swapped[50, 6] = base[50, 6], base[3, 4]
    pair = base.clone()
    pair.view(torch.int32)[2:4, 7] ^= 1 << 20
    signs = base.clone()
    signs[10, 3], signs[40, 5] = -base[10, 3], -base[40, 5]
    for other in (swapped, pair, signs, base.roll(1), base.flip(0)):
        assert digest(other) != want
    assert len({digest(torch.zeros(n, dtype=torch.uint8)) for n in (1, 7, 8, 9, 4096)}) == (3 if on_device else 5)


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "as on an accelerator"])
def test_of_many_tensors_only_the_group_with_a_change_differs(on_device: bool) -> None:
    digests = Digests(on_device)
    sizes = [1, 3, 20_000, 5, 100_000, 2, 9, 16_385]
    tensors = [torch.randn(size) for size in sizes]
    items = [tensor_item(str(index), tensor) for index, tensor in enumerate(tensors)]
    before, each = digests.groups(items, 3), digests.each(items)
    assert len(before) == 3
    tensors[4][77_777] += 1
    after, each_after = digests.groups(items, 3), digests.each(items)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]
    assert [a == b for a, b in zip(each, each_after, strict=True)] == [index != 4 for index in range(8)]


def test_on_the_cpu_a_digest_of_a_dense_tensor_reads_it_where_it_lies() -> None:
    tensor = torch.randn(1000)[100:200]
    (found,) = Digests().each([tensor_item("x", tensor)])
    (again,) = Digests().each([tensor_item("x", tensor.clone())])
    assert found == again
    freed = torch.zeros(10)
    item = tensor_item("x", freed)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="storage of the tensor has been freed"):
        Digests().each([item])
    assert digest_tensor(tensor) == digest_tensor(tensor.clone())

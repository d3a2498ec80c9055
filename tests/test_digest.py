import numpy as np
import pytest
import torch
import xxhash

from syncstate.digest import digest_bytes, digest_tensor, digest_text, flat_bytes


def test_digests_are_16_bytes_of_xxh3() -> None:
    assert digest_bytes(b"abc") == digest_text("abc") == xxhash.xxh3_128_digest(b"abc")
    assert len(digest_bytes(b"")) == len(digest_tensor(torch.ones(3))) == 16


def test_bytes_like_objects_have_the_digest_of_their_bytes() -> None:
    assert digest_bytes(bytearray(b"abc")) == digest_bytes(memoryview(b"abc")) == digest_bytes(b"abc")


def test_lone_surrogates_have_a_digest_of_their_own() -> None:
    assert len({digest_text("\ud800"), digest_text("\ud801"), digest_text("?")}) == 3


BASE = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    "same",
    [
        BASE.clone(),
        BASE.t().contiguous().t(),
        torch.stack([BASE, BASE + 1], -1)[..., 0],
        BASE.clone().requires_grad_(),
        torch.nn.Parameter(BASE.clone()),
        torch.arange(100.0)[:12].view(3, 4),
        torch.view_as_complex(torch.stack([-BASE, -BASE], -1)).conj().imag,
    ],
    ids=["copy", "transposed", "strided", "requires_grad", "parameter", "slice", "lazily negated"],
)
def test_layout_does_not_count(same: torch.Tensor) -> None:
    assert torch.equal(same, BASE)
    assert digest_tensor(same) == digest_tensor(BASE)


@pytest.mark.parametrize(
    "other",
    [
        BASE.view(4, 3),
        BASE.view(12),
        BASE.view(3, 4, 1),
        BASE.view(torch.int32),
        BASE.flip(0),
        BASE.double(),
        torch.nextafter(BASE, BASE + 1),
        torch.cat([BASE.view(-1)[[1, 0]], BASE.view(-1)[2:]]).view(3, 4),
        torch.where(BASE == 0, -0.0, BASE),
    ],
    ids=["shape", "flat", "more dims", "dtype", "permuted", "double", "one ulp", "swapped pair", "negative zero"],
)
def test_shape_dtype_position_and_every_bit_count(other: torch.Tensor) -> None:
    assert digest_tensor(other) != digest_tensor(BASE)


def test_nan_equals_the_same_nan_and_not_another() -> None:
    bits = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert digest_tensor(bits[:1]) == digest_tensor(torch.tensor([float("nan")]))
    assert digest_tensor(bits[:1]) != digest_tensor(bits[1:])


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float8_e5m2, torch.uint64, torch.complex32])
def test_every_dtype_has_a_digest(dtype: torch.dtype) -> None:
    tensor = torch.arange(8, dtype=torch.uint8).clamp(max=1).view(dtype)
    assert digest_tensor(tensor) != digest_tensor(tensor.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
def test_scalars_and_empty_tensors_have_a_digest(shape: tuple[int, ...]) -> None:
    assert digest_tensor(torch.zeros(shape)) == digest_tensor(torch.zeros(shape))
    assert digest_tensor(torch.zeros(shape)) != digest_tensor(torch.zeros(*shape, 1))


def test_flat_bytes_share_contiguous_memory_and_copy_the_rest() -> None:
    assert flat_bytes(BASE).data_ptr() == BASE.data_ptr()
    assert flat_bytes(BASE.t()).data_ptr() != BASE.data_ptr()
    assert flat_bytes(BASE[1:, 1]).numpy().tobytes() == np.array([5, 9], "f4").tobytes()
    assert flat_bytes(BASE[1:2, 1]).numpy().tobytes() == np.array([5], "f4").tobytes()


def test_tensors_without_memory_are_refused() -> None:
    whole = torch.ones(3)
    parts = [whole, whole[1:], whole[::2]]
    whole.untyped_storage().resize_(0)
    for tensor in parts:
        with pytest.raises(ValueError, match="freed"):
            digest_tensor(tensor)
    with pytest.raises(ValueError, match="meta"):
        digest_tensor(torch.ones(3, device="meta"))

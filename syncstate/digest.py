"""Content digests: 16 bytes that differ when a text, some bytes or a tensor differ.

The hash is xxh3_128, which runs at memory speed and depends on the position of every byte. It finds differences, it
does not withstand someone who looks for collisions.
"""

from operator import mul

import torch
import xxhash

__all__ = ["digest_bytes", "digest_tensor", "digest_text", "flat_bytes", "in_storage"]


def digest_bytes(data: bytes | bytearray | memoryview) -> bytes:
    """Returns the 16-byte digest of `data`."""
    return xxhash.xxh3_128_digest(data)


def digest_text(text: str) -> bytes:
    """Returns the 16-byte digest of `text`; lone surrogates count as they are."""
    return xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"))


def digest_tensor(tensor: torch.Tensor) -> bytes:
    """Returns the 16-byte digest of a tensor's dtype, shape and bits.

    The bits are compared, not the numbers: NaN equals the same NaN, and 0.0 differs from -0.0. How the tensor lies in
    memory (strides, device) does not count.

    Raises:
        ValueError: the tensor has no bits of its own (meta, freed storage).
        RuntimeError: torch cannot lay it out (sparse, nested, quantized).
    """
    digest = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
    digest.update(flat_bytes(tensor).numpy().data)
    return digest.digest()


def in_storage(tensor: torch.Tensor) -> bool:
    """Whether all elements of a strided tensor lie in its storage; touching one that does not would end the process."""
    if not tensor.numel():
        return True
    end = tensor.storage_offset() + sum(map(mul, tensor.shape, tensor.stride())) - sum(tensor.stride()) + 1
    return bool(tensor.untyped_storage().nbytes() >= end * tensor.element_size())


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bits of a tensor as a flat uint8 tensor on the CPU, in the order of its indices.

    The result shares the memory of a contiguous CPU tensor; anything else is copied.

    Raises:
        ValueError: the tensor is on the meta device, or its storage has been freed.
        RuntimeError: torch cannot lay it out (sparse, nested, quantized).
    """
    if tensor.is_meta:
        raise ValueError("a meta tensor has no data")
    numel = tensor.numel()
    if not in_storage(tensor):
        raise ValueError("the storage of the tensor has been freed")
    flat = tensor.detach()
    if not flat.is_cpu:
        flat = flat.cpu()
    if flat.dtype is torch.complex32 and not flat.is_conj():
        flat = flat.view(torch.int32)  # copying complex32 as such works too, with a warning
    flat = flat.resolve_conj().resolve_neg().contiguous()
    if numel and flat.data_ptr() == 0:
        flat = flat.clone()  # torch's lazy zeros own no memory until they are copied
    # Not view(-1): it keeps the odd stride that a dimension of one element may have.
    return flat.as_strided((numel,), (1,)).view(torch.uint8)

"""How it travels: values to bytes, frames, and the private process group that carries them."""

from syncstate.wire.codec import decode, encode

__all__ = ["decode", "encode"]

"""Numbers that a rank observes between syncs, such as losses: a bounded ring of detached tensors."""

from collections import deque
from typing import Any

import torch

from syncstate.errors import ConfigError

__all__ = ["Ring"]


class Ring:
    """The newest numbers of one rank, oldest first.

    Args:
        capacity: How many numbers are kept.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._parts: deque[torch.Tensor] = deque()
        self._held = 0

    def push(self, value: Any) -> None:
        """Add a tensor of any shape, or a number. Detached and copied; does not wait for the device."""
        try:
            numbers = value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(value)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"observe takes tensors and numbers, got {value!r}") from error
        if numbers.is_complex():
            raise ConfigError(f"observe takes real numbers, got {numbers.dtype}; observe x.abs() or its parts")
        numbers = numbers.reshape(-1)[-self._capacity :]
        if not numbers.numel():
            return
        # Copied after it is cut, so that no more memory than the capacity is held.
        self._parts.append(numbers.to(torch.float32 if numbers.dtype != torch.float64 else torch.float64, copy=True))
        self._held += self._parts[-1].numel()
        while self._held - self._parts[0].numel() >= self._capacity:
            self._held -= self._parts.popleft().numel()

    def numbers(self) -> torch.Tensor:
        """All that is kept: 1-D, on the CPU."""
        return torch.cat([part.cpu() for part in self._parts])[-self._capacity :] if self._parts else torch.empty(0)

    def take(self) -> torch.Tensor:
        """All that is kept, which is then kept no longer."""
        taken = self.numbers()
        self._parts.clear()
        self._held = 0
        return taken

    def give_back(self, taken: torch.Tensor) -> None:
        """Put numbers back before those that came later: nobody has received them."""
        later = list(self._parts)
        self._parts.clear()
        self._held = 0
        for part in (taken, *later):
            if part.numel():
                self._parts.append(part)
                self._held += part.numel()
        while self._parts and self._held - self._parts[0].numel() >= self._capacity:
            self._held -= self._parts.popleft().numel()

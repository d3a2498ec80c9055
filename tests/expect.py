"""What several test modules expect in the same words."""

import re
from typing import Any

import pytest

from syncstate.errors import ConfigError

__all__ = ["refuses"]


def refuses(message: str) -> Any:
    """Raises a `ConfigError` with exactly this message."""
    return pytest.raises(ConfigError, match=f"^{re.escape(message)}$")

"""What can go wrong, as a tree.

    SyncStateError(RuntimeError)      everything that syncstate raises on purpose
    |-- ConfigError(ValueError)       an unknown or impossible setting, found before anything is sent
    |-- NotReady(KeyError)            a value was read before its first sync
    |-- CodecError(TypeError)         a value that cannot travel, or bytes that are no value
    |-- ComputeError                  a source failed on the main process; every rank raises it, the engine goes on
    |-- MismatchError                 ranks disagree: plans, steps, or a value and its spec
    |-- SyncTimeout(TimeoutError)     a sync did not finish in its time
    |-- PeerError                     another rank failed, left or died
    `-- DriftError                    parameters or buffers differ between replicas

`PeerError`, `SyncTimeout`, `DriftError` and a `MismatchError` of steps end the engine.
"""

__all__ = [
    "CodecError",
    "ComputeError",
    "ConfigError",
    "DriftError",
    "MismatchError",
    "NotReady",
    "PeerError",
    "SyncStateError",
    "SyncTimeout",
]


class SyncStateError(RuntimeError):
    """Base of every error that syncstate raises on purpose."""


class ConfigError(SyncStateError, ValueError):
    """A setting is unknown or impossible; says what was given and what is allowed."""


class NotReady(SyncStateError, KeyError):
    """A value was read before its first sync; says when it comes."""

    # KeyError shows the repr of its argument, which hides the line breaks and doubles the quotes of a sentence.
    __str__ = RuntimeError.__str__


class CodecError(SyncStateError, TypeError):
    """A value that cannot travel, with the path inside it, or bytes that are not a value."""


class ComputeError(SyncStateError):
    """A source failed; raised on every rank with the text of the original error. Later syncs work."""


class MismatchError(SyncStateError):
    """Ranks disagree about what to sync, or a value differs from what was promised of it."""


class SyncTimeout(SyncStateError, TimeoutError):
    """A sync did not finish in its time; says for whom it waited."""


class PeerError(SyncStateError):
    """Another rank failed, left early or died; names it and its cause as far as they are known."""


class DriftError(SyncStateError):
    """Parameters or buffers differ between replicas.

    Attributes:
        report: The `DriftReport`, which says which tensors, on which ranks, by how much.
    """

    def __init__(self, text: str = "", report: object = None) -> None:
        super().__init__(text)
        self.report = report

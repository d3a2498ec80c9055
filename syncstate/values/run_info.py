"""One run directory and one name of the run, made on the main process and known to every rank."""

import os
import secrets
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any

from syncstate.context import Context
from syncstate.errors import ConfigError

__all__ = ["RunInfo"]

_TIME = "%Y-%m-%d_%H-%M-%S"


class RunInfo:
    """The run's directory and name: a dict with `run_dir` (an absolute path, str), `run_id` (str) and `extra`.

    Ranks that start a second apart read another time from their clocks and make two directories. Here only main looks
    at the clock, makes the directory and tells the others; what a config resolves to on the other ranks does not
    count. One `RunInfo` is one run: every refresh gives the same, and a resumed run keeps what its checkpoint holds.
    Add it with `every=Once()`.

    `run_id` is a time and 32 random bits from the system's entropy, such as `20260131-235959-1f0c9a7e`; no seed
    changes it.

    Args:
        run_dir: A path, or a pattern in which `{time}` (or `{time:%Y%m%d}`, as in `strftime`) and `{run_id}` are filled
            in, or a function of a `Context` that returns one; main makes the directory. None: the directory that Hydra
            has made for main, else main's working directory. Two runs that may start in the same second need
            `{run_id}`. Other nodes see the directory only if they share the file system.
        extra: What else all ranks should know: anything that can travel, or a function of a `Context` that returns it.
            An OmegaConf config is resolved on main and arrives as plain dicts and lists.

    Raises:
        ConfigError: A `run_dir` of another type, or a pattern with other fields.

    Example::

        state.add("run", RunInfo("runs/{time}_{run_id}", extra=cfg.model), every=Once())
        engine.start()
        logger = CSVLogger(state["run"]["run_dir"])  # the same on every rank
    """

    def __init__(
        self,
        run_dir: str | PathLike[str] | Callable[[Context], str | PathLike[str]] | None = None,
        *,
        extra: Any = None,
    ) -> None:
        if run_dir is not None and not callable(run_dir):
            _filled(run_dir, "run_id", datetime.now())  # a pattern that cannot be filled is an error here already
        self.run_dir = run_dir
        self.extra = extra
        self._made: dict[str, Any] | None = None

    def compute(self, ctx: Context) -> dict[str, Any]:
        """The run's directory, made if it was not there, and its name."""
        if ctx.previous is not None:  # of this run, or of the one that it resumes
            return dict(ctx.previous)
        # A sync that failed for another reason is tried again; it must not make a second directory.
        if self._made is None:
            self._made = self._make(ctx)
        return dict(self._made)

    def _make(self, ctx: Context) -> dict[str, Any]:
        now = datetime.now()
        run_id = f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"
        given = self.run_dir(ctx) if callable(self.run_dir) else self.run_dir
        path = Path(_hydras() or Path.cwd()) if given is None else _filled(given, run_id, now)
        if given is not None:
            path.mkdir(parents=True, exist_ok=True)
        extra = self.extra(ctx) if callable(self.extra) else self.extra
        return {"run_dir": str(path), "run_id": run_id, "extra": _plain(extra)}


def _filled(given: Any, run_id: str, now: datetime) -> Path:
    """An absolute path, its fields filled in."""
    if not isinstance(given, (str, PathLike)) or not os.fspath(given):
        raise ConfigError(
            f"RunInfo: run_dir must be a path, a pattern, a function that returns one, or None, got {given!r}"
        )
    try:
        text = os.fspath(given).format(time=_Time.of(now), run_id=run_id)
    except (LookupError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"RunInfo: run_dir={os.fspath(given)!r} cannot be filled in ({type(error).__name__}: {error}); its fields "
            "are {time}, {time:%Y%m%d} and {run_id}, and a brace that stands for itself is written twice"
        ) from error
    return Path(os.path.abspath(os.path.expanduser(text)))


class _Time(datetime):
    """A time that is written without spaces and colons unless a format is given."""

    @classmethod
    def of(cls, time: datetime) -> "_Time":
        return cls.fromtimestamp(time.timestamp())

    def __format__(self, form: str) -> str:
        return super().__format__(form or _TIME)


def _hydras() -> str | None:
    """The output directory of the Hydra job that this process runs, if it is one."""
    if "hydra.core.hydra_config" not in sys.modules:  # then no job has begun, and nothing needs to be loaded
        return None
    from hydra.core.hydra_config import HydraConfig

    return str(HydraConfig.get().runtime.output_dir) if HydraConfig.initialized() else None


def _plain(given: Any) -> Any:
    """OmegaConf containers, at any depth, as dicts and lists with their interpolations resolved; the rest as it is."""
    if type(given).__module__.partition(".")[0] == "omegaconf":
        from omegaconf import OmegaConf

        return OmegaConf.to_container(given, resolve=True, throw_on_missing=True)
    if isinstance(given, Mapping):
        return {key: _plain(value) for key, value in given.items()}
    if type(given) in (list, tuple):
        return type(given)(map(_plain, given))
    return given

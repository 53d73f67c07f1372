"""SIGINT and SIGTERM: stop soon, keep what is written."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

INTERRUPTED = 4  # exit status


class Interrupted(BaseException):
    """The run was told to stop; the message says by which signal."""


class Interrupt:
    """While entered, the first signal raises `Interrupted` in the main thread, at once or at the
    next `check`; the second ends the process: finished rows are in the file already."""

    def __init__(self) -> None:
        self._by: str | None = None
        self._at_once = True
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Within, only `check` raises: what goes together is done together."""
        self._at_once = False
        try:
            self.check()
            yield
        finally:
            self._at_once = True

    def check(self) -> None:
        """Raise if a signal came, even if foreign code has swallowed the exception before, as
        Python does with one that is raised in a callback."""
        if self._by is not None:
            raise Interrupted(self._by)

    def _stop(self, number: int, _: Any) -> None:
        if self._by is not None:
            with contextlib.suppress(OSError):
                os.write(2, b"blendjax: interrupted twice; finished rows are in the output\n")
            os._exit(INTERRUPTED)
        self._by = signal.Signals(number).name
        if self._at_once:
            raise Interrupted(self._by)

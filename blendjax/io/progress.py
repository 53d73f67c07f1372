"""What a run says on stderr: a line for each phase, then a bar, or a plain line now and then."""

from __future__ import annotations

import contextlib
import datetime
import io
import sys
import time
from collections.abc import Callable, Iterable
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

BAR_WIDTH = 24
BAR_INTERVAL_S = 0.25
LINE_INTERVAL_S = 10.0
LINE_BACKOFF = 2.0  # 12 lines cover eleven hours


class Progress:
    """Reports on a stream and never fails: its own text is ASCII, other text is escaped.

    `quiet` leaves errors only; `verbose` keeps a plain line every 10 s and draws no bar.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        quiet: bool = False,
        verbose: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream or sys.stderr or io.StringIO()  # no stderr after `2>&-`
        self._quiet = quiet
        self._verbose = verbose
        self._clock = clock
        self._began_s = clock()
        self._run_began_s = self._next_s = self._began_s
        self._interval_s = LINE_INTERVAL_S
        self._total_rows = self._total_tokens = 0
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def phase(self, text: str) -> None:
        """Say at once what begins now."""
        if not self._quiet:
            self._print(self._stamped(text))

    def error(self, text: str) -> None:
        """Say it even when quiet."""
        self._print(text)

    def start(self, total_rows: int, total_tokens: int) -> None:
        """Begin the run proper: the rows of the file, and the tokens planned for this run."""
        self._total_rows, self._total_tokens = total_rows, total_tokens
        self._run_began_s = self._clock()
        self._live = None if self._quiet or self._verbose else _live(self._stream)
        if self._live is not None:
            self._live.start()
            self._interval_s = BAR_INTERVAL_S
        self._next_s = self._run_began_s + self._interval_s

    def update(
        self,
        rows: int,
        tokens: int,
        done_tokens_planned: int,
        *,
        running: int,
        waiting: int,
        page_use: float,
    ) -> None:
        """Show the state if it is time to; cheap enough to call at every step.

        Sums since `start`: `rows` done (resumed ones too), `tokens` computed, and the part of
        `total_tokens` that is done. `page_use` is a fraction.
        """
        now_s = self._clock()
        if self._quiet or now_s < self._next_s:
            return
        elapsed_s = now_s - self._run_began_s
        speed = tokens / elapsed_s if elapsed_s > 0 else 0.0
        eta = self._eta(done_tokens_planned, elapsed_s)
        self._show(
            f"{rows:,}/{self._total_rows:,} rows, {speed:,.0f} tok/s, ETA {eta}, "
            f"{running} running, {waiting} waiting, {page_use:.0%} of pages",
            fraction=done_tokens_planned / max(self._total_tokens, 1),
        )
        if self._live is None and not self._verbose:
            self._interval_s *= LINE_BACKOFF
        self._next_s = now_s + self._interval_s

    def finish(self, summary_lines: Iterable[str]) -> None:
        """Take the bar away and print the summary."""
        self.close()
        if not self._quiet:
            for line in summary_lines:
                self._print(line)

    def close(self) -> None:
        """Give the terminal back; a second call does nothing."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _eta(self, done: int, elapsed_s: float) -> str:
        if done <= 0:
            return "?"
        left_s = max(self._total_tokens - done, 0) * elapsed_s / done
        return str(datetime.timedelta(seconds=round(left_s)))

    def _show(self, status: str, *, fraction: float) -> None:
        if self._live is None:
            self._print(self._stamped(status))
        else:
            bar = "#" * round(BAR_WIDTH * min(fraction, 1.0))
            line = Text(f"[{bar:-<{BAR_WIDTH}}] {status}", no_wrap=True, overflow="crop")
            with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
                self._live.update(line, refresh=True)

    def _stamped(self, text: str) -> str:
        return f"[{self._clock() - self._began_s:5.1f}s] {text}"

    def _print(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        with contextlib.suppress(OSError, ValueError):  # `2>&1 | head` must not end the run
            if self._live is None:
                self._stream.write(text + "\n")
                self._stream.flush()
            else:  # above the bar
                self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _live(stream: TextIO) -> Live | None:
    console = Console(file=stream)
    if not (stream.isatty() and console.is_interactive):  # rich alone heeds FORCE_COLOR
        return None
    return Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)

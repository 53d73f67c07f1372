"""What a run prints: soon, little, plain where there is no terminal, and never a crash."""

import io

import pytest

from blendjax.io.progress import Progress


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    encoding = "ascii"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return super().write(text.encode("ascii").decode())


def run(progress: Progress, clock: Clock, hours: float, rows: int = 1000) -> None:
    """A run of one update a second."""
    progress.start(rows, 10 * rows)
    seconds = int(hours * 3600)
    for second in range(1, seconds + 1):
        clock.now_s += 1
        done = rows * second // seconds
        progress.update(done, 20 * done, 10 * done, running=3, waiting=4, page_use=0.5)


def test_phase_is_shown_at_once() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock=clock)
    clock.now_s = 1.23
    progress.phase("reading prompts.jsonl")
    assert stream.getvalue() == "[  1.2s] reading prompts.jsonl\n"


def test_plain_lines_come_after_10_s_and_back_off() -> None:
    stream, clock = io.StringIO(), Clock()
    run(Progress(stream, clock=clock), clock, hours=100 / 3600, rows=100)
    assert stream.getvalue().splitlines() == [
        "[ 10.0s] 10/100 rows, 20 tok/s, ETA 0:01:30, 3 running, 4 waiting, 50% of pages",
        "[ 30.0s] 30/100 rows, 20 tok/s, ETA 0:01:10, 3 running, 4 waiting, 50% of pages",
        "[ 70.0s] 70/100 rows, 20 tok/s, ETA 0:00:30, 3 running, 4 waiting, 50% of pages",
    ]


@pytest.mark.parametrize("hours", [0.5, 11])
def test_a_long_run_prints_few_lines(hours: float) -> None:
    stream, clock = io.StringIO(), Clock()
    run(Progress(stream, clock=clock), clock, hours)
    assert 5 <= len(stream.getvalue().splitlines()) <= 12


def test_verbose_keeps_every_10_s() -> None:
    stream, clock = Terminal(), Clock()
    run(Progress(stream, verbose=True, clock=clock), clock, hours=0.5)
    assert len(stream.getvalue().splitlines()) == 180 and "\x1b" not in stream.getvalue()


def test_eta_counts_planned_tokens_not_rows() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock=clock)
    progress.start(1000, 1000)
    clock.now_s = 10.0
    progress.update(999, 5, 100, running=1, waiting=0, page_use=0.0)  # the long row is left
    clock.now_s = 40.0
    progress.update(999, 5, 2000, running=1, waiting=0, page_use=0.0)  # longer than planned
    first, second = stream.getvalue().splitlines()
    assert "999/1,000 rows" in first and "ETA 0:01:30" in first and "ETA 0:00:00" in second


def test_no_tokens_yet_gives_no_eta() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock=clock)
    progress.start(0, 0)
    clock.now_s = 10.0
    progress.update(0, 0, 0, running=0, waiting=0, page_use=0.0)
    assert "ETA ?" in stream.getvalue()


def test_quiet_prints_errors_only() -> None:
    stream, clock = Terminal(), Clock()
    progress = Progress(stream, quiet=True, clock=clock)
    progress.phase("reading")
    run(progress, clock, hours=0.1)
    progress.error("line 3: no")
    progress.finish(["done"])
    assert stream.getvalue() == "line 3: no\n"


def test_bar_on_an_ascii_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    stream, clock = Terminal(), Clock()
    with Progress(stream, clock=clock) as progress:
        run(progress, clock, hours=100 / 3600, rows=100)
        progress.phase("drain \u4e2d [bold]")
        progress.finish(["100 rows"])
    shown = stream.getvalue()
    assert "[############------------] 50/100 rows" in shown
    assert "drain \\u4e2d [bold]\n" in shown and shown.endswith("100 rows\n")
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is given back


def test_terminal_is_given_back_after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with pytest.raises(KeyError), Progress(stream, clock=Clock()) as progress:
        progress.start(1, 1)
        raise KeyError
    assert stream.getvalue().count("\x1b[?25h") == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_other_text_is_escaped_where_it_must_be(encoding: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    Progress(stream, clock=Clock()).phase("reading \u4e2d\U0001f600\udc80")
    shown = raw.getvalue().decode(encoding)
    assert shown.startswith("[  0.0s] reading ") and "\\udc80" in shown
    assert ("\u4e2d" in shown) == (encoding == "utf-8")


def test_a_closed_stream_does_not_end_the_run() -> None:
    stream = io.StringIO()
    progress = Progress(stream, clock=Clock())
    stream.close()
    progress.phase("reading")
    progress.error("no")


def test_forced_colour_does_not_put_a_bar_into_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream, clock = io.StringIO(), Clock()
    run(Progress(stream, clock=clock), clock, hours=0.01)
    assert "\x1b" not in stream.getvalue()

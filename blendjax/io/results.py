"""The output file: one line of strict JSON for each row, on its way to the disk as it finishes."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from blendjax.core import Completion, RowError
from blendjax.io.openai import error_record, response_record, simple_error, simple_record
from blendjax.io.strict_json import SURROGATE
from blendjax.io.targets import OutputFileError, check_unused, same_file, writing

__all__ = ["OutputFileError", "ResultWriter", "encode_line"]

OutputFormat = Literal["openai", "simple"]


@dataclasses.dataclass(eq=False)
class ResultWriter:
    """Appends whole lines: what `completion` or `error` has returned from survives a kill -9.

    Opens the file when made. When a write fails, the file ends with the last whole line.
    """

    path: str | os.PathLike[str]
    _: dataclasses.KW_ONLY
    model: str
    output_format: OutputFormat = "openai"
    overwrite: bool = False
    input_path: str | os.PathLike[str] | None = None
    fsync_every_s: float = 5.0
    clock: Callable[[], float] = time.time  # also dates the answers
    completed: int = dataclasses.field(default=0, init=False)
    failed: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        path = Path(self.path)
        if self.input_path is not None and same_file(path, Path(self.input_path)):
            raise OutputFileError(f"{path} is the input file; pass another --output")
        self._fd = _open(path, overwrite=self.overwrite)
        self._end_bytes = 0  # of the last whole line
        self._synced_s = self.clock()

    def __enter__(self) -> ResultWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def completion(self, completion: Completion) -> None:
        """Append the answer of a row."""
        if self.output_format == "openai":
            created = int(self.clock())
            record = response_record(completion, model=self.model, created=created)
        else:
            record = simple_record(completion)
        self._append(record)
        self.completed += 1

    def error(self, error: RowError) -> None:
        """Append the error of a row."""
        openai = self.output_format == "openai"
        self._append(error_record(error) if openai else simple_error(error))
        self.failed += 1

    def close(self) -> None:
        """Force everything to the disk and close; a second call does nothing."""
        if self._fd < 0:
            return
        try:
            self._sync()
        finally:
            os.close(self._fd)
            self._fd = -1

    def _append(self, record: dict[str, Any]) -> None:
        line, done = encode_line(record), 0
        try:
            while done < len(line):  # once, except where the disk or a quota ends in mid-line
                done += os.write(self._fd, line[done:])
        except OSError as error:
            raise self._failure(error) from error
        finally:
            if done < len(line):
                with contextlib.suppress(OSError):  # a pipe or device has no end to go back to
                    os.ftruncate(self._fd, self._end_bytes)
        self._end_bytes += len(line)
        if abs(self.clock() - self._synced_s) >= self.fsync_every_s:  # abs: clocks are set back
            self._sync()

    def _sync(self) -> None:
        self._synced_s = self.clock()
        try:
            os.fsync(self._fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a pipe or device
                raise self._failure(error) from error

    def _failure(self, error: OSError) -> OutputFileError:
        rows = self.completed + self.failed
        return OutputFileError(
            f"cannot write {self.path} after {rows} rows: {error.strerror}"
            f"{_free_space(Path(self.path))}; make room or pass another --output"
        )


def encode_line(record: dict[str, Any]) -> bytes:
    """The record as one line of UTF-8 JSON; a lone surrogate becomes U+FFFD."""
    try:
        return msgspec.json.encode(record) + b"\n"
    except UnicodeEncodeError:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
        return SURROGATE.sub("\ufffd", text).encode() + b"\n"


def _open(path: Path, *, overwrite: bool) -> int:
    if not overwrite:
        check_unused(path)
    with writing(path, "output"):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if overwrite else 0)
        return os.open(path, flags, 0o666)


def _free_space(path: Path) -> str:
    try:
        return f" ({shutil.disk_usage(path.parent).free} bytes free there)"
    except OSError:
        return ""

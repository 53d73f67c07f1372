"""Files that a run writes: looked at before the model loads, with errors that say what to try."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path


class OutputFileError(Exception):
    """A file can't be written; the message says where and what to try."""


def check_target(path: Path, flag: str, others: Mapping[str, Path]) -> None:
    """Raise unless `path`, given by a flag, can be written and is none of the run's other files."""
    for what, other in others.items():
        if same_file(path, other):
            raise OutputFileError(f"{path} is the {what} file; pass another --{flag}")
    with writing(path, flag):
        existed = path.exists()
        if existed and not (path.is_file() or path.is_dir()):
            return  # opening a pipe may wait for its reader
        path.open("ab").close()
        if not existed:
            path.unlink()


def check_unused(path: Path) -> None:
    """Raise if the output file holds something already."""
    if path.is_file() and path.stat().st_size:
        raise OutputFileError(f"{path} is not empty; pass --overwrite or another --output")


@contextlib.contextmanager
def writing(path: Path, flag: str) -> Iterator[None]:
    """Turns an `OSError` of the block into an `OutputFileError` about this file."""
    try:
        yield
    except FileNotFoundError as error:
        advice = f"no directory {path.parent}; create it or pass another --{flag}"
        raise OutputFileError(f"cannot write {path}: {advice}") from error
    except OSError as error:
        advice = f"{error.strerror}; pass another --{flag}"
        raise OutputFileError(f"cannot write {path}: {advice}") from error


def same_file(path: Path, other: Path) -> bool:
    """Whether both name one file, be it by links or before it exists."""
    with contextlib.suppress(OSError):
        return path.samefile(other)
    return path.resolve() == other.resolve()

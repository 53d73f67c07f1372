"""The lines of a UTF-8 JSONL file, with the numbers that an editor shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

UTF8_BOM = b"\xef\xbb\xbf"
WIDE_BOMS = {  # the long ones first: UTF-32 LE begins like UTF-16 LE
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


_NOT_UTF8 = {  # what a line may begin with that no JSON in UTF-8 does
    b"\x1f\x8b": "is compressed with gzip; unpack it first: gunzip",
    b"{\x00": "looks like UTF-16; the input must be UTF-8: iconv -f UTF-16LE -t UTF-8",
    b"\x00{": "looks like UTF-16; the input must be UTF-8: iconv -f UTF-16BE -t UTF-8",
}


class InputFileError(Exception):
    """The input file as a whole can't be used; the message says where and what to try."""


class Line(NamedTuple):
    """A line that isn't blank."""

    number: int  # 1-based, blank lines counted, as an editor does
    offset: int  # of its first byte in the file
    raw: bytes  # without its line end


def read_lines(path: Path) -> Iterator[Line]:
    """Yield each line that isn't blank, one at a time; a file without any is an error."""
    empty, offset = True, 0
    try:
        _check_regular(path)
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                text = _without_bom(path, raw) if number == 1 else raw
                if text.strip():
                    empty = False
                    yield Line(number, offset + len(raw) - len(text), text.rstrip(b"\r\n"))
                offset += len(raw)
    except OSError as error:
        _refuse(path, error)
    if empty:
        raise InputFileError(f"{path} holds no rows: give a JSONL file, one JSON object per line")


def _without_bom(path: Path, raw: bytes) -> bytes:
    for bom, encoding in WIDE_BOMS.items():
        if raw.startswith(bom):
            advice = f"convert it, for example: iconv -f {encoding} -t UTF-8 {path} > new.jsonl"
            raise InputFileError(f"{path} is {encoding}, and the input must be UTF-8; {advice}")
    for start, why in _NOT_UTF8.items():
        if raw.startswith(start):
            raise InputFileError(f"{path} {why}")
    return raw.removeprefix(UTF8_BOM)


def _check_regular(path: Path) -> None:
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise InputFileError(
            f"{path} is a pipe or device, and the input is read more than once: "
            "write it to a file first"
        )


def _refuse(path: Path, error: OSError) -> NoReturn:
    if isinstance(error, FileNotFoundError):
        why = f"there is no such file (looked from {Path.cwd()}); check --input"
    elif isinstance(error, IsADirectoryError):
        why = "it is a directory; give one JSONL file to --input"
    else:
        why = f"{error.strerror}; check its permissions and the disk"
    raise InputFileError(f"cannot read {path}: {why}") from error

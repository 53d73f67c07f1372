"""Strict reading of JSON that users wrote: an object from a line, then its fields one by one."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Collection
from typing import Any

JSON_TYPES = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
    type(None): "null",
}
SURROGATE = re.compile("[\ud800-\udfff]")  # alone it is no text and has no UTF-8
SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class FieldError(ValueError):
    """A field that can't be taken as written: why, which one, and a code for machines."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def describe(value: object) -> str:
    """The JSON type of a value, and the value itself if it is short."""
    got = JSON_TYPES.get(type(value), type(value).__name__)
    if isinstance(value, bool | int | float | str) and len(text := json.dumps(value)) <= 40:
        return f"{got} ({text})"
    return got


def wrong_type(name: str, expected: str, value: object, code: str = "invalid_value") -> FieldError:
    """An error that says what was expected and what came."""
    return FieldError(f"{name} must be {expected}, got {describe(value)}", name, code)


def unknown_field(name: str, known: Collection[str]) -> FieldError:
    """An error that names the field, and the known one that was probably meant."""
    shown = name[:40]  # a match costs the square of the length
    close = difflib.get_close_matches(shown, sorted(known), n=1, cutoff=0.7)
    hint = f"did you mean {close[0]}?" if close else "remove it"
    return FieldError(f"unknown field {json.dumps(shown)}; {hint}", shown, "unknown_field")


def decode_object(raw: bytes, *, offset: int) -> tuple[dict[str, Any], FieldError | None]:
    """The object of a line that begins at a byte of the file, and a flaw that forbids its use.

    What can't be read at all is raised; a flawed object is returned, so that its id can be told.
    """
    flaws: list[FieldError] = []

    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(fields := dict(pairs)) < len(pairs):
            name = Counter(name for name, _ in pairs).most_common(1)[0][0][:40]
            message = f"{json.dumps(name)} is given twice in one object"
            flaws.append(FieldError(message, name, "invalid_json"))
        return fields

    try:
        text = raw.decode()
        value = json.loads(
            text, object_pairs_hook=to_dict, parse_float=_finite, parse_constant=_finite
        )
        if SURROGATE_ESCAPE.search(raw) and SURROGATE.search(json.dumps(value, ensure_ascii=False)):
            flaws.append(FieldError("a \\\\u escape is half a surrogate pair", code="invalid_json"))
    except (ValueError, RecursionError) as error:
        raise _unreadable(error, offset) from None
    if not isinstance(value, dict):
        raise FieldError(f"a row must be an object, got {describe(value)}")
    return value, flaws[0] if flaws else None


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:40]} is not a finite number")
    return number


def _unreadable(error: ValueError | RecursionError, offset: int) -> FieldError:
    if isinstance(error, UnicodeDecodeError):
        at = f"byte {error.start} of the line, byte {offset + error.start} of the file"
        message = f"not UTF-8: 0x{error.object[error.start]:02x} at {at}, counted from 0"
        return FieldError(message, code="invalid_utf8")
    reason = str(error)
    if isinstance(error, json.JSONDecodeError):  # its own text speaks of "line 1"
        reason = f"{error.msg} at column {error.pos + 1}; a line holds one whole object"
    elif isinstance(error, RecursionError):
        reason = "it is nested too deeply"
    elif reason.startswith("Exceeds the limit"):  # Python's own, on the digits of an integer
        reason = "an integer has too many digits"
    return FieldError(f"invalid JSON: {reason}", code="invalid_json")


def read_integer(name: str, value: object) -> int:
    """An int; a JSON boolean, which Python counts among them, is an error."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(name, "an integer", value)
    return value


def read_number(name: str, value: object) -> float:
    """A float; integers are numbers too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(name, "a number", value)
    try:
        return float(value)
    except OverflowError:
        raise FieldError(f"{name} is too large for a number", name) from None


def read_boolean(name: str, value: object) -> bool:
    """A bool; 0 and 1 are errors."""
    if not isinstance(value, bool):
        raise wrong_type(name, "true or false", value)
    return value


def read_token_ids(name: str, value: object) -> tuple[int, ...]:
    """The ids as a tuple; what lies outside int32 is no token of any vocabulary."""
    if not isinstance(value, list):
        raise wrong_type(name, "a list of token ids", value)
    for i, token in enumerate(value):
        if type(token) is not int or not 0 <= token < 2**31:
            raise wrong_type(f"{name}[{i}]", "an integer in [0, 2**31)", token)
    return tuple(value)

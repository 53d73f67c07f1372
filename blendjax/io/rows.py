"""prompts.jsonl -> PromptRow. A bad line becomes a RowError; only a bad file raises.

{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}      an OpenAI Batch row
{"custom_id": ..., "prompt" | "messages" | "prompt_token_ids": ...}  a flat row
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from blendjax.core import PromptRow, RowError, Sampling
from blendjax.io.lines import InputFileError, Line, read_lines
from blendjax.io.openai import parse_sampling
from blendjax.io.strict_json import (
    SURROGATE,
    FieldError,
    decode_object,
    read_token_ids,
    wrong_type,
)

__all__ = ["InputFileError", "read_rows"]

ENVELOPE = ("custom_id", "method", "url", "body")
SOURCES = ("prompt", "messages", "prompt_token_ids")
SOURCE_OF_URL = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}


def read_rows(
    path: str | os.PathLike[str], *, defaults: Sampling, limit: int | None = None
) -> Iterator[PromptRow | RowError]:
    """Yield one item for each of the first `limit` non-blank lines, reading as it goes.

    Two items share a `custom_id` only where the later one is a RowError.
    """
    first_use: dict[str, int] = {}  # custom_id -> line: all that grows with the file
    for index, line in enumerate(islice(read_lines(Path(path)), limit)):
        yield _read_line(index, line, first_use, defaults)


def _read_line(
    index: int, line: Line, first_use: dict[str, int], defaults: Sampling
) -> PromptRow | RowError:
    custom_id = f"row-{line.number}"
    try:
        fields, flaw = decode_object(line.raw, offset=line.offset)
        custom_id = _custom_id(fields, custom_id)
        if (first := first_use.setdefault(custom_id, line.number)) != line.number:
            message = f"custom_id {json.dumps(custom_id)} was already used on line {first}"
            raise FieldError(message, "custom_id", "duplicate_custom_id")
        if flaw is not None:
            raise flaw
        content = _parse(fields, defaults)
        return PromptRow(index=index, line=line.number, custom_id=custom_id, **content)
    except FieldError as error:
        first_use.setdefault(custom_id, line.number)
        return RowError(
            index=index,
            line=line.number,
            custom_id=custom_id,
            message=f"line {line.number}: {error}",
            code=error.code,
            param=error.param,
        )


def _custom_id(fields: dict[str, Any], default: str) -> str:
    custom_id = fields.get("custom_id")
    if custom_id is None:
        return default
    if not isinstance(custom_id, str) or not custom_id or SURROGATE.search(custom_id):
        raise wrong_type("custom_id", "a non-empty string", custom_id)
    return custom_id


def _parse(fields: dict[str, Any], defaults: Sampling) -> dict[str, Any]:
    """The fields of a PromptRow that say what to run."""
    is_batch = not fields.keys().isdisjoint(ENVELOPE[1:])
    body = _body(fields) if is_batch else {k: v for k, v in fields.items() if k != "custom_id"}
    sampling = parse_sampling(body, defaults)  # first: it finds a misspelt prompt field
    source = _source(body)
    if is_batch and source != (wanted := SOURCE_OF_URL[fields["url"]]):
        raise FieldError(f"url {fields['url']} needs {wanted}, got {source}", source)
    if source == "messages":
        content = _chat(body)
    elif body.get("chat_template_kwargs") is not None:
        message = f"chat_template_kwargs goes with messages, not {source}"
        raise FieldError(message, "chat_template_kwargs")
    else:
        content = _completion(source, body[source], ids_allowed=is_batch)
    return {"sampling": sampling, **content}


def _body(fields: dict[str, Any]) -> dict[str, Any]:
    """The body of an OpenAI Batch row, once its envelope is known to be right."""
    for name in fields:
        if name not in ENVELOPE:
            raise FieldError(f"{name[:40]} must be inside body in a row with url", name[:40])
    if fields.get("method") != "POST":
        raise wrong_type("method", '"POST"', fields.get("method"))
    url, body = fields.get("url"), fields.get("body")
    if not isinstance(url, str) or url not in SOURCE_OF_URL:
        raise wrong_type("url", " or ".join(SOURCE_OF_URL), url, "not_supported")
    if not isinstance(body, dict):
        raise wrong_type("body", "an object", body)
    return body


def _source(body: dict[str, Any]) -> str:
    given = [name for name in SOURCES if body.get(name) is not None]
    if len(given) != 1:
        got = " and ".join(given) or "none of them"
        raise FieldError(f"a row needs exactly one of {', '.join(SOURCES)}; got {got}", "prompt")
    return given[0]


def _completion(source: str, prompt: object, *, ids_allowed: bool) -> dict[str, Any]:
    if source == "prompt" and isinstance(prompt, str):
        return {"kind": "completion", "prompt": prompt}
    if source == "prompt" and not (ids_allowed and isinstance(prompt, list)):
        raise wrong_type("prompt", "a string (token ids go into prompt_token_ids)", prompt)
    if not (token_ids := read_token_ids(source, prompt)):
        raise FieldError(f"{source} must hold at least one token id", source)
    return {"kind": "completion", "token_ids": token_ids}


def _chat(body: dict[str, Any]) -> dict[str, Any]:
    messages, kwargs = body["messages"], body.get("chat_template_kwargs")
    if not isinstance(messages, list) or not messages:
        raise wrong_type("messages", "a non-empty list of messages", messages)
    if kwargs is not None and not isinstance(kwargs, dict):
        raise wrong_type("chat_template_kwargs", "an object", kwargs)
    read = tuple(_message(f"messages[{i}]", message) for i, message in enumerate(messages))
    return {"kind": "chat", "messages": read, "template_kwargs": kwargs or {}}


def _message(name: str, message: object) -> dict[str, Any]:
    """A message with its content as one string; other keys are the chat template's to read."""
    if not isinstance(message, dict):
        raise wrong_type(name, "an object", message)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise wrong_type(f"{name}.role", "a non-empty string", role)
    if content is None and role == "assistant":
        content = ""  # a template would print null as "None"
    if isinstance(content, list):
        parts = enumerate(content)
        content = "".join(_part_text(f"{name}.content[{i}]", part) for i, part in parts)
    if not isinstance(content, str):
        raise wrong_type(f"{name}.content", "a string or a list of text parts", content)
    return {**message, "content": content}


def _part_text(name: str, part: object) -> str:
    if not isinstance(part, dict):
        raise wrong_type(name, "an object", part)
    if (kind := part.get("type")) != "text":
        expected = '"text" (other parts are not supported yet)'
        raise wrong_type(f"{name}.type", expected, kind, "not_supported")
    if not isinstance(text := part.get("text"), str):
        raise wrong_type(f"{name}.text", "a string", text)
    return text

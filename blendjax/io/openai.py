"""OpenAI's names: request parameters -> Sampling, and Completion or RowError -> output objects.

Nothing is ignored in silence: a parameter is read, is switched off by its value, or is an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from blendjax.core import Completion, RowError, Sampling
from blendjax.io.strict_json import (
    FieldError,
    read_boolean,
    read_integer,
    read_number,
    read_token_ids,
    unknown_field,
    wrong_type,
)

PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids", "chat_template_kwargs")
BOOKKEEPING = ("model", "user", "metadata", "store", "service_tier")  # change no token
MAX_STOP_STRINGS = 16

# Known but not built yet, each with the value that leaves it off. `logprobs: 0` is not off: for
# completions it asks for the logprob of every chosen token.
UNSUPPORTED: Mapping[str, Any] = {
    "n": 1,
    "best_of": 1,
    "stream": False,
    "echo": False,
    "suffix": "",
    "logprobs": False,
    "top_logprobs": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "none",
    "response_format": {"type": "text"},
}


def _seed(name: str, value: object) -> int:
    seed = read_integer(name, value)
    if not -(2**63) <= seed < 2**64:
        raise FieldError(f"{name} must be in [-2**63, 2**64), got {seed}", name)
    return seed % 2**64  # signed and unsigned spellings of 64 bits are one seed


def _top_k(name: str, value: object) -> int:
    return 0 if (top_k := read_integer(name, value)) == -1 else top_k


def _stop(name: str, value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise wrong_type(name, "a string or a list of strings", value)
    for text in texts:
        if not isinstance(text, str):
            raise wrong_type(name, "a string or a list of strings", text)
    if len(texts) > MAX_STOP_STRINGS:
        raise FieldError(f"{name} takes {MAX_STOP_STRINGS} strings at most, got {len(texts)}", name)
    return tuple(texts)


READERS: Mapping[str, Callable[[str, object], Any]] = {
    "max_tokens": read_integer,
    "max_completion_tokens": read_integer,
    "temperature": read_number,
    "top_p": read_number,
    "top_k": _top_k,
    "min_p": read_number,
    "seed": _seed,
    "stop": _stop,
    "stop_token_ids": read_token_ids,
    "min_tokens": read_integer,
    "ignore_eos": read_boolean,
}
KNOWN = frozenset({*READERS, *UNSUPPORTED, *PROMPT_FIELDS, *BOOKKEEPING})


def parse_sampling(fields: Mapping[str, Any], defaults: Sampling) -> Sampling:
    """The defaults, overridden by the parameters among a row's fields; null leaves a default."""
    for name, value in fields.items():
        _check_known(name, value)
    given = {name: value for name, value in fields.items() if value is not None}
    values = {name: read(name, given[name]) for name, read in READERS.items() if name in given}
    alias = values.pop("max_completion_tokens", None)
    if alias is not None and values.setdefault("max_tokens", alias) != alias:
        message = f"max_tokens={values['max_tokens']} and max_completion_tokens={alias} differ"
        raise FieldError(message, "max_completion_tokens")
    try:
        return dataclasses.replace(defaults, **values)
    except ValueError as error:
        field = re.match(r"\w+", str(error))  # Sampling's messages begin with the field
        raise FieldError(str(error), field and field[0]) from None


def _check_known(name: str, value: object) -> None:
    if name.startswith("guided_"):
        if value is not None:
            raise FieldError(f"{name} is not supported yet; leave it out", name, "not_supported")
    elif name not in KNOWN:
        raise unknown_field(name, KNOWN)
    elif name in UNSUPPORTED and value is not None and not _same(value, UNSUPPORTED[name]):
        off = json.dumps(UNSUPPORTED[name])
        message = f"{name} is not supported yet; leave it out or set it to {off}"
        raise FieldError(message, name, "not_supported")


def _same(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def response_record(completion: Completion, *, model: str, created: int) -> dict[str, Any]:
    """The output object of a finished row, in OpenAI Batch form."""
    request = completion.request
    key = _key(request.index, request.custom_id)
    choice: dict[str, Any] = {"index": 0, "text": completion.text}
    object_name, prefix = "text_completion", "cmpl"
    if request.kind == "chat":
        choice = {"index": 0, "message": {"role": "assistant", "content": completion.text}}
        object_name, prefix = "chat.completion", "chatcmpl"
    body = {
        "id": f"{prefix}-{key}",
        "object": object_name,
        "created": created,
        "model": model,
        "choices": [{**choice, "logprobs": None, "finish_reason": completion.finish_reason}],
        "usage": _usage(completion),
    }
    return _batch_record(key, request.custom_id, 200, body, None)


def error_record(error: RowError) -> dict[str, Any]:
    """The output object of a failed row, in OpenAI Batch form."""
    short = {"code": error.code, "message": error.message}
    detail = {**short, "type": "invalid_request_error", "param": error.param}
    key = _key(error.index, error.custom_id)
    return _batch_record(key, error.custom_id, 400, {"error": detail}, short)


def _batch_record(
    key: str, custom_id: str, status: int, body: dict[str, Any], error: dict[str, Any] | None
) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req_{key}", "body": body}
    return {"id": f"batch_req_{key}", "custom_id": custom_id, "response": response, "error": error}


def _key(index: int, custom_id: str) -> str:
    """Unique in the file by the index, and the same in every run."""
    digest = hashlib.sha256(custom_id.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{index}_{digest[:12]}"


def _usage(completion: Completion) -> dict[str, Any]:
    prompt, generated = len(completion.request.prompt_T), len(completion.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
    }


def simple_record(completion: Completion) -> dict[str, Any]:
    """The flat output object of a finished row; `index` counts the choices of a row."""
    return {
        "custom_id": completion.request.custom_id,
        "index": 0,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": len(completion.request.prompt_T),
        "completion_tokens": len(completion.token_ids),
        "error": None,
    }


def simple_error(error: RowError) -> dict[str, Any]:
    """The flat output object of a failed row: the same keys, and only the error filled in."""
    empty = ("text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens")
    message = {"code": error.code, "message": error.message, "param": error.param}
    return {"custom_id": error.custom_id, "index": 0, **dict.fromkeys(empty), "error": message}

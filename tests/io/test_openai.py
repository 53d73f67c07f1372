"""Request parameters are read, are off, or are an error; output objects have OpenAI's shape."""

import json
from typing import Any

import numpy as np
import pytest

from blendjax.core import Completion, Request, RowError, RowKind, Sampling
from blendjax.io.openai import (
    READERS,
    UNSUPPORTED,
    error_record,
    parse_sampling,
    response_record,
    simple_error,
    simple_record,
)
from blendjax.io.strict_json import FieldError

DEFAULTS = Sampling(max_tokens=9, temperature=0.7, top_k=5, seed=3, stop=("x",), min_tokens=2)


def completion(kind: RowKind = "chat", *, index: int = 4, custom_id: str = "a") -> Completion:
    request = Request(
        index=index,
        line=5,
        custom_id=custom_id,
        kind=kind,
        prompt_T=np.arange(3, dtype=np.int32),
        sampling=Sampling(),
        seed=1,
        max_new=8,
        stop_ids=frozenset(),
    )
    return Completion(
        request=request, token_ids=(7, 8), text="hé", finish_reason="stop", cached_tokens=2
    )


def refused(fields: dict[str, Any]) -> FieldError:
    with pytest.raises(FieldError) as error:
        parse_sampling(fields, DEFAULTS)
    return error.value


def test_nothing_given_and_every_null_leave_the_defaults() -> None:
    nulls = dict.fromkeys([*READERS, *UNSUPPORTED, "guided_json", "user", "messages"])
    assert parse_sampling({}, DEFAULTS) == parse_sampling(nulls, DEFAULTS) == DEFAULTS


def test_every_parameter_is_read() -> None:
    fields = {
        "max_tokens": 5,
        "max_completion_tokens": 5,
        "temperature": 1,
        "top_p": 0.5,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 2**64 - 1,
        "stop": ["END", "\n"],
        "stop_token_ids": [0, 9],
        "min_tokens": 1,
        "ignore_eos": True,
    }
    assert parse_sampling(fields, Sampling()) == Sampling(
        max_tokens=5,
        temperature=1.0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        seed=2**64 - 1,
        stop=("END", "\n"),
        stop_token_ids=(0, 9),
        min_tokens=1,
        ignore_eos=True,
    )


@pytest.mark.parametrize(
    ("field", "value", "read"),
    [
        ("temperature", 0, 0.0),
        ("top_k", 0, 0),
        ("top_k", -1, 0),
        ("seed", 0, 0),
        ("seed", -1, 2**64 - 1),
        ("seed", -(2**63), 2**63),
        ("min_tokens", 0, 0),
        ("stop", "END", ("END",)),
        ("stop", [], ()),
        ("stop", ["s"] * 16, ("s",) * 16),
        ("max_tokens", 10**9, 10**9),
    ],
)
def test_given_is_never_taken_for_unset(field: str, value: object, read: object) -> None:
    assert getattr(parse_sampling({field: value}, DEFAULTS), field) == read


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, 1.0, True, "16", [], {}])
def test_bad_max_tokens(name: str, value: object) -> None:
    assert "max" in str(refused({"min_tokens": 0, name: value}))


def test_max_tokens_under_both_names() -> None:
    assert parse_sampling({"max_completion_tokens": 4}, DEFAULTS).max_tokens == 4
    assert (
        parse_sampling({"max_tokens": 4, "max_completion_tokens": None}, DEFAULTS).max_tokens == 4
    )
    assert "max_tokens=4 and max_completion_tokens=5" in str(
        refused({"max_tokens": 4, "max_completion_tokens": 5})
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", True),
        ("temperature", "0"),
        ("temperature", 10**400),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.0),
        ("min_p", 2),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("seed", 1.0),
        ("stop", 5),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a", 1]),
        ("stop", ["s"] * 17),
        ("stop", {"a": 1}),
        ("stop_token_ids", 5),
        ("min_tokens", -1),
        ("min_tokens", 10),
        ("ignore_eos", 1),
    ],
)
def test_bad_value_names_its_field(field: str, value: object) -> None:
    error = refused({field: value})
    assert error.param == field and error.code == "invalid_value" and field in str(error)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_is_accepted_only_when_off(name: str) -> None:
    assert parse_sampling({name: UNSUPPORTED[name]}, DEFAULTS) == DEFAULTS
    error = refused({name: ["on"]})
    assert error.param == name and error.code == "not_supported"
    assert "not supported yet" in str(error) and name in str(error)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("logprobs", 0),
        ("logprobs", True),
        ("presence_penalty", 0.1),
        ("guided_json", {}),
        ("response_format", {"type": "json_object"}),
        ("stream", True),
    ],
)
def test_unsupported_values_that_look_off(name: str, value: object) -> None:
    assert refused({name: value}).code == "not_supported"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_token", "did you mean max_tokens?"),
        ("temprature", "did you mean temperature?"),
        ("mesages", "did you mean messages?"),
        ("zzz", "remove it"),
        ("z" * 10**6, "remove it"),
    ],
)
@pytest.mark.parametrize("value", [5, None])
def test_unknown_field_is_named(name: str, hint: str, value: object) -> None:
    error = refused({name: value})
    assert error.code == "unknown_field" and error.param == name[:40]
    assert name[:40] in str(error) and str(error).endswith(hint) and len(str(error)) < 99


def test_chat_record() -> None:
    record = response_record(completion(), model="m", created=11)
    key = record["id"].removeprefix("batch_req_")
    assert json.loads(json.dumps(record)) == {
        "id": f"batch_req_{key}",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": f"req_{key}",
            "body": {
                "id": f"chatcmpl-{key}",
                "object": "chat.completion",
                "created": 11,
                "model": "m",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "hé"},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {
                    "prompt_tokens": 3,
                    "completion_tokens": 2,
                    "total_tokens": 5,
                    "prompt_tokens_details": {"cached_tokens": 2},
                },
            },
        },
        "error": None,
    }


def test_completion_record() -> None:
    body = response_record(completion("completion"), model="m", created=11)["response"]["body"]
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": "hé", "logprobs": None, "finish_reason": "stop"}
    ]


def test_ids_are_the_same_in_every_run_and_differ_between_rows() -> None:
    def made(**options: Any) -> str:
        return response_record(completion(**options), model="m", created=0)["id"]

    assert made() == made()
    assert len({made(), made(index=5), made(custom_id="b"), made(custom_id="\ud800")}) == 4


def test_error_records() -> None:
    error = RowError(index=2, line=3, custom_id="e", message="m", code="c", param="p")
    record = error_record(error)
    assert record["custom_id"] == "e" and record["error"] == {"code": "c", "message": "m"}
    assert record["response"]["status_code"] == 400
    assert record["response"]["body"]["error"] == {
        "message": "m",
        "type": "invalid_request_error",
        "param": "p",
        "code": "c",
    }
    simple = simple_error(error)
    assert simple["error"] == {"code": "c", "message": "m", "param": "p"}
    assert simple["custom_id"] == "e" and simple["text"] is None
    assert list(simple) == list(simple_record(completion()))


def test_simple_record() -> None:
    assert simple_record(completion()) == {
        "custom_id": "a",
        "index": 0,
        "text": "hé",
        "token_ids": (7, 8),
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "error": None,
    }

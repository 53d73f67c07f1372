"""Every way to spoil an input file: the good rows still come, the bad ones say where and why."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendjax.core import PromptRow, RowError, Sampling
from blendjax.io.rows import InputFileError, read_rows

DEFAULTS = Sampling(max_tokens=7, temperature=0.5)
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


def read(path: Path, data: bytes, **options: Any) -> list[PromptRow | RowError]:
    (file := path / "prompts.jsonl").write_bytes(data)
    return list(read_rows(file, defaults=DEFAULTS, **options))


def read_one(path: Path, row: object) -> PromptRow | RowError:
    (item,) = read(path, json.dumps(row).encode())
    return item


def error_of(path: Path, row: object) -> RowError:
    item = read_one(path, row)
    assert isinstance(item, RowError), item
    return item


def row_of(path: Path, row: object) -> PromptRow:
    item = read_one(path, row)
    assert isinstance(item, PromptRow), item
    return item


def batch(url: str, body: object, **fields: Any) -> dict[str, Any]:
    return {"custom_id": "b", "method": "POST", "url": url, "body": body, **fields}


def test_utf8_bom_is_skipped_and_not_counted_as_text(tmp_path: Path) -> None:
    first, second = read(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "\xe9"}\n')
    assert isinstance(first, PromptRow) and first.prompt == "a"
    assert isinstance(second, RowError) and second.code == "invalid_utf8"
    assert "0xe9 at byte 12 of the line, byte 31 of the file" in second.message
    (error,) = read(tmp_path, b"\xef\xbb\xbf\xff\n")
    assert isinstance(error, RowError) and "byte 0 of the line, byte 3 of the file" in error.message


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "utf-32-be"])
def test_wide_encodings_are_named(tmp_path: Path, encoding: str) -> None:
    text = '{"prompt": "a"}\n' if encoding in ("utf-16", "utf-32") else '\ufeff{"prompt": "a"}\n'
    with pytest.raises(InputFileError, match=encoding[:6].upper()) as error:
        read(tmp_path, text.encode(encoding))
    assert "prompts.jsonl" in str(error.value) and "iconv" in str(error.value)


def test_line_numbers_are_an_editors(tmp_path: Path) -> None:
    data = b'{"prompt": "a"}\r\n\r\n \t\r\n{"prompt": "b"}\r\n{"prompt": 1}\r\n{"prompt": "d"}'
    items = read(tmp_path, data)
    assert [(item.index, item.line) for item in items] == [(0, 1), (1, 4), (2, 5), (3, 6)]
    assert [item.custom_id for item in items] == ["row-1", "row-4", "row-5", "row-6"]
    assert isinstance(items[2], RowError) and items[2].message.startswith("line 5: prompt must be")
    assert isinstance(items[3], PromptRow) and items[3].prompt == "d"


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        (b"[1, 2]", "invalid_value", "an array"),
        (b'"hi"', "invalid_value", 'a string ("hi")'),
        (b"null", "invalid_value", "null"),
        (b'{"prompt": {"a": 1}}', "invalid_value", "prompt must be a string"),
        (b'{"messages": "hi"}', "invalid_value", "messages must be a non-empty list"),
        (b'{"prompt": "a"', "invalid_json", "at column 15"),
        (b'{"prompt": "a"}}', "invalid_json", "Extra data"),
        (b'{"prompt": "a", "temperature": NaN}', "invalid_json", "NaN"),
        (b'{"prompt": "a", "temperature": -Infinity}', "invalid_json", "-Infinity"),
        (b'{"prompt": "a", "temperature": 1e999}', "invalid_json", "1e999"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "invalid_json", "integer"),
        (b'{"prompt": ' + b"[" * 100_000, "invalid_json", "nested"),
        (b'{"prompt": "a", "prompt": "b"}', "invalid_json", '"prompt" is given twice'),
        (b'{"prompt": "\\ud83d"}', "invalid_json", "surrogate"),
        (b'{"prompt": "\xff"}', "invalid_utf8", "0xff"),
        (b"\x00", "invalid_json", "column 1"),
    ],
    ids=lambda value: str(value[:24]),
)
def test_bad_line_is_one_error_and_the_rest_runs(
    tmp_path: Path, line: bytes, code: str, says: str
) -> None:
    before, error, after = read(tmp_path, b'{"prompt": "a"}\n' + line + b'\n{"prompt": "b"}\n')
    assert isinstance(before, PromptRow) and isinstance(after, PromptRow)
    assert isinstance(error, RowError) and (error.index, error.line) == (1, 2)
    assert error.custom_id == "row-2" and error.code == code and says in error.message


def test_surrogate_pair_is_text(tmp_path: Path) -> None:
    (row,) = read(tmp_path, b'{"prompt": "\\ud83d\\ude00", "custom_id": "\\ud83d\\ude00"}')
    assert isinstance(row, PromptRow) and row.prompt == row.custom_id == "\U0001f600"


@pytest.mark.parametrize("second", ['"prompt": "a"', '"prompt": "b"', '"max_token": 1'])
def test_duplicate_id_names_both_lines(tmp_path: Path, second: str) -> None:
    data = '{"custom_id": "x", "prompt": "a"}\n\n{"custom_id": "x", %s}\n' % second  # noqa: UP031
    first, error = read(tmp_path, data.encode())
    assert isinstance(first, PromptRow)
    assert isinstance(error, RowError) and error.code == "duplicate_custom_id"
    assert error.custom_id == "x" and "line 3: " in error.message and "line 1" in error.message


def test_id_of_a_failed_row_or_a_default_is_taken_too(tmp_path: Path) -> None:
    lines = [b'{"custom_id": "x"}', b'{"custom_id": "x", "prompt": "a"}', b"{"]
    lines.append(b'{"custom_id": "row-3", "prompt": "a"}')
    errors = [item for item in read(tmp_path, b"\n".join(lines)) if isinstance(item, RowError)]
    codes = [error.code for error in errors]
    assert codes[1::2] == ["duplicate_custom_id"] * 2 and codes[2] == "invalid_json"


@pytest.mark.parametrize("custom_id", [7, "", ["a"], True, "\ud800"])
def test_unusable_id(tmp_path: Path, custom_id: object) -> None:
    error = error_of(tmp_path, {"custom_id": custom_id, "prompt": "a"})
    assert error.custom_id == "row-1" and error.param == "custom_id"
    assert "custom_id must be a non-empty string" in error.message


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"max_tokens": "16"}, "max_tokens", 'must be an integer, got a string ("16")'),
        ({"stop": 5}, "stop", "got an integer (5)"),
        ({"temperature": -1}, "temperature", "[0, 100]"),
        ({"max_token": 5}, "max_token", "did you mean max_tokens?"),
        ({"mesages": [USER]}, "mesages", "did you mean messages?"),
        ({"messages": [USER]}, "prompt", "got prompt and messages"),
        ({"prompt": None}, "prompt", "got none of them"),
        ({"prompt": [1, 2]}, "prompt", "prompt_token_ids"),
        ({"chat_template_kwargs": {}}, "chat_template_kwargs", "goes with messages"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported yet"),
        ({"prompt": None, "prompt_token_ids": []}, "prompt_token_ids", "at least one"),
        ({"prompt": None, "prompt_token_ids": [1, True]}, "prompt_token_ids[1]", "true"),
        ({"prompt": None, "prompt_token_ids": [-1]}, "prompt_token_ids[0]", "(-1)"),
        ({"prompt": None, "prompt_token_ids": [2**31]}, "prompt_token_ids[0]", "2147483648"),
        ({"prompt": None, "prompt_token_ids": "1"}, "prompt_token_ids", "a list of token ids"),
    ],
)
def test_bad_field_of_a_flat_row(
    tmp_path: Path, fields: dict[str, Any], param: str, says: str
) -> None:
    error = error_of(tmp_path, {"custom_id": "mine", "prompt": "a", **fields})
    assert error.custom_id == "mine" and error.param == param and says in error.message


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([USER, {"content": "hi"}], "messages[1].role"),
        ([{"role": 1, "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ],
)
def test_bad_messages(tmp_path: Path, messages: list[Any], param: str) -> None:
    error = error_of(tmp_path, {"messages": messages})
    assert error.param == param and f"line 1: {param} must be" in error.message


def test_flat_rows(tmp_path: Path) -> None:
    row = row_of(tmp_path, {"prompt": "", "max_tokens": 3, "messages": None})
    assert row.kind == "completion" and row.prompt == "" and row.messages is None
    assert row.sampling == Sampling(max_tokens=3, temperature=0.5)
    row = row_of(tmp_path, {"prompt_token_ids": [0, 2**31 - 1]})
    assert row.kind == "completion" and row.token_ids == (0, 2**31 - 1) and row.prompt is None


def test_messages_become_plain_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts, "name": "n"}, {"role": "assistant"}]
    row = row_of(
        tmp_path, {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
    )
    assert row.kind == "chat" and row.template_kwargs == {"enable_thinking": False}
    assert row.messages == (
        {"role": "user", "content": "ab", "name": "n"},
        {"role": "assistant", "content": ""},
    )


def test_batch_rows(tmp_path: Path) -> None:
    extras = {"model": "any", "stream": False, "user": "u", "metadata": {"k": "v"}}
    row = row_of(tmp_path, batch(CHAT, {"messages": [USER], "max_completion_tokens": 2, **extras}))
    assert row.kind == "chat" and row.custom_id == "b" and row.sampling.max_tokens == 2
    assert row_of(tmp_path, batch("/v1/completions", {"prompt": "a"})).prompt == "a"
    assert row_of(tmp_path, batch("/v1/completions", {"prompt": [1, 2]})).token_ids == (1, 2)


@pytest.mark.parametrize(
    ("row", "param", "says"),
    [
        (batch("/v1/embeddings", {}), "url", "/v1/chat/completions or /v1/completions"),
        (batch(CHAT, {"messages": [USER]}, method="GET"), "method", "POST"),
        (batch(CHAT, {"messages": [USER]}, max_tokens=5), "max_tokens", "inside body"),
        (batch(CHAT, "hi"), "body", "body must be an object"),
        (batch(CHAT, {"prompt": "a"}), "prompt", "needs messages, got prompt"),
        (batch(CHAT, {"messages": [USER], "stream": True}), "stream", "not supported"),
        (batch(CHAT, {"messages": [USER], "custom_id": "c"}), "custom_id", "unknown field"),
        (batch("/v1/completions", {"prompt": ["a", "b"]}), "prompt[0]", "an integer"),
        (batch("/v1/completions", {"prompt": []}), "prompt", "at least one"),
        (batch("/v1/completions", {"messages": [USER]}), "messages", "needs prompt"),
        ({"method": "POST", "url": CHAT}, "body", "null"),
    ],
)
def test_bad_batch_row(tmp_path: Path, row: dict[str, Any], param: str, says: str) -> None:
    error = error_of(tmp_path, row)
    assert error.custom_id == row.get("custom_id", "row-1")
    assert error.param == param and says in error.message


@pytest.mark.parametrize("data", [b"", b"\n \r\n\t", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"])
def test_file_without_rows(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(InputFileError, match="holds no rows"):
        read(tmp_path, data)


def test_unreadable_files_say_what_to_try(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"no such file.*--input"):
        next(read_rows(tmp_path / "absent.jsonl", defaults=DEFAULTS))
    with pytest.raises(InputFileError, match="is a directory"):
        next(read_rows(tmp_path, defaults=DEFAULTS))


def test_limit_counts_rows_and_errors(tmp_path: Path) -> None:
    data = b'\n{"prompt": "a"}\nbad\n{"prompt": "c"}\n'
    assert [item.line for item in read(tmp_path, data, limit=2)] == [2, 3]
    assert len(read(tmp_path, data, limit=9)) == 3


def test_rows_come_before_the_file_is_read_to_its_end(tmp_path: Path) -> None:
    (file := tmp_path / "prompts.jsonl").write_bytes(b'{"prompt": "a"}\n' * 100_000)
    rows = read_rows(file, defaults=DEFAULTS)
    assert next(rows).line == 1
    file.write_bytes(b"")  # what a reader that slurps would not notice
    assert len(list(rows)) < 99_999


FRAGMENTS = st.sampled_from(
    [
        b"\n",
        b"\r\n",
        b" ",
        b"\xef\xbb\xbf",
        b"\xff",
        b'{"prompt": "a"}',
        b'{"custom_id": "x"}',
        b"{",
    ]
)


@given(st.lists(FRAGMENTS | st.binary(max_size=8)).map(b"".join))
def test_one_item_for_each_line_whatever_the_bytes(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    numbers = [number for number, line in enumerate(lines, start=1) if line.strip()]
    wide = data.startswith((b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff"))
    other = data.startswith((b"\x1f\x8b", b"{\x00", b"\x00{"))  # gzip, UTF-16 without a mark
    try:
        items = read(tmp_path_factory.getbasetemp(), data)
    except InputFileError:
        assert wide or other or not numbers
    else:
        assert not wide and [item.line for item in items] == numbers
        good = [item.custom_id for item in items if isinstance(item, PromptRow)]
        assert len(good) == len(set(good))

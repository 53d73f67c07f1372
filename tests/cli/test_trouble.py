"""What can happen to a run: bad rows, odd surroundings, a signal, a file that breaks off."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Infer, as_lines, command, environment, strict_json

GOOD = {"prompt": "hello", "max_tokens": 1}
BAD = [  # bytes of a line, the field that is named, a part of the message
    (b"{broken", None, "invalid JSON"),
    (b"[1, 2]", None, "a row must be an object, got an array"),
    (b"null", None, "a row must be an object, got null"),
    (b'{"prompt": {"a": 1}}', "prompt", "a string"),
    (b'{"messages": "hi"}', "messages", "a non-empty list"),
    (b'{"prompt": "caf\xe9"}', None, "not UTF-8: 0xe9"),
    (b'{"max_tokens": 3}', "prompt", "exactly one of"),
    (b'{"prompt": "a", "messages": []}', "prompt", "prompt and messages"),
    (b'{"prompt": "a", "custom_id": 7}', "custom_id", "a non-empty string"),
    (b'{"prompt": "a", "max_tokens": "16"}', "max_tokens", "an integer"),
    (b'{"prompt": "a", "max_tokens": 0}', "max_tokens", "at least 1"),
    (b'{"prompt": "a", "temperature": NaN}', None, "NaN"),
    (b'{"prompt": "a", "n": 2}', "n", "not supported yet"),
    (b'{"prompt": "a", "logprobs": true}', "logprobs", "not supported yet"),
    (b'{"prompt": "a", "presence_penalty": 1}', "presence_penalty", "not supported yet"),
    (b'{"prompt": "a", "tools": [{}]}', "tools", "not supported yet"),
    (b'{"prompt": "a", "temprature": 1}', "temprature", "did you mean temperature?"),
    (b'{"prompt": ""}', "prompt", "no tokens"),
    (b'{"prompt_token_ids": [99999]}', "prompt_token_ids", "not in the vocabulary"),
    (b'{"prompt": "' + b"hello " * 600 + b'"}', "prompt", "max_model_len=512"),
    (b'{"messages": [{"role": "user"}]}', "messages[0].content", "a string"),
    (
        b'{"messages": [{"role": "user", "content": ""}],'
        b' "chat_template_kwargs": {"add_generation_prompt": 1}}',
        "messages",
        "true or false",
    ),
]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_bad_rows_fail_alone(infer: Infer, newline: bytes) -> None:
    """With a byte-order mark, blank lines between, and no end of the last line."""
    twice = [b'{"custom_id": "x", "prompt": "a", "max_tokens": 1}'] * 2
    lines = [as_lines([GOOD]).strip(), *(raw for raw, _, _ in BAD), b"", b" \t", *twice]
    ran = infer(b"\xef\xbb\xbf" + newline.join(lines), LC_ALL="C", PYTHONUTF8="0")
    assert ran.status == 3, ran.lines
    rows = [strict_json(line) for line in ran.output.read_bytes().splitlines()]
    assert len(rows) == 1 + len(BAD) + 2
    errors = {r["response"]["body"]["error"]["message"]: r for r in rows if r["error"]}
    assert len(errors) == len(BAD) + 1
    for number, (raw, param, says) in enumerate(BAD, start=2):
        (message,) = [m for m in errors if m.startswith(f"line {number}: ")]
        assert says in message, raw
        assert errors[message]["custom_id"] == f"row-{number}"
        assert errors[message]["response"]["body"]["error"]["param"] == param, raw
    last = f'line {len(lines)}: custom_id "x" was already used on line {len(lines) - 1}'
    assert errors[last]["custom_id"] == "x"
    assert sum(row["custom_id"] == "x" and not row["error"] for row in rows) == 1


def test_only_bad_rows(infer: Infer) -> None:
    ran = infer([{"prmpt": "a"}, {"prompt": ""}], "--report", "r.json", "--plan-log", "p.jsonl")
    assert ran.status == 3, ran.lines
    assert len(ran.rows()) == 2 and all(row["error"] for row in ran.rows())


def test_quiet_says_nothing_and_a_bad_cache_costs_nothing_else(infer: Infer) -> None:
    assert infer([GOOD], "-q", "--nooverwrite").lines == []
    ran = infer([GOOD], "--overwrite", "--compile-cache", "/proc/none")
    assert ran.status == 0 and any("compile cache /proc/none is unusable" in x for x in ran.lines)


@pytest.mark.parametrize(
    ("raw", "status", "says"),
    [
        (None, 2, "no such model file"),
        (b"", 1, "not a readable GGUF file"),
        (b"GGUF", 1, "not a readable GGUF file"),
        (b"PK" + bytes(500), 1, "not a readable GGUF file"),
    ],
)
def test_bad_model(infer: Infer, tmp_path: Path, raw: bytes | None, status: int, says: str) -> None:
    if raw is not None:
        (tmp_path / "m.gguf").write_bytes(raw)
    ran = infer([GOOD], "--model", "m.gguf")
    assert ran.status == status and says in ran.last and "m.gguf" in ran.last, ran.lines
    assert not ran.output.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("flag", ["--output", "--report", "--plan-log"])
def test_full_disk(infer: Infer, flag: str) -> None:
    ran = infer([GOOD], flag, "/dev/full")
    assert ran.status == 1 and "cannot write /dev/full" in ran.last, ran.lines
    assert "No space left on device" in ran.last and f"another {flag}" in ran.last


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signal(tmp_path: Path, tiny_model: Path, cache: Path, number: signal.Signals) -> None:
    """In the middle of the run: finished rows are whole lines in the file, whatever the signal."""
    row = {"prompt": "hello the", "max_tokens": 300, "ignore_eos": True}
    (tmp_path / "in.jsonl").write_bytes(as_lines([row] * 3000))
    args = command("--input", "in.jsonl", "--model", tiny_model, "--compile-cache", cache)
    args += ["--max-seqs", "16"]
    output = tmp_path / "in.outputs.jsonl"
    with subprocess.Popen(
        args, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 120
        while not (output.exists() and output.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    raw = output.read_bytes()
    assert raw.endswith(b"\n")
    done = [strict_json(line) for line in raw.splitlines()]
    assert 0 < len(done) < 3000
    if number == signal.SIGKILL:
        return
    assert process.returncode == 4
    last = stderr.splitlines()[-1]
    assert f"interrupted by {number.name}: {len(done)} of 3000 rows are in" in last


def test_closed_standard_streams(
    infer: Infer, tmp_path: Path, tiny_model: Path, cache: Path
) -> None:
    """No file of the run takes the place of stdout or stderr."""
    assert infer([GOOD]).status == 0
    given = command("--input", "rows.jsonl", "--model", tiny_model, "--output", "o.jsonl")
    script = f"exec {' '.join(given)} --compile-cache={cache} <&- >&- 2>&-"
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=environment(), check=False)
    assert done.returncode == 0
    assert len([strict_json(x) for x in (tmp_path / "o.jsonl").read_bytes().splitlines()]) == 1


def test_first_line_is_soon(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(as_lines([GOOD]))
    began = time.monotonic()
    with subprocess.Popen(
        command("--input", "in.jsonl", "--model", tiny_model),
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        took_s = time.monotonic() - began
        os.kill(process.pid, signal.SIGTERM)
        process.communicate(timeout=60)
    assert b"reading in.jsonl" in first and took_s < 3  # 0.3 on an idle machine
    assert process.returncode == 4

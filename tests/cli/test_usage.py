"""Usual mistakes: refused at once with status 2, and a last line that says what, where and what to
try. Nothing here needs jax, so the calls are made in this process."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from blendjax import cli

GOOD = b'{"prompt": "a", "max_tokens": 1}\n'


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_bytes(GOOD)
    (tmp_path / "full.jsonl").write_bytes(GOOD)
    (tmp_path / "dir").mkdir()
    (tmp_path / "link.jsonl").symlink_to("in.jsonl")
    os.mkfifo(tmp_path / "fifo")
    return tmp_path


def refused(args: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The last line of a call that must not start anything."""
    assert cli.main(["blendjax", *args.split()]) == cli.USAGE
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    lines = captured.err.splitlines()
    assert len(lines) <= 30
    return lines[-1]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("", "--input FILE is required"),
        ("in.jsonl", "what is 'in.jsonl'?"),
        ("--input", "Missing value for flag --input"),
        ("--msh 2x4", "unknown flag --msh; did you mean --mesh?"),
        ("--out-put x", "unknown flag --out-put; did you mean --output?"),
        ("--resume", "unknown flag --resume"),
        ("--mesh 2by4", "mesh must look like 2x4"),
        ("--mesh=", "mesh must look like 2x4"),
        ("--mesh 0x1", "at least 1x1"),
        ("--policy random-order", "<dfs|fcfs"),
        ("--dtype float16", "<float32|bfloat16>"),
        ("--page-size 0", "page_size must be at least 1"),
        ("--page_size many", "invalid literal"),
        ("--num-pages 1", "num_pages must be at least 2"),
        ("--max-model-len 1", "max_model_len must be at least 2"),
        ("--max-tokens 0", "max_tokens must be at least 1, got 0"),
        ("--max-tokens -1", "max_tokens must be at least 1, got -1"),
        ("--limit 0", "--limit must be at least 1"),
        ("--seed -1", "seed must be in"),
        ("--step-tokens 0", "step_tokens must be at least 1"),
        ("--max-seqs=0", "max_seqs must be at least 1"),
    ],
)
def test_flags(work: Path, args: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = "" if args in ("", "in.jsonl", "--input") else "--input in.jsonl "
    last = refused(given + args, capsys)
    assert says in last and last.endswith("see --help")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--input none.jsonl", "there is no such file"),
        ("--input dir", "it is a directory"),
        ("--input fifo", "write it to a file first"),
        ("--output in.jsonl", "is the input file; pass another --output"),
        ("--output link.jsonl", "is the input file; pass another --output"),
        ("--output full.jsonl", "is not empty; pass --overwrite or another --output"),
        ("--output no/x.jsonl", "no directory no; create it"),
        ("--output dir --overwrite", "directory; pass another --output"),
        ("--output /proc/x", "pass another --output"),
        ("--report no/r.json", "no directory no; create it or pass another --report"),
        ("--report dir", "pass another --report"),
        ("--report in.jsonl", "is the input file; pass another --report"),
        ("--report o.jsonl --output o.jsonl", "is the output file; pass another --report"),
        ("--plan-log no/p.jsonl", "pass another --plan-log"),
        ("--plan-log r --report r", "is the report file; pass another --plan-log"),
        ("--hardware tpu9", "known chips are a100-80g"),
        ("--model dir", "--model dir is a directory"),
    ],
)
def test_files(work: Path, args: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name for path in work.iterdir()}
    assert says in refused(args if "--input" in args else f"--input in.jsonl {args}", capsys)
    assert {path.name for path in work.iterdir()} == before
    assert (work / "in.jsonl").read_bytes() == (work / "full.jsonl").read_bytes() == GOOD


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "holds no rows"),
        (b"\n  \r\n\t\n", "holds no rows"),
        (b"\xef\xbb\xbf", "holds no rows"),
        (GOOD.decode().encode("utf-16"), "is UTF-16"),
        (GOOD.decode().encode("utf-16-le"), "looks like UTF-16"),
        (GOOD.decode().encode("utf-16-be"), "looks like UTF-16"),
        (GOOD.decode().encode("utf-32"), "is UTF-32"),
        (b"\x1f\x8b\x08\x00rest", "gunzip"),
    ],
)
def test_input_bytes(work: Path, raw: bytes, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    (work / "in.jsonl").write_bytes(raw)
    last = refused("--input in.jsonl", capsys)
    assert says in last and "in.jsonl" in last


def test_strict_lists_bad_rows(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (work / "in.jsonl").write_bytes(GOOD + b"[]\n\n" + b'{"prmpt": "a"}\n' + b"{\n" * 30)
    assert cli.main(["blendjax", "--input", "in.jsonl", "--strict", "-q"]) == cli.USAGE
    lines = capsys.readouterr().err.splitlines()
    assert "line 2: a row must be an object" in lines[0]
    assert lines[1].startswith("line 4: ") and "did you mean prompt?" in lines[1]
    assert lines[-2] == "... and 12 more" and "32 of 33 rows are bad" in lines[-1]
    assert not (work / "in.outputs.jsonl").exists()


@pytest.mark.parametrize("flag", ["--help", "-h", "--input x --help"])
def test_help(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["blendjax", *flag.split()]) == cli.OK
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) < 40 and max(map(len, lines)) <= 100
    assert "--max-model-len N" in text and "--policy dfs|" in text and "Exit status" in text


def test_no_stderr(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has none after `2>&-`; a message must not land in stdout instead."""
    stdout = io.StringIO()
    monkeypatch.setattr("sys.stderr", None)
    monkeypatch.setattr("sys.stdout", stdout)
    assert cli.main(["blendjax", "--nope"]) == cli.USAGE
    assert cli.main(["blendjax", "--input", "none"]) == cli.USAGE
    assert stdout.getvalue() == ""

"""The output file holds whole lines of strict JSON whatever happens to the run or the disk."""

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blendjax.core import Completion, Request, RowError, Sampling
from blendjax.io.results import OutputFileError, OutputFormat, ResultWriter


def completion(text: str, custom_id: str = "a") -> Completion:
    request = Request(
        index=0,
        line=1,
        custom_id=custom_id,
        kind="completion",
        prompt_T=np.zeros(1, np.int32),
        sampling=Sampling(),
        seed=0,
        max_new=1,
        stop_ids=frozenset(),
    )
    return Completion(
        request=request, token_ids=(1,), text=text, finish_reason="length", cached_tokens=0
    )


def row_error(message: str = "m") -> RowError:
    return RowError(index=1, line=2, custom_id="e", message=message)


def records(path: Path) -> list[dict]:
    data = path.read_bytes()
    assert data.endswith(b"\n") or not data
    return [json.loads(line, parse_constant=pytest.fail) for line in data.split(b"\n")[:-1]]


@pytest.fixture
def small_files() -> Iterator[int]:
    """Files of this process end at 4096 bytes: the write that crosses is short, the next fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    yield 4096
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("output_format", ["openai", "simple"])
def test_each_record_is_in_the_file_when_the_call_returns(
    tmp_path: Path, output_format: OutputFormat
) -> None:
    path = tmp_path / "out.jsonl"
    with ResultWriter(path, model="m", output_format=output_format) as writer:
        writer.completion(completion("a\nb\r\u2028\U0001f600"))
        assert len(records(path)) == 1
        writer.error(row_error())
        assert len(records(path)) == 2
        assert (writer.completed, writer.failed) == (1, 1)
    first, second = records(path)
    openai = output_format == "openai"
    choice = first["response"]["body"]["choices"][0] if openai else first
    assert choice["text"] == "a\nb\r\u2028\U0001f600"
    assert second["custom_id"] == "e" and second["error"]["message"] == "m"
    assert "\U0001f600".encode() in path.read_bytes()


def test_kill_9_loses_nothing_written(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    script = (
        "import os, signal, sys; from blendjax.core import RowError\n"
        "from blendjax.io.results import ResultWriter\n"
        "writer = ResultWriter(sys.argv[1], model='m')\n"
        "writer.error(RowError(index=0, line=1, custom_id='e', message='m'))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", script, path], check=False)
    assert killed.returncode == -9 and [row["custom_id"] for row in records(path)] == ["e"]


def test_lone_surrogates_do_not_crash(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultWriter(path, model="m", output_format="simple") as writer:
        writer.completion(completion("a\udc80\nb", custom_id="\ud800"))
    (record,) = records(path)
    assert record["text"] == "a\ufffd\nb" and record["custom_id"] == "\ufffd"


def test_existing_output_is_kept_unless_told(tmp_path: Path) -> None:
    (path := tmp_path / "out.jsonl").write_text("old\n")
    with pytest.raises(OutputFileError, match=r"--overwrite or another --output"):
        ResultWriter(path, model="m")
    assert path.read_text() == "old\n"
    with ResultWriter(path, model="m", overwrite=True) as writer:
        writer.error(row_error())
    assert len(records(path)) == 1


def test_empty_output_is_no_obstacle(tmp_path: Path) -> None:
    (path := tmp_path / "out.jsonl").touch()
    ResultWriter(path, model="m").close()


def test_output_is_never_the_input(tmp_path: Path) -> None:
    (path := tmp_path / "in.jsonl").write_text("precious\n")
    (link := tmp_path / "link.jsonl").hardlink_to(path)
    for output in (path, link, tmp_path / "x" / ".." / "in.jsonl"):
        with pytest.raises(OutputFileError, match="is the input file"):
            ResultWriter(output, model="m", overwrite=True, input_path=path)
    assert path.read_text() == "precious\n"


def test_unwritable_places_say_what_to_try(tmp_path: Path) -> None:
    with pytest.raises(OutputFileError, match=r"no directory .*absent; create it"):
        ResultWriter(tmp_path / "absent" / "out.jsonl", model="m")
    with pytest.raises(OutputFileError, match=r"directory.*another --output"):
        ResultWriter(tmp_path, model="m", overwrite=True)


def test_failed_write_cuts_back_to_the_last_whole_line(tmp_path: Path, small_files: int) -> None:
    path = tmp_path / "out.jsonl"
    with ResultWriter(path, model="m") as writer:
        writer.error(row_error("x" * 300))
        whole = path.read_bytes()
        with pytest.raises(OutputFileError, match=r"out\.jsonl after 1 rows: .* bytes free"):
            writer.error(row_error("y" * small_files))
        assert path.read_bytes() == whole
        assert (writer.completed, writer.failed) == (0, 1)
        writer.error(row_error("z"))  # as after room was made
    assert len(records(path)) == 2


def test_full_device() -> None:
    with (
        ResultWriter("/dev/full", model="m") as writer,
        pytest.raises(OutputFileError, match="No space left"),
    ):
        writer.error(row_error())


def test_a_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []

    def write(fd: int, data: bytes) -> int:
        written.append(bytes(data))
        return len(data)

    with ResultWriter(tmp_path / "out.jsonl", model="m") as writer:
        monkeypatch.setattr(os, "write", write)
        writer.error(row_error("x" * 100_000))
        monkeypatch.undo()
    assert len(written) == 1 and written[0].endswith(b"\n")


def test_fsync_every_few_seconds_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, synced = [100.0], []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(now[0]))
    with ResultWriter(tmp_path / "out.jsonl", model="m", clock=lambda: now[0]) as writer:
        for now[0] in (101.0, 104.9, 105.0, 106.0, 90.0, 91.0):
            writer.error(row_error())
    assert synced == [105.0, 90.0, 91.0]


def test_failed_fsync_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer = ResultWriter(tmp_path / "out.jsonl", model="m")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OutputFileError, match="Input/output error"):
        writer.close()
    writer.close()

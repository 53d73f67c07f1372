"""The main job from end to end on a tiny model: rows in, answers, report and plan log out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Infer, Ran
from tests.tiny import EOS_IDS

CHAT = {"messages": [{"role": "user", "content": "hello the"}]}
ROWS = [
    {
        "custom_id": "batch-chat",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {**CHAT, "max_tokens": 6, "temperature": 0, "model": "any"},
    },
    {
        "custom_id": "batch-text",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "hello", "max_completion_tokens": 5},
    },
    {"custom_id": "chat", **CHAT, "max_tokens": 6, "temperature": 0.7, "top_k": 20, "seed": 3},
    {
        "custom_id": "text",
        "prompt": "hello the hello",
        "max_tokens": 7,
        "top_p": 0.9,
        "min_p": 0.01,
    },
    {"custom_id": "ids", "prompt_token_ids": [1, 2, 3], "max_tokens": 4, "min_tokens": 4},
    {"prompt": "no id", "max_tokens": 3, "ignore_eos": True, "stop": ["zzzz"]},
    {"custom_id": "bad", "prompt": "x", "max_token": 3},
]
REPORT = {
    "rows": {"total", "completed", "failed", "resumed"},
    "tokens": {"prompt", "prompt_cached", "prompt_computed", "recomputed", "generated"},
    "time_s": {"read", "load", "compile", "plan", "run", "total"},
    "throughput": {"total_tok_s", "output_tok_s"},
    "schedule": {
        *("policy", "steps", "sharing", "sharing_max", "padding_fraction", "bound_s"),
        *("percent_of_bound", "preemptions", "host_ms_per_step"),
    },
    "compiles": {"warmup", "after_warmup"},
}
NAMES = {"mesh", "devices", "model", "dtype", "kernels", "fingerprint", "versions"}


def body(row: dict[str, Any]) -> dict[str, Any]:
    return row["response"]["body"]


def texts(ran: Ran) -> dict[str, str]:
    answers = {key: body(row)["choices"][0] for key, row in ran.by_id().items()}
    return {key: one.get("text") or one["message"]["content"] for key, one in answers.items()}


def test_every_kind_of_row_in_openai_form(infer: Infer) -> None:
    ran = infer(ROWS)
    assert ran.status == 3, ran.lines
    found = ran.by_id()
    assert found.keys() == {row.get("custom_id", "row-6") for row in ROWS}
    assert len({row["id"] for row in found.values()}) == len(ROWS)
    bad = found.pop("bad")
    assert bad["response"]["status_code"] == 400
    error = body(bad)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == ("max_token", "unknown_field")
    assert bad["error"] == {"code": error["code"], "message": error["message"]}
    assert "did you mean max_tokens" in error["message"]
    for key, row in found.items():
        check_answer(key, row)
    assert body(found["batch-text"])["usage"]["completion_tokens"] == 5
    assert any("line 7" in line and "max_token" in line for line in ran.lines)


def check_answer(key: str, row: dict[str, Any]) -> None:
    assert row["error"] is None and row["response"]["status_code"] == 200
    chat = key in ("batch-chat", "chat")
    answer = body(row)
    assert answer.keys() == {"id", "object", "created", "model", "choices", "usage"}
    assert answer["object"] == ("chat.completion" if chat else "text_completion")
    (choice,) = answer["choices"]
    assert choice["index"] == 0 and choice["finish_reason"] in ("stop", "length")
    text = choice["message"]["content"] if chat else choice["text"]
    assert isinstance(text, str) and "<|" not in text
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


def test_simple_form_and_mesh_give_the_same_tokens(infer: Infer) -> None:
    forms = []
    for mesh in ("1x1", "2x2"):
        ran = infer(ROWS, "--output-format", "simple", "--overwrite", "--mesh", mesh)
        assert ran.status == 3, ran.lines
        forms.append(ran.by_id())
    keys = "custom_id index text token_ids finish_reason prompt_tokens completion_tokens error"
    for row in forms[0].values():
        assert row.keys() == set(keys.split())
        if row["error"] is None:
            assert row["completion_tokens"] == len(row["token_ids"])
    assert forms[0]["bad"]["error"]["code"] == "unknown_field"
    assert forms[0] == forms[1]


def test_report_and_plan_log_agree_with_the_output(infer: Infer, tmp_path: Path) -> None:
    ran = infer(ROWS, "--report", "r.json", "--plan_log", "p.jsonl", "--mesh", "2x1")
    report = json.loads((tmp_path / "r.json").read_text())
    assert report.keys() >= REPORT.keys() | NAMES
    for part, keys in REPORT.items():
        assert report[part].keys() >= keys, part
        assert all(not isinstance(v, int | float) or v >= 0 for v in report[part].values()), part
    assert report["rows"] == {"total": 7, "completed": 6, "failed": 1, "resumed": 0}
    assert report["mesh"] == "2x1" and report["dtype"] == "float32"
    assert report["compiles"]["after_warmup"] == 0 and report["compiles"]["warmup"] > 0
    usage = [body(row)["usage"] for row in ran.rows() if row["error"] is None]
    tokens = report["tokens"]
    assert tokens["prompt"] == sum(u["prompt_tokens"] for u in usage)
    assert tokens["generated"] == sum(u["completion_tokens"] for u in usage)
    assert tokens["prompt"] == tokens["prompt_cached"] + tokens["prompt_computed"]
    check_plan_log(tmp_path / "p.jsonl", report)


def check_plan_log(path: Path, report: dict[str, Any]) -> None:
    head, *steps = [json.loads(line) for line in path.read_text().splitlines()]
    assert head["version"] == 1 and (head["tp"], head["dp"]) == (1, 2)
    assert head["workload"] == "rows.jsonl" and head["policy"] == "dfs"
    wanted = {"model", "hardware", "overlap", "page_size", "pages_per_rank", "constants", "seed"}
    assert head.keys() >= wanted
    assert len(steps) == 2 * report["schedule"]["steps"]
    assert [(s["step"], s["rank"]) for s in steps] == [(i // 2, i % 2) for i in range(len(steps))]
    finished = [row for step in steps for row, _ in step["finish"]]
    admitted = {row for step in steps for row, _, _ in step["admit"]}
    assert sorted(finished) == [0, 1, 2, 3, 4, 5] and admitted == set(finished)
    computed = sum(length for step in steps for _, _, _, length in step["prefill"])
    assert computed == report["tokens"]["prompt_computed"] + report["tokens"]["recomputed"]


def test_seeds(infer: Infer) -> None:
    """A run repeats; another --seed changes rows without a seed of their own, and only those."""
    free = [{"custom_id": f"free{i}", "prompt": "hello", "max_tokens": 12} for i in range(3)]
    own = [{"custom_id": f"own{i}", "prompt": "hello", "max_tokens": 12, "seed": 7} for i in (0, 1)]
    runs = [texts(infer(free + own, "--overwrite", "--seed", seed)) for seed in (5, 5, 6)]
    assert runs[0] == runs[1]
    assert runs[0]["own0"] == runs[0]["own1"] == runs[2]["own0"]
    assert len({runs[0][f"free{i}"] for i in range(3)}) > 1
    assert all(runs[0][f"free{i}"] != runs[2][f"free{i}"] for i in range(3))


def test_what_ends_an_answer(infer: Infer) -> None:
    """Found in a plain run first: a stop string and a stop token that the text really reaches."""
    greedy = {"prompt": "hello the", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    form = ("--output-format", "simple", "--overwrite")
    plain = infer([{"custom_id": "plain", **greedy}], *form).by_id()["plain"]
    assert plain["finish_reason"] == "length" and plain["completion_tokens"] == 24
    ids, text = plain["token_ids"], plain["text"]
    at = next(i for i in range(4, 24) if ids[i] not in ids[:i] and ids[i] not in EOS_IDS)
    stop = next(t for i in range(3, len(text) - 2) if "\ufffd" not in (t := text[i : i + 2]))
    rows = [
        {"custom_id": "string", **greedy, "stop": [stop, "never this"]},
        {"custom_id": "late", **greedy, "stop": stop, "min_tokens": 24},
        {"custom_id": "id", **greedy, "stop_token_ids": [ids[at]]},
        {"custom_id": "id late", **greedy, "stop_token_ids": [ids[at]], "min_tokens": at + 2},
        {"custom_id": "alien", **greedy, "stop_token_ids": [10**6]},
    ]
    found = infer(rows, *form).by_id()
    assert found["string"]["finish_reason"] == "stop"
    assert found["string"]["text"] == text[: text.index(stop)]
    assert found["string"]["token_ids"] == ids[: found["string"]["completion_tokens"]]
    assert found["late"]["completion_tokens"] == 24
    assert found["id"]["finish_reason"] == "stop" and found["id"]["token_ids"] == ids[: at + 1]
    assert text.startswith(found["id"]["text"].rstrip("\ufffd"))
    assert found["id late"]["token_ids"][:at] == ids[:at]
    assert found["id late"]["token_ids"][at] != ids[at], "a stop token before min_tokens is banned"
    assert found["alien"]["error"]["param"] == "stop_token_ids"


@pytest.mark.parametrize(
    ("args", "fits"), [(("--max-model-len", 12), 11), (("--num-pages", 2), 16)]
)
def test_limits_cut_answers_and_refuse_prompts(
    infer: Infer, args: tuple[object, ...], fits: int
) -> None:
    """Prompts of the longest length that runs, and of one token more."""
    rows = [
        {"custom_id": "fits", "prompt_token_ids": [5] * fits, "ignore_eos": True},
        {"custom_id": "over", "prompt_token_ids": [5] * (fits + 1), "max_tokens": 1},
        {"custom_id": "short", "prompt_token_ids": [6], "ignore_eos": True},
    ]
    ran = infer(rows, *args)
    assert ran.status == 3, ran.lines
    found = ran.by_id()
    assert body(found["fits"])["usage"]["completion_tokens"] == 1
    assert body(found["fits"])["choices"][0]["finish_reason"] == "length"
    assert body(found["short"])["usage"]["completion_tokens"] == fits
    assert str(fits + 1) in found["over"]["error"]["message"]
    assert found["over"]["error"]["code"] in ("context_length_exceeded", "kv_cache_exceeded")


def test_limit_and_default_max_tokens(infer: Infer) -> None:
    ran = infer([{"prompt": "a"}, {"prompt": "b", "max_tokens": 3}, {"prompt": "c"}], "--limit=2",
                "--max-tokens", 2)  # fmt: skip
    assert ran.status == 0, ran.lines
    lengths = {k: body(r)["usage"]["completion_tokens"] for k, r in ran.by_id().items()}
    assert lengths.keys() == {"row-1", "row-2"}
    assert lengths["row-1"] <= 2 and lengths["row-2"] <= 3

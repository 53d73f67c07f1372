"""The main promise: a row's text depends on the row alone.

Whatever the mesh, the policy, the order of the file, page and step sizes, preemptions or prefix
sharing, every row gets the tokens of the naive oracle. The rows are chosen so that no token is a
near tie (the oracle says how far each was from being another one), so all tokens are compared.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from blendjax.config import EngineConfig, MeshSpec
from blendjax.core import Completion, PromptRow, Request, Sampling
from blendjax.engine.job import derive_seed, make_job
from blendjax.engine.llm import LLM, Run
from blendjax.io.tokenizer import TextCodec
from blendjax.model.gguf import GGUFCheckpoint
from tests.tiny import NEAR_TIE, Naive, TinyModel, naive_generate, token_bytes, write_tiny

NEW = 16
PREFIX = np.random.default_rng(5).integers(0, 256, 37).tolist()  # two pages of 16 and a part


def make_rows() -> list[PromptRow]:
    """Shared prefixes that end inside a page, prompts that are others' prefixes, equal prompts."""
    rng = np.random.default_rng(6)
    tail = lambda count: rng.integers(0, 256, count).tolist()
    greedy = lambda max_tokens=NEW, **more: Sampling(temperature=0.0, max_tokens=max_tokens, **more)
    drawn = lambda **more: Sampling(max_tokens=NEW, **more)
    forked = PREFIX + tail(9)
    rows: list[tuple[str, dict[str, Any], Sampling]] = [
        ("prefix", {"token_ids": PREFIX}, greedy()),
        ("forked", {"token_ids": forked}, greedy()),
        ("forked-drawn", {"token_ids": forked}, drawn(top_p=0.9)),
        ("forked-twice", {"token_ids": forked + tail(30)}, drawn(top_k=5, seed=7)),
        ("page-border", {"token_ids": PREFIX[:32]}, drawn(min_p=0.05, temperature=0.8)),
        ("all", {"token_ids": PREFIX + tail(2)}, drawn(top_k=20, top_p=0.95, min_p=0.01, seed=3)),
        ("long", {"token_ids": tail(70)}, greedy(max_tokens=24)),
        ("one-token", {"token_ids": tail(1)}, greedy()),
        ("stop-string", {"token_ids": forked}, greedy()),
        ("stop-id", {"token_ids": tail(5)}, greedy()),
        ("min-tokens", {"token_ids": tail(4)}, greedy(min_tokens=12)),
        ("min-tokens-then-stop", {"token_ids": tail(7)}, greedy(min_tokens=5)),
        ("eos", {"prompt": "hello the dog"}, greedy(max_tokens=20)),
        ("ignore-eos", {"prompt": "hello the dog"}, greedy(max_tokens=20, ignore_eos=True)),
        ("chat", {"messages": ({"role": "user", "content": "hello"},)}, drawn()),
    ]
    return [
        PromptRow(
            index=i,
            line=i + 1,
            custom_id=custom_id,
            kind="chat" if "messages" in given else "completion",
            sampling=sampling,
            **given,
        )
        for i, (custom_id, given, sampling) in enumerate(rows)
    ]


def with_stops(rows: list[PromptRow], tiny: TinyModel) -> list[PromptRow]:
    """A stop string and stop ids that do come: over two tokens of the row's own text, and early."""
    chosen = []
    for row in rows:
        change: dict[str, Any] = {}
        if row.custom_id.startswith(("stop", "min")):
            text = naive_generate(tiny, row.token_ids or (), NEW).tokens
            pairs = (token_bytes(text[i : i + 2]) for i in range(5, NEW))
            ascii_pair = next((p.decode() for p in pairs if p.isascii()), "")
            by_id = row.custom_id != "stop-string"
            change = {"stop_token_ids": (text[5],)} if by_id else {"stop": ("never", ascii_pair)}
        sampling = dataclasses.replace(row.sampling, **change)
        chosen.append(dataclasses.replace(row, sampling=sampling))
    return chosen


class Expected(NamedTuple):
    rows: list[PromptRow]
    answers: dict[str, Naive]


@pytest.fixture(scope="module")
def expected(tiny: TinyModel) -> Expected:
    rows = with_stops(make_rows(), tiny)
    codec = TextCodec.from_gguf(GGUFCheckpoint(tiny.path).metadata)
    job = make_job(rows, codec, EngineConfig(), max_model_len=512)
    answers = {request.custom_id: oracle(tiny, request) for request in job.requests}
    assert len(answers) == len(rows)
    return Expected(rows, answers)


def oracle(tiny: TinyModel, request: Request) -> Naive:
    return naive_generate(
        tiny,
        request.prompt_T.tolist(),
        request.max_new,
        stop_ids=request.stop_ids,
        sampling=request.sampling,
        seed=request.seed,
    )


def test_the_rows_are_a_test(expected: Expected) -> None:
    near = {name for name, answer in expected.answers.items() if min(answer.gaps) < NEAR_TIE}
    assert not near, "rows with a near tie can't be compared: choose others"
    ends = {name: (len(answer.tokens), answer.reason) for name, answer in expected.answers.items()}
    stopped = {"stop-string", "stop-id", "min-tokens-then-stop", "eos"}
    assert {name for name, (_, reason) in ends.items() if reason == "stop"} == stopped
    assert ends["ignore-eos"] == (20, "length")
    assert ends["min-tokens-then-stop"][0] > 5
    assert expected.answers["forked"].tokens != expected.answers["forked-drawn"].tokens


class Setting(NamedTuple):
    """A way to run the rows. `config` fields over the engine's, with `mesh` as text."""

    config: dict[str, Any]
    shuffle: int = 0  # seed of the order of the rows; 0 keeps it
    preempts: bool = False


def setting(shuffle: int = 0, preempts: bool = False, **config: Any) -> Setting:
    return Setting({"mesh": "1x1", "step_tokens": 16} | config, shuffle, preempts)


SETTINGS = {
    "defaults": setting(step_tokens=256),
    "1x2": setting(mesh="1x2"),
    "1x4-page_1": setting(mesh="1x4", page_size=1, shuffle=1),
    "1x8-fcfs": setting(mesh="1x8", policy="fcfs"),
    "2x1-fcfs-shuffled": setting(mesh="2x1", policy="fcfs", shuffle=2),
    "2x4-step_33": setting(mesh="2x4", step_tokens=33),
    "4x2-max_seqs_3": setting(mesh="4x2", max_seqs=3, shuffle=3),
    "page_64-step_512-fcfs": setting(page_size=64, step_tokens=512, policy="fcfs", shuffle=4),
    "max_seqs_1": setting(max_seqs=1),
    "step_1": setting(step_tokens=1),
    "unshared": setting(prefix_sharing=False, step_tokens=33),
    "preempted": setting(num_pages=10, preempts=True),
    "preempted-page_1": setting(num_pages=140, page_size=1, preempts=True, shuffle=5),
    "preempted-unshared-2x1": setting(
        mesh="2x1", num_pages=8, page_size=16, prefix_sharing=False, preempts=True, policy="fcfs"
    ),
}


def run_rows(
    model: Path, rows: list[PromptRow], config: dict[str, Any]
) -> tuple[Run, dict[str, Completion]]:
    settings = config | {"mesh": MeshSpec.parse(config["mesh"]), "record_margins": True}
    run = LLM(model, EngineConfig(**settings)).start(rows)
    answers = list(run)
    completions = [answer for answer in answers if isinstance(answer, Completion)]
    assert len(completions) == len(answers) == len(rows), answers
    return run, {answer.request.custom_id: answer for answer in completions}


def shuffled(rows: list[PromptRow], seed: int) -> list[PromptRow]:
    order = np.random.default_rng(seed).permutation(len(rows)) if seed else range(len(rows))
    return [dataclasses.replace(rows[j], index=i, line=i + 1) for i, j in enumerate(order)]


def naive_text(answer: Naive, stops: tuple[str, ...]) -> str:
    """Without the stop string or the id that ended it."""
    text = token_bytes(answer.tokens)
    places = [text.index(stop.encode()) for stop in stops if stop.encode() in text]
    if answer.reason == "stop" and not places:
        text = token_bytes(answer.tokens[:-1])
    return text[: min(places, default=None)].decode("utf-8", "replace")


@pytest.mark.parametrize("name", SETTINGS)
def test_every_row_gets_the_tokens_of_the_oracle(
    name: str, tiny_model: Path, expected: Expected
) -> None:
    config, order, preempts = SETTINGS[name]
    run, answers = run_rows(tiny_model, shuffled(expected.rows, order), config)
    got = {name: list(answer.token_ids) for name, answer in answers.items()}
    assert got == {name: want.tokens for name, want in expected.answers.items()}
    for custom_id, want in expected.answers.items():
        answer = answers[custom_id]
        assert answer.finish_reason == want.reason, custom_id
        assert answer.text == naive_text(want, answer.request.sampling.stop), custom_id
        assert len(answer.margins) == len(answer.token_ids)
        if answer.request.sampling.greedy:
            np.testing.assert_allclose(answer.margins, want.gaps, atol=NEAR_TIE, rtol=0)
    assert bool(run.preemptions) == preempts, run.preemptions
    shared = any(answer.cached_tokens for answer in answers.values())
    assert shared == run.llm.config.prefix_sharing, "sharing did nothing, or did it unasked"


def test_a_9_head_model_with_rope_factors_and_its_own_head(tmp_path: Path) -> None:
    """The demo model's 9 heads over 3, on shards that don't divide them; greedy rows only."""
    factors = (1.0, 1.0, 2.0, 3.0, 8.0, 8.0)
    tiny = write_tiny(
        tmp_path / "m.gguf",
        heads=9,
        kv_heads=3,
        head_dim=12,
        ffn=50,
        tied=False,
        rope_factors=factors,
        seed=1,
    )
    rows = [row for row in make_rows() if row.sampling.greedy and row.token_ids][:5]
    rows = shuffled(rows, 0)
    for mesh in ("1x2", "1x8"):
        _, answers = run_rows(tiny.path, rows, {"mesh": mesh, "step_tokens": 16})
        for answer in answers.values():
            want = oracle(tiny, answer.request)
            assert min(want.gaps) > NEAR_TIE
            assert list(answer.token_ids) == want.tokens, (mesh, answer.request.custom_id)


def test_a_row_without_a_seed_has_one_from_the_run_and_its_id() -> None:
    assert derive_seed(0, "a") == derive_seed(0, "a")
    seeds = {derive_seed(run, custom_id) for run in (0, 1) for custom_id in ("a", "b", "1:a")}
    assert len(seeds) == 6
    assert derive_seed(0, "row-1") == 9_592_645_811_660_713_522, "old results can't be repeated"

"""The engine as a user meets it: order, errors, limits, and that a run compiles nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from blendjax.config import EngineConfig, MeshSpec
from blendjax.core import Completion, PromptRow, RowError, Sampling
from blendjax.engine.llm import LLM, answer_index
from blendjax.engine.runner import CompiledSteps
from blendjax.model.step import DeviceState
from tests.tiny import TinyModel, naive_generate, write_tiny

GREEDY = Sampling(temperature=0.0, max_tokens=6)
SMALL = EngineConfig(mesh=MeshSpec(1, 1), step_tokens=16)
COMPILES: list[str] = []


@jax.monitoring.register_event_duration_secs_listener
def _count(event: str, duration_secs: float, **_: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILES.append(event)


def row_of(index: int, length: int, **sampling: Any) -> PromptRow:
    """A prompt of so many tokens, none like another's."""
    tokens = np.random.default_rng(100 + index).integers(0, 256, length)
    return PromptRow(
        index=index,
        line=index + 1,
        custom_id=f"r{index}",
        kind="completion",
        token_ids=tuple(tokens.tolist()),
        sampling=dataclasses.replace(GREEDY, **sampling),
    )


def naive_tokens(tiny: TinyModel, row: PromptRow, max_tokens: int) -> tuple[int, ...]:
    assert row.token_ids is not None
    return tuple(naive_generate(tiny, row.token_ids, max_tokens).tokens)


def completed(answer: Completion | RowError) -> Completion:
    assert isinstance(answer, Completion), answer
    return answer


def refused(answer: Completion | RowError, code: str) -> RowError:
    assert isinstance(answer, RowError), answer
    assert answer.code == code
    return answer


MIXED = [
    row_of(0, 40),
    row_of(1, 3, temperature=1.0),
    row_of(2, 5, temperature=0.7, top_p=0.9, seed=4),
    row_of(3, 33, temperature=0.7, top_k=5, min_p=0.1),
    row_of(4, 1, stop=("a", "bc")),
    row_of(5, 9, min_tokens=4, max_tokens=20),
    row_of(6, 2, stop_token_ids=(7, 8, 9), ignore_eos=True, min_tokens=1),
]


def test_nothing_compiles_after_warm_up(tiny_model: Path) -> None:
    """Rows with every parameter come and go, alone and together."""
    run = LLM(tiny_model, dataclasses.replace(SMALL, max_seqs=3)).start(MIXED)
    run.warm()
    before = len(COMPILES)
    assert before, "the counter counts nothing"
    assert len(list(run)) == len(MIXED)
    assert len(COMPILES) == before, "a step shape or a small op compiled during the run"
    assert run.stats.steps > 10


def test_a_second_run_of_the_same_shapes_compiles_nothing(tiny_model: Path) -> None:
    llm = LLM(tiny_model, SMALL)
    rows = [row_of(i, 4) for i in range(3)]
    first = llm.generate(rows)
    before, run = len(COMPILES), llm.start(rows)
    again = {answer_index(answer): answer for answer in run}
    assert [completed(again[i]).token_ids for i in range(3)] == [
        completed(answer).token_ids for answer in first
    ]
    assert run.compiles == 0
    assert len(COMPILES) == before, "a small op compiles in every run"


def test_answers_come_in_the_order_of_the_prompts(tiny_model: Path, tiny: TinyModel) -> None:
    """Whatever ends first, and whatever index a row brings along."""
    rows = [row_of(i, 3, max_tokens=12 - 3 * i) for i in range(4)]
    prompts = [*rows[::-1], "hello", dataclasses.replace(rows[0], custom_id="again")]
    answers = [completed(a) for a in LLM(tiny_model, SMALL).generate(prompts, GREEDY)]
    assert [a.request.custom_id for a in answers] == ["r3", "r2", "r1", "r0", "row-5", "again"]
    assert [a.request.index for a in answers] == list(range(6))
    for answer, row in zip(answers[:4], rows[::-1], strict=True):
        want = naive_tokens(tiny, row, row.sampling.max_tokens or 0)
        assert answer.token_ids == want
    assert answers[3].token_ids == answers[5].token_ids


def test_no_prompts_and_only_misfits_compile_nothing(tiny_model: Path) -> None:
    llm = LLM(tiny_model, SMALL)
    before = len(COMPILES)
    assert llm.generate([]) == []
    error = RowError(index=0, line=1, custom_id="bad", message="no")
    run = llm.start([error])
    assert list(run) == [error]
    assert run.preemptions == 0
    refused(llm.generate([""])[0], "empty_prompt")
    assert len(COMPILES) == before


def test_errors_stand_in_their_rows_places(tiny_model: Path) -> None:
    """Row errors come first from a run, and `generate` sorts them in."""
    llm = LLM(tiny_model, SMALL)
    rows = [row_of(0, 3), row_of(1, 600), row_of(2, 4)]
    answers = llm.generate([*rows, "", dataclasses.replace(rows[0], token_ids=(1, 266))])
    completed(answers[0])
    error = refused(answers[1], "context_length_exceeded")
    assert (error.index, error.line, error.custom_id) == (1, 2, "r1")
    assert "600" in error.message
    assert "512" in error.message
    completed(answers[2])
    refused(answers[3], "empty_prompt")
    assert isinstance(answers[4], RowError), "id 266 is not in the vocabulary"


def test_prompts_at_the_limit(tiny_model: Path, tiny: TinyModel) -> None:
    """Prompt and new tokens fill max_model_len to the last one."""
    limit, config = 24, dataclasses.replace(SMALL, max_model_len=24)
    cases = [(limit + more, asked) for more in (-2, -1, 0, 1) for asked in (1, 2)]
    rows = [row_of(i, length, max_tokens=asked) for i, (length, asked) in enumerate(cases)]
    for row, answer, (length, asked) in zip(
        rows, LLM(tiny_model, config).generate(rows), cases, strict=True
    ):
        if length >= limit:
            refused(answer, "context_length_exceeded")
            continue
        want = naive_tokens(tiny, row, min(asked, limit - length))
        assert completed(answer).token_ids == want, (length, asked)


def test_the_whole_context_of_the_model_can_be_used(tiny_model: Path, tiny: TinyModel) -> None:
    row = row_of(3, 509, max_tokens=99)
    run = LLM(tiny_model, dataclasses.replace(SMALL, step_tokens=64)).start([row])
    (answer,) = run
    assert completed(answer).token_ids == naive_tokens(tiny, row, 3)
    assert completed(answer).finish_reason == "length"
    assert run.job.shortened == 1


def test_rows_and_the_size_of_the_kv_pool(tiny_model: Path, tiny: TinyModel) -> None:
    """Three pages of 4 tokens: prompts up to 12, and the last new token needs no room."""
    config = dataclasses.replace(SMALL, num_pages=4, page_size=4)
    rows = [
        row_of(0, 13, max_tokens=1),
        row_of(1, 12, max_tokens=9),
        row_of(2, 9, max_tokens=9),
        row_of(3, 1, max_tokens=99),
    ]
    run = LLM(tiny_model, config).start(rows)
    answers = {answer_index(answer): answer for answer in run}
    error = refused(answers[0], "kv_cache_exceeded")
    assert "13 tokens" in error.message
    assert "holds 12" in error.message
    for i, new in ((1, 1), (2, 4), (3, 12)):
        assert completed(answers[i]).token_ids == naive_tokens(tiny, rows[i], new), i
        assert completed(answers[i]).finish_reason == "length"
    assert run.job.shortened == 3


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(SMALL, num_pages=9),
        dataclasses.replace(SMALL, mesh=MeshSpec(2, 4), max_seqs=2),
    ],
    ids=["pages_reused", "2x4"],
)
def test_what_nobody_wrote_is_never_read(
    config: EngineConfig, tiny_model: Path, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool full of NaN, the scratch page too, gives the same tokens."""
    zero_state = CompiledSteps.zero_state

    def poisoned(steps: CompiledSteps) -> DeviceState:
        state = zero_state(steps)
        nan = lambda pool: jax.device_put(jnp.full(pool.shape, jnp.nan, pool.dtype), pool.sharding)
        return dataclasses.replace(state, k=nan(state.k), v=nan(state.v))

    monkeypatch.setattr(CompiledSteps, "zero_state", poisoned)
    stem = row_of(0, 35)
    assert stem.token_ids is not None
    rows = [stem, *(row_of(i, 5 * i) for i in range(1, 5))]
    rows += [dataclasses.replace(stem, token_ids=(*stem.token_ids, 9), custom_id="shares")]
    for row, answer in zip(rows, LLM(tiny_model, config).generate(rows), strict=True):
        assert completed(answer).token_ids == naive_tokens(tiny, row, 6), row.custom_id


def test_a_broken_row_leaves_the_others_alone(
    tiny_model: Path, tiny: TinyModel, tmp_path: Path
) -> None:
    """One token's embedding is NaN: rows that hold it are errors, and their KV reaches nobody."""
    embedding = tiny.tensors["token_embd.weight"].copy()
    embedding[256] = np.nan
    head = {"output.weight": tiny.tensors["token_embd.weight"]}
    broken = write_tiny(tmp_path / "m.gguf", tensors={"token_embd.weight": embedding} | head).path
    good, config = row_of(0, 5), dataclasses.replace(SMALL, max_seqs=2)
    bad = dataclasses.replace(row_of(1, 20), token_ids=(1, 2, 256, 3))
    after = [row_of(i, 20) for i in range(2, 5)]
    answers = LLM(broken, config).generate([good, bad, *after])
    refused(answers[1], "non_finite_logits")
    for row, answer in zip([good, *after], [answers[0], *answers[2:]], strict=True):
        assert completed(answer).token_ids == naive_tokens(tiny, row, 6)


def test_bfloat16_agrees_where_the_choice_is_clear(tiny_model: Path, tiny: TinyModel) -> None:
    """First tokens only: behind a tie that falls the other way all is different."""
    rows = [row_of(i, 10 + i, max_tokens=1) for i in range(24)]
    config = dataclasses.replace(SMALL, dtype="bfloat16")
    clear = 0
    for row, answer in zip(rows, LLM(tiny_model, config).generate(rows), strict=True):
        want = naive_generate(tiny, row.token_ids or (), 1)
        if want.gaps[0] > 0.7:
            clear += 1
            assert completed(answer).token_ids == tuple(want.tokens)
    assert clear > 4


def test_an_unknown_policy_is_named_with_those_there_are(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match=r"'sjf'.*dfs"):
        LLM(tiny_model, EngineConfig(policy="sjf"))

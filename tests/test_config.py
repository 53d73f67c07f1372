"""Settings refuse what can't be; heads lie on any number of shards."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendjax.config import EngineConfig, HeadLayout, MeshSpec, ModelConfig
from blendjax.core import Request, Sampling


def model(**changes: Any) -> ModelConfig:
    demo = ModelConfig(
        name="demo",
        num_layers=30,
        hidden=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        ffn=1536,
        vocab=49152,
        max_len=8192,
        rope_theta=1e5,
        rms_eps=1e-5,
        tied=True,
    )
    return dataclasses.replace(demo, **changes)


def test_parameters_of_the_demo_model() -> None:
    assert model().params == 134_515_008  # SmolLM2-135M
    assert model(tied=False).params == 134_515_008 + 49152 * 576


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 2}, "num_heads=9 is no multiple of num_kv_heads=2"),
        ({"head_dim": 63}, "head_dim=63 must be even"),
        ({"rope_factors": (1.0,) * 31}, "31 rope factors for head_dim=64: expected 32"),
    ],
)
def test_shapes_that_no_model_has(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(**changes)


@pytest.mark.parametrize("text", ["2x4", "2X4", "2*4", " 2x4 "])
def test_meshes(text: str) -> None:
    mesh = MeshSpec.parse(text)
    assert (mesh.data, mesh.model, mesh.size, str(mesh)) == (2, 4, 8, "2x4")


@pytest.mark.parametrize(
    "text", ["", "2", "x4", "2x", "2x4x1", "-1x4", "2.0x4", "2 x 4", "0x4", "2x0"]
)
def test_no_meshes(text: str) -> None:
    with pytest.raises(ValueError, match="mesh"):
        MeshSpec.parse(text)


def test_the_default_model_on_eight_shards() -> None:
    """The example of design section 5: each KV head twice, six padded to eight."""
    layout = HeadLayout.of(model(), 8)
    assert (layout.replicas, layout.kv_heads, layout.group, layout.heads) == (2, 1, 2, 2)
    assert HeadLayout.of(model(), 1) == HeadLayout(
        shards=1, kv_heads=3, group=3, replicas=1, ffn=1536, vocab=49152
    )


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 64), st.integers(1, 99))
def test_every_head_column_and_word_has_a_place(
    kv: int, group: int, shards: int, width: int
) -> None:
    shape = model(num_heads=kv * group, num_kv_heads=kv, ffn=width, vocab=width + 1)
    layout = HeadLayout.of(shape, shards)
    assert layout.kv_heads * shards >= kv * layout.replicas, "a copy of a KV head is left out"
    assert (layout.kv_heads - 1) * shards < kv * layout.replicas, "a shard of zero heads alone"
    assert layout.group * layout.replicas >= group > (layout.group - 1) * layout.replicas
    assert layout.ffn * shards >= width > (layout.ffn - 1) * shards
    assert layout.vocab * shards >= width + 1 > (layout.vocab - 1) * shards
    assert layout.replicas == 1 or kv * layout.replicas <= shards


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("page_size", 0),
        ("max_seqs", 0),
        ("step_tokens", -1),
        ("num_pages", 1),
        ("max_model_len", 1),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_engine_settings_are_checked(name: str, value: int) -> None:
    changes: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=name):
        EngineConfig(**changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", 101.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
        ("min_tokens", -1),
        ("stop", ("a", "")),
    ],
)
def test_sampling_is_checked(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        Sampling(**{name: value})


def test_sampling_borders() -> None:
    assert Sampling(temperature=0.0).greedy and not Sampling().greedy
    Sampling(max_tokens=3, min_tokens=3, top_p=1.0, min_p=1.0, seed=2**64 - 1, temperature=100.0)
    with pytest.raises(ValueError, match="min_tokens=4 is over max_tokens=3"):
        Sampling(max_tokens=3, min_tokens=4)


def request(prompt: np.ndarray, max_new: int = 1) -> Request:
    return Request(
        index=3,
        line=4,
        custom_id="a",
        kind="chat",
        prompt_T=prompt,
        sampling=Sampling(),
        seed=0,
        max_new=max_new,
        stop_ids=frozenset(),
    )


def test_requests_are_ready_to_run() -> None:
    prompt = request(np.ones(2, np.int32)).prompt_T
    with pytest.raises(ValueError, match="read-only"):
        prompt[0] = 2
    for bad in (np.ones(2, np.int64), np.ones(0, np.int32)):
        with pytest.raises(ValueError, match="row 3: prompt"):
            request(bad)
    with pytest.raises(ValueError, match="row 3: max_new"):
        request(np.ones(1, np.int32), max_new=0)

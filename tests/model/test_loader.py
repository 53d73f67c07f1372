"""Every weight of a file is on the mesh where it belongs, and every misfit is refused by name."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from blendjax.config import HeadLayout, MeshSpec, ModelConfig
from blendjax.engine.mesh import make_mesh
from blendjax.model import placement
from blendjax.model.find import find_model
from blendjax.model.gguf import GGUFCheckpoint
from blendjax.model.loader import CheckpointError, check
from blendjax.model.placement import place
from tests.tiny import TOKENS, TinyModel, write_tiny

SHAPES = [
    *((9, 3, shards) for shards in range(1, 9)),
    *((4, 2, shards) for shards in (1, 2, 4, 8)),
    *((32, 8, shards) for shards in (1, 8, 16, 32)),
    *((1, 1, shards) for shards in (1, 3)),
    *((8, 1, shards) for shards in (3, 4, 8)),
    *((14, 2, shards) for shards in (4, 5, 8)),
]


def model_of(heads: int, kv_heads: int) -> ModelConfig:
    return ModelConfig(
        name="m",
        num_layers=1,
        hidden=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=2,
        ffn=10,
        vocab=10,
        max_len=64,
        rope_theta=1e4,
        rms_eps=1e-5,
        tied=True,
    )


@pytest.mark.parametrize(("heads", "kv_heads", "shards"), SHAPES)
def test_every_query_head_is_computed_once_by_its_kv_head(
    heads: int, kv_heads: int, shards: int
) -> None:
    model = model_of(heads, kv_heads)
    layout = HeadLayout.of(model, shards)
    number = lambda count: np.repeat(np.arange(count, dtype=np.float32) + 1, 2)  # of the head
    q, k, v = (np.tile(number(n), (2, 1)) for n in (heads, kv_heads, kv_heads))
    out = np.tile(number(heads)[:, None], (1, 2))
    pairs = []
    for shard in range(shards):
        qkv = placement._qkv(q, k, v * 10, shard, model=model, layout=layout)
        parts = np.split(qkv[0, ::2].astype(int), [layout.heads, layout.heads + layout.kv_heads])
        local_q, local_k, local_v = (part.tolist() for part in parts)
        local_out = placement._out(out, shard, model, layout)[::2, 0].astype(int).tolist()
        assert local_out == local_q, "the output projection has other heads than the queries"
        assert [10 * j for j in local_k] == local_v
        pairs += [(h - 1, local_k[i // layout.group] - 1) for i, h in enumerate(local_q) if h]
    want = [(h, h // model.group) for h in range(heads)]
    assert sorted(pairs) == want, "(query head, its KV head) over all shards"


@pytest.mark.parametrize(("heads", "kv_heads", "shards"), SHAPES)
def test_layout_covers_ffn_and_vocabulary(heads: int, kv_heads: int, shards: int) -> None:
    layout = HeadLayout.of(model_of(heads, kv_heads), shards)
    for local in (layout.ffn, layout.vocab):
        assert local * shards >= 10 > (local - 1) * shards


def test_the_design_example_of_a_layout() -> None:
    layout = HeadLayout.of(model_of(9, 3), 8)
    assert (layout.replicas, layout.kv_heads, layout.group, layout.heads) == (2, 1, 2, 2)


def open_model(path: Path) -> tuple[GGUFCheckpoint, ModelConfig]:
    checkpoint = GGUFCheckpoint(path)
    check(checkpoint, checkpoint.config)
    return checkpoint, checkpoint.config


def placed(path: Path, mesh: str, dtype: str = "float32") -> dict[str, Any]:
    checkpoint, model = open_model(path)
    spec = MeshSpec.parse(mesh)
    layout = HeadLayout.of(model, spec.model)
    return place(checkpoint, model, layout, make_mesh(spec).mesh, dtype=jnp.dtype(dtype))


def columns(shards: np.ndarray, size: int) -> np.ndarray:
    """`[shards, in, local out]` -> `[out, in]` without the zeros that pad."""
    whole = np.concatenate(list(shards), axis=-1).T
    assert not whole[size:].any(), "padding isn't zero"
    return whole[:size]


def heads_of(fused: np.ndarray, tiny: TinyModel, layout: HeadLayout) -> dict[str, np.ndarray]:
    """Q, K and V `[heads * E, D]` out of the shards' fused `[D, local]`; copies must agree."""
    e, d = tiny.head_dim, fused.shape[1]
    group = tiny.heads // tiny.kv_heads
    whole = {n: np.zeros((tiny.heads, e, d)) for n in ("attn_q", "attn_k", "attn_v")}
    for shard, slot in itertools.product(range(layout.shards), range(layout.kv_heads)):
        kv, copy = divmod(shard * layout.kv_heads + slot, layout.replicas)
        if kv >= tiny.kv_heads:
            continue
        local = fused[shard].T.reshape(-1, e, d)
        whole["attn_k"][kv] = local[layout.heads + slot]
        whole["attn_v"][kv] = local[layout.heads + layout.kv_heads + slot]
        for g in range(layout.group):
            of_group = copy * layout.group + g
            if of_group < group:
                whole["attn_q"][kv * group + of_group] = local[slot * layout.group + g]
    flat = {name: w.reshape(-1, d) for name, w in whole.items()}
    rows = tiny.kv_heads * e
    return flat | {name: flat[name][:rows] for name in ("attn_k", "attn_v")}


MODELS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied_9_heads": {"heads": 9, "kv_heads": 3, "hidden": 72, "ffn": 50, "tied": False},
    "head_dim_32": {"head_dim": 32},
}


@pytest.mark.parametrize("mesh", ["1x1", "1x2", "1x3", "1x4", "1x8", "2x4"])
@pytest.mark.parametrize("kind", MODELS)
def test_params_on_the_mesh_are_the_weights_of_the_file(
    kind: str, mesh: str, tmp_path: Path
) -> None:
    tiny = write_tiny(tmp_path / "m.gguf", **MODELS[kind])
    params = placed(tiny.path, mesh)
    got = {name: np.asarray(a) for name, a in params.items() if name != "layers"}
    assert ("head" in got) == ("output.weight" in tiny.tensors)
    for ours, name in (("embed", "token_embd"), ("head", "output")):
        if ours in got:
            whole = np.concatenate(list(got[ours]))
            np.testing.assert_array_equal(whole[: len(TOKENS)], tiny.tensors[f"{name}.weight"])
            assert not whole[len(TOKENS) :].any()
    for norm in got["norm"]:
        np.testing.assert_array_equal(norm, tiny.tensors["output_norm.weight"])
    layout = HeadLayout.of(GGUFCheckpoint(tiny.path).config, MeshSpec.parse(mesh).model)
    for i in range(tiny.layers):
        check_layer({n: np.asarray(a)[:, i] for n, a in params["layers"].items()}, i, tiny, layout)


def check_layer(
    got: dict[str, np.ndarray], index: int, tiny: TinyModel, layout: HeadLayout
) -> None:
    """`got`: each parameter of one layer, `[shards, ...]`."""
    want = lambda name: tiny.tensors[f"blk.{index}.{name}.weight"]
    for name in ("attn_norm", "ffn_norm"):
        for shard in got[name]:
            np.testing.assert_array_equal(shard, want(name))
    for name, whole in heads_of(got["qkv"], tiny, layout).items():
        np.testing.assert_array_equal(whole, want(name), err_msg=name)
    ffn = want("ffn_gate").shape[0]
    gate, up = np.split(got["gate_up"], 2, axis=-1)
    np.testing.assert_array_equal(columns(gate, ffn), want("ffn_gate"))
    np.testing.assert_array_equal(columns(up, ffn), want("ffn_up"))
    down = got["down"].swapaxes(1, 2)
    np.testing.assert_array_equal(columns(down, ffn), want("ffn_down").T)


def test_bfloat16_is_the_rounded_weight(tiny: TinyModel) -> None:
    embed = placed(tiny.path, "1x1", "bfloat16")["embed"]
    want = jnp.asarray(tiny.tensors["token_embd.weight"], jnp.bfloat16)
    assert embed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(embed[0], np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_dequantised_as_the_gguf_package_does(kind: str, tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path / "m.gguf", dtype=GGMLQuantizationType[kind])
    checkpoint, _ = open_model(tiny.path)
    for ours, name in (("layers.1.q", "attn_q"), ("layers.1.v", "attn_v")):
        got = checkpoint.read(ours)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got.T, tiny.tensors[f"blk.1.{name}.weight"])


def test_config_comes_from_the_metadata(tmp_path: Path) -> None:
    factors = (1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0)
    tiny = write_tiny(
        tmp_path / "m.gguf", rope_factors=factors, metadata={"llama.rope.freq_base": 5e5}
    )
    _, config = open_model(tiny.path)
    assert dataclasses.asdict(config) == {
        "name": "tiny-2x64",
        "num_layers": 2,
        "hidden": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "ffn": 96,
        "vocab": len(TOKENS),
        "max_len": 512,
        "rope_theta": 5e5,
        "rms_eps": pytest.approx(1e-5),
        "tied": True,
        "rope_factors": factors,
    }


def test_head_dim_of_the_metadata_wins_over_the_quotient(tmp_path: Path) -> None:
    _, config = open_model(write_tiny(tmp_path / "m.gguf", head_dim=32).path)
    assert (config.head_dim, config.hidden // config.num_heads) == (32, 16)


def test_sampling_defaults_of_the_file(tmp_path: Path) -> None:
    keys = {"general.sampling.temp": 0.25, "general.sampling.top_k": 7}
    tiny = write_tiny(tmp_path / "m.gguf", metadata=keys)
    assert GGUFCheckpoint(tiny.path).sampling == {"temperature": 0.25, "top_k": 7}


def weight(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, np.ndarray | None], str]] = {
    "architecture": ({"general.architecture": "gpt2"}, {}, "architecture 'gpt2'.*llama"),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, {}, "'yarn'"),
    "linear": ({"llama.rope.scaling.type": "linear"}, {}, "'linear'"),
    "experts": ({"llama.expert_count": 8}, {}, "expert"),
    "window": ({"llama.attention.sliding_window": 64}, {}, "sliding"),
    "half_rotated": ({"llama.rope.dimension_count": 8}, {}, "8 rotated"),
    "unequal_heads": ({"llama.attention.value_length": 8}, {}, "8 value"),
    "logit_scale": ({"llama.logit_scale": 0.5}, {}, "logit_scale"),
    "no_layers_key": ({"llama.block_count": None}, {}, "llama.block_count is missing"),
    "no_heads_key": ({"llama.attention.head_count": None}, {}, "head_count is missing"),
    "no_vocabulary": ({"tokenizer.ggml.tokens": None}, {}, "tokenizer.ggml.tokens"),
    "heads_no_multiple": ({"llama.attention.head_count_kv": 3}, {}, "num_kv_heads=3"),
    "too_many_layers": ({"llama.block_count": 3}, {}, r"missing.*layers\.2"),
    "too_few_layers": ({"llama.block_count": 1}, {}, r"unused.*layers\.1"),
    "missing": ({}, {"blk.1.ffn_up.weight": None}, r"missing.*layers\.1\.up"),
    "no_embedding": ({}, {"token_embd.weight": None}, "missing.*embed"),
    "bias": ({}, {"blk.0.attn_q.bias": weight(64)}, r"unused.*blk\.0\.attn_q\.bias"),
    "qk_norm": ({}, {"blk.0.attn_q_norm.weight": weight(16)}, r"unused.*attn_q_norm"),
    "wrong_shape": ({}, {"blk.1.ffn_down.weight": weight(64, 80)}, r"layers\.1\.down.*80.*96"),
    "wrong_vocab": ({}, {"token_embd.weight": weight(200, 64)}, "embed.*200.*266"),
    "rope_factors": ({}, {"rope_freqs.weight": weight(4) + 1}, "4 rope factors"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused_by_name(why: str, tmp_path: Path) -> None:
    metadata, tensors, message = REFUSED[why]
    path = write_tiny(tmp_path / "m.gguf", metadata=metadata, tensors=tensors).path
    with pytest.raises(CheckpointError, match=message):
        open_model(path)


@pytest.mark.parametrize("part", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_a_truncated_file_is_refused(part: float, tmp_path: Path, tiny: TinyModel) -> None:
    data = tiny.path.read_bytes()
    path = tmp_path / "short.gguf"
    path.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(CheckpointError, match=r"short\.gguf"):
        open_model(path)


@pytest.mark.parametrize("data", [b"GGUF", b'{"not": "a model"}' * 100, b"\0" * 5000])
def test_another_kind_of_file_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"other\.gguf.*GGUF"):
        open_model(path)


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere\.gguf.*no such"):
        find_model(tmp_path / "nowhere.gguf")
    with pytest.raises(CheckpointError, match="directory"):
        find_model(tmp_path)

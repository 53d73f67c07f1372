"""The cost model by hand: design section 9 with the numbers of Llama-3-8B."""

from __future__ import annotations

import numpy as np
import pytest
from harness import make_request

from blendjax.config import HeadLayout, ModelConfig
from blendjax.sched.cost import CostModel, Demand, Work
from blendjax.sched.hardware import CHIPS, Hardware, hardware_for
from blendjax.sched.plan import Chunk, RankPlan, Sequence
from blendjax.sched.tree import PrefixTree, build_tree

LLAMA = ModelConfig(
    name="llama-3-8b",
    num_layers=32,
    hidden=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn=14336,
    vocab=128256,
    max_len=8192,
    rope_theta=5e5,
    rms_eps=1e-5,
    tied=False,
)
TINY = ModelConfig(
    name="tiny",
    num_layers=2,
    hidden=6,
    num_heads=3,
    num_kv_heads=3,
    head_dim=2,
    ffn=5,
    vocab=7,
    max_len=64,
    rope_theta=1e4,
    rms_eps=1e-5,
    tied=True,
)


def cost(model: ModelConfig, chip: str = "a100-80g", tp: int = 1) -> CostModel:
    return CostModel(model, HeadLayout.of(model, tp), CHIPS[chip], 2)


def step(*, contexts: list[int], chunks: list[tuple[int, int]]) -> RankPlan:
    row = Sequence(make_request(0, [1]), 0)
    return RankPlan(
        0,
        decodes=[row] * len(contexts),
        contexts=np.array(contexts, np.int32),
        chunks=[Chunk(row, start, length) for start, length in chunks],
    )


def test_llama_has_the_parameters_and_the_kv_of_the_paper() -> None:
    assert LLAMA.params == 8_030_261_248
    model = cost(LLAMA)
    assert model.kv_token_bytes == 131_072
    assert model.active_params == LLAMA.params - 128_256 * 4096 - 4096  # no lookup, no last norm
    assert model.weight_bytes == 2 * model.active_params
    assert cost(LLAMA, tp=8).kv_token_bytes == 131_072 / 8


def test_density_is_the_published_one() -> None:
    """MMLU on an A100: 804 prompt and 2 output tokens, before sharing 402 by the paper's formula,
    which counts p + d tokens, d decode reads and no attention among prompt tokens."""
    model = cost(LLAMA)
    p, d = 804, 2
    mem = model.kv_reads(p * d + d * d / 2).memory_s
    rho = model.tokens(p + d, 0).compute_s / mem
    assert rho == pytest.approx(804 / 2, rel=0.08)
    by_hand = 801 * (p + d) / (d * (p + d / 2))  # blendserve.md section 2, with all parameters
    assert rho == pytest.approx(by_hand, rel=0.08)


def test_one_step_by_hand() -> None:
    """5 rows decode or prefill at once: contexts 10 and 4, a chunk of 3 tokens behind 7."""
    demand = cost(TINY).rank_step(step(contexts=[10, 4], chunks=[(7, 3)]))
    params = 2 * (4 * 6 * 6 + 3 * 6 * 5 + 2 * 6) + 7 * 6
    attention = 4 * 3 * 2 * 2 * (3 * 7 + 3 * 4 / 2)
    assert demand.compute_s == pytest.approx((2 * params * 5 + attention) / 312e12)
    assert demand.memory_s == pytest.approx(2 * 2 * 3 * 2 * 2 * 14 / 2039e9)
    assert demand.link_s == 0


def test_tp_divides_work_and_adds_all_reduces() -> None:
    plan = step(contexts=[10, 4], chunks=[(7, 3)])
    one, two = cost(TINY).rank_step(plan), cost(TINY, tp=2).rank_step(plan)
    assert two.compute_s == pytest.approx(one.compute_s / 2)
    # 3 KV heads on 2 chips: 2 on each, the last of them zero.
    assert two.memory_s == pytest.approx(one.memory_s * 2 / 3)
    assert two.link_s == pytest.approx(2 * 2 * 2 * (1 / 2) * 5 * 6 * 2 / 300e9)
    heads = 6 * 2 * (2 * 2 + 2 * 2)
    layer = heads + 3 * 6 * 3 + 2 * 6
    assert cost(TINY, tp=2).weight_bytes == 2 * (2 * layer + 4 * 6)


@pytest.mark.parametrize(("compute_s", "first"), [(1.0, 1.0), (0.0, None)])
def test_a_serial_step_waits_for_compute_or_weights(compute_s: float, first: float | None) -> None:
    model = cost(LLAMA)
    weights_s = model.weight_bytes / 2039e9
    assert weights_s == pytest.approx(0.00736, rel=0.01)
    serial = model.serial_s(Demand(compute_s, 0.25, 0.5))
    assert serial == pytest.approx((weights_s if first is None else first) + 0.75)


def test_work_of_three_rows() -> None:
    """One token needs no decode step; the others decode at contexts 6..8 and 4."""
    work = Work.of([4, 5, 3], [1, 4, 2], tree=_tree(4, 5, 3), ranks=1)
    assert work.computed_tokens == 12 + 0 + 3 + 1
    assert work.decode_contexts == 6 + 7 + 8 + 4
    assert work.attention_pairs == 10 + 15 + 6
    assert work.longest_output == 4


def _tree(*lengths: int) -> PrefixTree:
    """Prompts that share nothing."""
    return build_tree([np.full(n, i, np.int32) for i, n in enumerate(lengths)])


def test_pairs_of_a_shared_prefix_count_once() -> None:
    shared = np.zeros(1000, np.int32)
    rows = [shared, shared, *(np.array([i], np.int32) for i in range(1, 1001))]
    work = Work.of([len(r) for r in rows], [1] * len(rows), tree=build_tree(rows), ranks=1)
    assert work.attention_pairs == 1000 * 1001 / 2 + 1000


def chip(flops: float, gb_s: float) -> Hardware:
    return Hardware(
        name="x", flops_per_s=flops, bytes_per_s=gb_s, memory_bytes=1e9, link_bytes_per_s=1e9
    )


def test_bound_by_hand() -> None:
    """48 bytes of KV a token: the reads fill a pool of 300 bytes four times, the longest row
    takes four steps; with a pool of 100 bytes it's twelve steps."""
    work = Work.of([4, 5, 3], [1, 4, 2], tree=_tree(4, 5, 3), ranks=1)
    slow_memory = CostModel(TINY, HeadLayout.of(TINY, 1), chip(1e15, 1.0), 2)
    weights = 2 * (2 * (4 * 36 + 90 + 12) + 42)
    assert slow_memory.weight_bytes == weights
    for pool_bytes, steps in ((300, 4), (100, 12), (1e9, 4)):
        assert slow_memory.bound_s(work, pool_bytes) == pytest.approx(25 * 48 + weights * steps)
    slow_compute = CostModel(TINY, HeadLayout.of(TINY, 1), chip(1.0, 1e15), 2)
    flops = weights * 16 + 4 * 3 * 2 * 2 * 31  # two operations a parameter, as bytes
    assert slow_compute.bound_s(work, 300) == pytest.approx(flops)
    two = Work.of([4, 5, 3], [1, 4, 2], tree=_tree(4, 5, 3), ranks=2)
    assert slow_compute.bound_s(two, 300) == pytest.approx(flops / 2)
    assert slow_memory.bound_s(two, 100) == pytest.approx(600 + weights * 6)


def test_an_empty_file_costs_nothing() -> None:
    work = Work.of([], [], tree=_tree(), ranks=2)
    assert cost(LLAMA).bound_s(work, 0.0) == 0


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5p", "v5p"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "v7x"),
        ("cpu", "cpu"),
    ],
)
def test_device_kinds(kind: str, name: str) -> None:
    hardware = hardware_for(kind)
    assert hardware is not None and hardware.name == name
    assert hardware_for("Quantum 9000") is None

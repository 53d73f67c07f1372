"""A tiny Llama as a real GGUF file, and the naive oracle that everything must equal.

The oracle is plain numpy in float64, written from the definitions of the model and of the sampler
and independent of blendjax's: no cache, no pages, no batch, the whole text computed again for each
token. It has the weights in the Hugging Face order of dimensions; the file holds them as converters
write them, Q and K rows interleaved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import jax.extend.random
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType
from tokenizers import pre_tokenizers

from blendjax.core import Sampling

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ t", "Ġt he"]
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>"]
TOKENS = [*ALPHABET, *(merge.replace(" ", "") for merge in MERGES), *CONTROLS]
TOKEN_ID = {token: i for i, token in enumerate(TOKENS)}
EOS_IDS = frozenset({TOKEN_ID["<|im_end|>"], TOKEN_ID["<|endoftext|>"]})
CONTEXT = 512
NEAR_TIE = 1e-3  # below it another order of additions may choose another token
_GREEDY = Sampling(temperature=0.0)
# GPT-2's letter of a byte is the byte itself where that is printable, else the next one from 256.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE}
_BYTE_OF |= {chr(256 + i): b for i, b in enumerate(sorted({*range(256)} - {*_PRINTABLE}))}
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_KEYS = {
    "llama.context_length": CONTEXT,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1] * (len(TOKENS) - len(CONTROLS)) + [3] * len(CONTROLS),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": TOKEN_ID["<|bos|>"],
    "tokenizer.ggml.eos_token_id": TOKEN_ID["<|im_end|>"],
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": CHAT_TEMPLATE,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyModel:
    """A file and its true weights: matrices `[out, in]` under their GGUF names, not interleaved."""

    path: Path
    tensors: dict[str, np.ndarray]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_eps: float = 1e-5
    rope_factors: tuple[float, ...] | None = None

    def layer(self, index: int, name: str) -> np.ndarray:
        return self.tensors[f"blk.{index}.{name}.weight"].astype(np.float64)

    @property
    def head(self) -> np.ndarray:
        return self.tensors.get("output.weight", self.tensors["token_embd.weight"])


def write_tiny(  # noqa: PLR0913 (each argument is one thing that can be odd about a model)
    path: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    ffn: int = 96,
    tied: bool = True,
    rope_factors: Sequence[float] | None = None,
    seed: int = 0,
    dtype: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> TinyModel:
    """Write the file and give its true weights. `metadata` and `tensors` (GGUF names) replace or
    add what the file holds and nothing else; None leaves a key or a tensor out."""
    e = head_dim or hidden // heads
    keys = _KEYS | {
        "general.architecture": "llama",
        "general.name": f"tiny-{layers}x{hidden}",
        "llama.block_count": layers,
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": ffn,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.rope.dimension_count": e,
    }
    if head_dim is not None:
        keys |= {"llama.attention.key_length": e, "llama.attention.value_length": e}
    q_rows, kv_rows = heads * e, kv_heads * e
    true = _random_weights(
        np.random.default_rng(seed), layers, (hidden, q_rows, kv_rows, ffn), tied=tied
    )
    true = {name: _round(weight, dtype) for name, weight in true.items()}
    stored = {name: _stored(name, weight, e) for name, weight in true.items()}
    if rope_factors is not None:
        stored["rope_freqs.weight"] = np.asarray(rope_factors, np.float32)
    _write(path, keys | dict(metadata or {}), stored | dict(tensors or {}), dtype)
    factors = None if rope_factors is None else tuple(rope_factors)
    return TinyModel(
        path=path,
        tensors=true,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=e,
        rope_factors=factors,
    )


def _random_weights(
    rng: np.random.Generator, layers: int, sizes: tuple[int, int, int, int], *, tied: bool
) -> dict[str, np.ndarray]:
    """Sharp attention, and layers that outweigh the embedding: else each token repeats itself."""
    d, q, kv, f = sizes
    draw = lambda gain, *shape: (rng.standard_normal(shape) * gain / np.sqrt(shape[-1])).astype(
        np.float32
    )
    norm = lambda: rng.uniform(0.5, 1.5, d).astype(np.float32)
    weights = {"token_embd.weight": draw(np.sqrt(d) * 0.5, len(TOKENS), d)}
    for i in range(layers):
        layer = {
            "attn_norm": norm(),
            "attn_q": draw(1.5, q, d),
            "attn_k": draw(1.5, kv, d),
            "attn_v": draw(2.0, kv, d),
            "attn_output": draw(2.0, d, q),
            "ffn_norm": norm(),
            "ffn_gate": draw(2.0, f, d),
            "ffn_up": draw(2.0, f, d),
            "ffn_down": draw(2.0, d, f),
        }
        weights |= {f"blk.{i}.{name}.weight": weight for name, weight in layer.items()}
    weights["output_norm.weight"] = norm()
    if not tied:
        weights["output.weight"] = draw(4.0, len(TOKENS), d)
    return weights


def _round(weight: np.ndarray, dtype: GGMLQuantizationType) -> np.ndarray:
    """What a reader gets back after the file's rounding. Vectors stay float32."""
    if weight.ndim == 1:
        return weight
    return np.asarray(gguf.dequantize(gguf.quantize(weight, dtype), dtype), np.float32)


def _stored(name: str, weight: np.ndarray, head_dim: int) -> np.ndarray:
    if ".attn_q." not in name and ".attn_k." not in name:
        return weight
    halves = weight.reshape(-1, 2, head_dim // 2, weight.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def _write(
    path: Path,
    keys: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | None],
    dtype: GGMLQuantizationType,
) -> None:
    writer = gguf.GGUFWriter(path, keys["general.architecture"])
    for key, value in keys.items():
        if value is not None and key != "general.architecture":
            _add(writer, key, value)
    for name, tensor in tensors.items():
        if tensor is not None:
            kind = dtype if tensor.ndim == 2 else GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def naive_logits(model: TinyModel, tokens: Sequence[int]) -> np.ndarray:
    """float64 logits `[T, V]` of every position."""
    freq = 1.0 / model.rope_theta ** (np.arange(0, model.head_dim, 2) / model.head_dim)
    if model.rope_factors is not None:
        freq = freq / np.asarray(model.rope_factors)
    angle_TJ = np.arange(len(tokens))[:, None] * freq
    x_TD = model.tensors["token_embd.weight"].astype(np.float64)[list(tokens)]
    for i in range(model.layers):
        weight = lambda name, i=i: model.layer(i, name)
        h_TD = _norm(x_TD, weight("attn_norm"), model.rms_eps)
        heads = lambda name, count, h_TD=h_TD, weight=weight: (h_TD @ weight(name).T).reshape(
            len(tokens), count, model.head_dim
        )
        q_THE = _rotate(heads("attn_q", model.heads), angle_TJ)
        k_TKE = _rotate(heads("attn_k", model.kv_heads), angle_TJ)
        seen_THE = _attend(q_THE, k_TKE, heads("attn_v", model.kv_heads))
        x_TD = x_TD + seen_THE.reshape(len(tokens), -1) @ weight("attn_output").T
        h_TD = _norm(x_TD, weight("ffn_norm"), model.rms_eps)
        gate_TF = h_TD @ weight("ffn_gate").T
        up_TF = h_TD @ weight("ffn_up").T
        x_TD = x_TD + (gate_TF / (1 + np.exp(-gate_TF)) * up_TF) @ weight("ffn_down").T
    x_TD = _norm(x_TD, model.tensors["output_norm.weight"].astype(np.float64), model.rms_eps)
    return x_TD @ model.head.astype(np.float64).T


def _norm(x_TD: np.ndarray, weight_D: np.ndarray, eps: float) -> np.ndarray:
    return x_TD / np.sqrt(np.mean(x_TD**2, axis=-1, keepdims=True) + eps) * weight_D


def _rotate(x_THE: np.ndarray, angle_TJ: np.ndarray) -> np.ndarray:
    cos, sin = np.cos(angle_TJ)[:, None], np.sin(angle_TJ)[:, None]
    half = x_THE.shape[-1] // 2
    a, b = x_THE[..., :half], x_THE[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _attend(q_THE: np.ndarray, k_TKE: np.ndarray, v_TKE: np.ndarray) -> np.ndarray:
    t, heads, e = q_THE.shape
    out_THE = np.zeros_like(q_THE)
    causal_TT = np.tril(np.ones((t, t), bool))
    for h in range(heads):
        kv = h * k_TKE.shape[1] // heads
        score_TT = np.where(causal_TT, q_THE[:, h] @ k_TKE[:, kv].T / np.sqrt(e), -np.inf)
        weight_TT = np.exp(score_TT - score_TT.max(-1, keepdims=True))
        out_THE[:, h] = weight_TT / weight_TT.sum(-1, keepdims=True) @ v_TKE[:, kv]
    return out_THE


class Naive(NamedTuple):
    """A finished row. `gaps`: how far each token was from being another one."""

    tokens: list[int]
    gaps: list[float]
    reason: str


def naive_generate(
    model: TinyModel,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    stop_ids: Collection[int] = EOS_IDS,
    sampling: Sampling = _GREEDY,
    seed: int = 0,
) -> Naive:
    """The answer to one prompt; the id that ends it is part of it. Of `sampling` the filters, the
    stop strings and min_tokens count."""
    tokens: list[int] = []
    gaps: list[float] = []
    stops = [stop.encode() for stop in sampling.stop]
    while len(tokens) < max_tokens:
        logit_V = naive_logits(model, [*prompt, *tokens])[-1]
        if len(tokens) < sampling.min_tokens:
            logit_V[list(stop_ids)] = -np.inf
        if sampling.greedy:
            token = int(logit_V.argmax())
            gap = float(logit_V[token] - np.sort(logit_V)[-2])
        else:
            noise_V = naive_noise(seed, len(prompt) + len(tokens), len(logit_V))
            token, gap = _draw(logit_V, sampling, noise_V)
        tokens.append(token)
        gaps.append(gap)
        if len(tokens) < sampling.min_tokens:
            continue
        if tokens[-1] in stop_ids or any(stop in token_bytes(tokens) for stop in stops):
            return Naive(tokens, gaps, "stop")
    return Naive(tokens, gaps, "length")


def naive_filter(logit_V: np.ndarray, sampling: Sampling, slack: float = 0.0) -> np.ndarray:
    """Which ids may be drawn: temperature, top_k, top_p, min_p, in this order; what ties with a cut
    stays. `slack` moves every cut that far out, or in if it is negative."""
    score_V = logit_V.astype(np.float64) / sampling.temperature
    if sampling.top_k:
        above_VV = score_V > score_V[:, None] + slack
        np.fill_diagonal(above_VV, False)
        score_V = np.where(above_VV.sum(1) < sampling.top_k, score_V, -np.inf)
    prob_V = np.exp(score_V - score_V.max())
    keep_V = prob_V >= sampling.min_p * np.exp(-slack)
    if sampling.top_p < 1.0:
        above_VV = score_V > score_V[:, None]
        keep_V &= above_VV @ prob_V / prob_V.sum() < sampling.top_p + slack
    return keep_V & (score_V > -np.inf)


def _draw(logit_V: np.ndarray, sampling: Sampling, noise_V: np.ndarray) -> tuple[int, float]:
    """The id, and how far it was from being another one."""
    keep = lambda slack: naive_filter(logit_V, sampling, slack)
    score_V = logit_V / sampling.temperature + noise_V
    token = int(np.where(keep(0.0), score_V, -np.inf).argmax())
    if not keep(-NEAR_TIE)[token]:
        return token, 0.0
    rivals_V = np.where(keep(NEAR_TIE), score_V, -np.inf)
    rivals_V[token] = -np.inf
    return token, float(score_V[token] - rivals_V.max())


def naive_noise(seed: int, position: int, vocab: int, *, sample: int = 0) -> np.ndarray:
    """Gumbel noise of each id, by JAX's own threefry: hash(hash(seed, sample, position), id)."""
    words = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    key = threefry(words, np.array([sample, position], np.uint32))
    ids = np.arange(vocab, dtype=np.uint32)
    bits = threefry(key, np.concatenate([ids, np.zeros_like(ids)]))[:vocab]
    return -np.log(-np.log1p(-(bits.astype(np.float64) + 0.5) / 2**32))


def threefry(key: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The first half of `counts` are first words of a block, the second half second words."""
    return np.asarray(jax.extend.random.threefry_2x32(jnp.asarray(key), jnp.asarray(counts)))


def token_bytes(tokens: Sequence[int]) -> bytes:
    """What the ids spell; control tokens spell nothing."""
    text = "".join(TOKENS[i] for i in tokens if TOKENS[i] not in CONTROLS)
    return bytes(_BYTE_OF[char] for char in text)

"""The byte-level BPE vocabulary that a GGUF file carries, as a Hugging Face tokenizer.

A GGUF file holds tokens, their types, merges, and only the name of the pre-tokenizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import Sequence as Chain

from blendjax.io.pretokenizers import PRES, Pre

# tokenizer.ggml.token_type
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4

# Control tokens that end an answer even where the metadata name only one id. A base model's
# document end and an instruct model's turn end both stop the text, as in llama.cpp.
END_SPELLINGS = frozenset(
    {
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<EOT>",
        "</s>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    }
)
_END_KEYS = ("eos_token_id", "eos_token_ids", "eot_token_id", "eom_token_id")


class UnsupportedTokenizer(ValueError):  # noqa: N818
    """The metadata name a tokenizer that we can't rebuild exactly, or lack a part of it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """The tokens that no merge makes, and the part they play. Ids are in the vocabulary."""

    control: Mapping[str, int]
    user_defined: Mapping[str, int]  # part of the plain vocabulary all the same
    bos_id: int | None
    eos_id: int | None  # the one a chat template may write
    eos_ids: frozenset[int]  # all that end an answer
    add_bos: bool  # before plain text


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of plain text: no special token comes out of it, however the text is spelled.

    Control and user-defined tokens aren't in its vocabulary; `TextCodec` cuts them out first.
    """
    pre = find_pre(metadata)
    tokens, types = read_tokens(metadata)
    vocab = {t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind == NORMAL}
    merges = [_pair(merge) for merge in _need(metadata, "merges")]
    try:
        bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the Rust side raises bare Exception
        raise UnsupportedTokenizer(f"tokenizer.ggml.merges don't fit the tokens: {error}") from None
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = Chain(list(pre.splits))  # pyright: ignore[reportAttributeAccessIssue]
    if pre.normalizer:
        tokenizer.normalizer = pre.normalizer  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def find_pre(metadata: Mapping[str, Any]) -> Pre:
    """The entry of the table that the metadata name."""
    model, known = _need(metadata, "model"), ", ".join(sorted(PRES))
    if model != "gpt2":
        raise UnsupportedTokenizer(
            f"tokenizer.ggml.model={model!r} is not supported; supported: gpt2 (byte-level BPE)"
        )
    name = _need(metadata, "pre")
    if name not in PRES:
        raise UnsupportedTokenizer(
            f"tokenizer.ggml.pre={name!r} is not supported; supported: {known}"
        )
    return PRES[name]


def read_tokens(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Spelling and type of every token; all are normal where the file gives no types."""
    tokens = list(_need(metadata, "tokens"))
    types = list(metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens)))
    if len(types) != len(tokens):
        raise UnsupportedTokenizer(f"{len(tokens)} tokens but {len(types)} token types")
    return tokens, types


def decode_table(tokens: Sequence[str], types: Sequence[int]) -> tuple[bytes, ...]:
    """The bytes each token adds to a text: none for one that is neither normal nor user-defined."""
    byte_of = {char: byte for byte, char in enumerate(_byte_alphabet())}

    def spell(token: str, kind: int) -> bytes:
        if kind == NORMAL and all(char in byte_of for char in token):
            return bytes(byte_of[char] for char in token)
        return token.encode("utf-8") if kind in (NORMAL, USER_DEFINED) else b""

    return tuple(map(spell, tokens, types))


def _byte_alphabet() -> list[str]:
    """GPT-2's letter for each byte: itself where that is printable Latin-1, else the next free."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    free = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(free)) for byte in range(0x100)]


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _need(metadata: Mapping[str, Any], name: str) -> Any:
    key = f"tokenizer.ggml.{name}"
    if key not in metadata:
        raise UnsupportedTokenizer(f"the model file has no {key}: it carries no usable tokenizer")
    return metadata[key]


def read_specials(metadata: Mapping[str, Any]) -> SpecialTokens:
    """The special tokens the metadata name, and the control tokens known to end an answer."""
    tokens, types = read_tokens(metadata)
    of_kind = {
        kind: {t: i for i, (t, k) in enumerate(zip(tokens, types, strict=True)) if k == kind}
        for kind in (CONTROL, USER_DEFINED)
    }
    named = {key: _ids(metadata, key, len(tokens)) for key in ("bos_token_id", *_END_KEYS)}
    bos_id = next(iter(named["bos_token_id"]), None)
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", find_pre(metadata).add_bos)
    spelled = {i for spelling, i in of_kind[CONTROL].items() if spelling in END_SPELLINGS}
    return SpecialTokens(
        control=of_kind[CONTROL],
        user_defined=of_kind[USER_DEFINED],
        bos_id=bos_id,
        eos_id=next(iter(named["eos_token_id"]), None),
        eos_ids=frozenset(spelled.union(*(named[key] for key in _END_KEYS))),
        add_bos=bool(add_bos) and bos_id is not None,
    )


def _ids(metadata: Mapping[str, Any], name: str, size: int) -> list[int]:
    """One id or a list of them; some files write a filler, outside the vocabulary, for none."""
    value = np.atleast_1d(metadata.get(f"tokenizer.ggml.{name}", ()))
    return [int(i) for i in value if 0 <= i < size]

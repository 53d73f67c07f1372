"""What each `tokenizer.ggml.pre` name stands for: how text is split before byte-level BPE.

A name that isn't in the table is refused by the caller: with the wrong split a model still
answers, only worse, and nobody can see why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tokenizers import Regex
from tokenizers.normalizers import NFC, Normalizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split


@dataclasses.dataclass(frozen=True, slots=True)
class Pre:
    """What a `tokenizer.ggml.pre` name stands for."""

    splits: tuple[PreTokenizer, ...]
    normalizer: Normalizer | None = None
    ignore_merges: bool = False  # a whole word of the vocabulary is taken before any merge
    add_bos: bool = False  # where the metadata don't say


def _isolate(*patterns: str) -> tuple[PreTokenizer, ...]:
    return tuple(Split(Regex(pattern), "isolated") for pattern in patterns)


def _char_class(ranges: str) -> str:
    """`41-5a b5` as the inside of a regex class."""
    ends = (span.split("-") for span in ranges.split())
    return "".join("-".join(chr(int(end, 16)) for end in span) for span in ends)


# DeepSeek-LLM lists the cased letters of the Unicode version of its day, so \p{L} won't do.
_CASED = _char_class(
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 "
    "388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd "
    "1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d "
    "1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 "
    "1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 "
    "212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee "
    "2cf2 2cf3 a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 "
    "ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 "
    "118a0-118df 1e900-1e943 "
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_FULLWIDTH = "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"

_TO_BYTES = ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2 = ByteLevel(add_prefix_space=False, use_regex=True)  # GPT-2's own split is built in
_DIGIT_BY_DIGIT = Digits(individual_digits=True)


def _words(numbers: str) -> tuple[PreTokenizer, ...]:
    """The split of GPT-4 and its heirs, who differ in how many digits go together."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + numbers + "|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return (*_isolate(pattern), _TO_BYTES)


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_gpt2 = Pre((_GPT2,))
_digits = Pre((_DIGIT_BY_DIGIT, _GPT2))
_llama3 = Pre(_words(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)

PRES: Mapping[str, Pre] = {
    "gpt-2": _gpt2,
    "phi-2": _gpt2,
    "smollm": _digits,
    "starcoder": _digits,
    "refact": _digits,
    "codeshell": _digits,
    "command-r": Pre((_DIGIT_BY_DIGIT, _GPT2), normalizer=NFC()),
    "llama3": _llama3,
    "llama-v3": _llama3,
    "llama-bpe": _llama3,
    "qwen2": Pre(_words(r"\p{N}"), normalizer=NFC()),
    "tekken": Pre((*_isolate(_TEKKEN), _TO_BYTES), ignore_merges=True, add_bos=True),
    "deepseek-llm": Pre(
        (
            *_isolate(r"[\r\n]", rf"\s?[{_CASED}]+", rf"\s?[!-/:-~{_FULLWIDTH}]+", r"\s+$", _CJK),
            _DIGIT_BY_DIGIT,
            _TO_BYTES,
        )
    ),
    "deepseek-coder": Pre(
        (*_isolate(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK), _DIGIT_BY_DIGIT, _TO_BYTES)
    ),
    "deepseek-v3": Pre(
        (*_isolate(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u30ff]+", _DEEPSEEK_V3), _TO_BYTES)
    ),
}

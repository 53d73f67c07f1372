"""Rows to token ids and token ids to text. One batch is encoded in parallel by the Rust side."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from blendjax.core import PromptRow, RowError
from blendjax.io import gguf_vocab
from blendjax.io.template import ChatTemplate, Shield, TemplateError, any_of, unused_mark

# Keys of `TextCodec.warnings`: a row does what it says, and the user should know.
BOS_IN_PROMPT = "prompt already begins with the BOS token; no second one was added"
CONTROL_IN_CONTENT = "message spells a control token; it was encoded as plain text"

# Canonical composition (NFC) shrinks UTF-8 at most 3.5 times, reached by U+0390.
_NFC_SHRINK = 4

Parts = Sequence[int | str]  # a text cut into special ids and the plain pieces between them


class _RefusedError(ValueError):
    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class TextCodec:
    """A model's vocabulary: how its text is cut, and what its special tokens are. Never changed
    once made, but for `warnings`, which counts rows."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        token_bytes: tuple[bytes, ...],
        *,
        specials: gguf_vocab.SpecialTokens,
        chat_template: ChatTemplate | None,
    ) -> None:
        self.token_bytes = token_bytes  # what each id adds to a text: nothing for a control token
        self.vocab_size = len(token_bytes)
        self.bos_id = specials.bos_id
        self.eos_ids = specials.eos_ids
        self.add_bos = specials.add_bos  # before a `prompt`; a chat template writes its own
        self.chat_template = chat_template
        self.warnings: Counter[str] = Counter()
        self._tokenizer = tokenizer
        self._control = specials.control
        self._control_re = any_of(specials.control)
        self._user_defined = specials.user_defined
        self._user_defined_re = any_of(specials.user_defined)
        self._shield = Shield(specials.control)
        spelled = (spelling.encode("utf-8") for spelling in specials.control)
        # A token stands for at most so many bytes of text as it was before normalization.
        self._most_bytes = max(map(len, (*spelled, *token_bytes)))
        self._most_bytes *= _NFC_SHRINK if tokenizer.normalizer else 1

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> TextCodec:
        """Raises `UnsupportedTokenizer`, or `TemplateError` for a template that can't compile."""
        tokens, types = gguf_vocab.read_tokens(metadata)
        specials = gguf_vocab.read_specials(metadata)
        source = metadata.get("tokenizer.chat_template")
        bos, eos = (None if i is None else tokens[i] for i in (specials.bos_id, specials.eos_id))
        return cls(
            gguf_vocab.build_tokenizer(metadata),
            gguf_vocab.decode_table(tokens, types),
            specials=specials,
            chat_template=ChatTemplate(source, bos_token=bos, eos_token=eos) if source else None,
        )

    def encode_texts(self, texts: Sequence[str], *, specials: bool) -> list[np.ndarray]:
        """Ids (int32) of each text. A control token spelled in it is a token only with `specials`;
        a user-defined one is plain vocabulary and always is."""
        return self._encode([self._cut(text, specials=specials) for text in texts])

    def encode_rows(
        self, rows: Sequence[PromptRow], *, max_model_len: int
    ) -> list[np.ndarray | RowError]:
        """One entry a row: its prompt's ids, with room for one token more, or why it can't run."""
        cuts = [self._cut_row(row, max_model_len) for row in rows]
        ids = iter(self._encode([cut for cut in cuts if not isinstance(cut, RowError)]))
        return [
            cut if isinstance(cut, RowError) else _with_room(row, next(ids), max_model_len)
            for row, cut in zip(rows, cuts, strict=True)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of generated ids, whatever came before them. Control tokens add nothing; bytes
        that never complete a character become U+FFFD."""
        return b"".join(self.token_bytes[i] for i in ids).decode("utf-8", "replace")

    def _cut_row(self, row: PromptRow, max_model_len: int) -> Parts | RowError:
        try:
            if row.token_ids is not None:
                return self._check_ids(row.token_ids)
            if row.messages is not None:
                return self._cut_chat(row, max_model_len)
            return self._cut_prompt(row.prompt or "", max_model_len)
        except TemplateError as error:
            return _row_error(row, str(error), code="template_error")
        except RecursionError:
            return _row_error(row, "the values are nested too deeply", code="invalid_value")
        except _RefusedError as error:
            return _row_error(row, str(error), code=error.code)

    def _check_ids(self, ids: tuple[int, ...]) -> Parts:
        for i in ids:
            if not 0 <= i < self.vocab_size:
                reason = f"token id {i} is not in the vocabulary [0, {self.vocab_size})"
                raise _RefusedError(reason, code="invalid_value")
        return ids

    def _cut_prompt(self, text: str, max_model_len: int) -> Parts:
        self._check_bytes(text, max_model_len)
        parts = self._cut(text, specials=True)
        if not self.add_bos or self.bos_id is None:
            return parts
        if parts and parts[0] == self.bos_id:
            self.warnings[BOS_IN_PROMPT] += 1
            return parts
        return [self.bos_id, *parts]

    def _cut_chat(self, row: PromptRow, max_model_len: int) -> Parts:
        if self.chat_template is None:
            reason = "the model has no chat template: give `prompt` instead of `messages`"
            raise _RefusedError(reason, code="no_chat_template")
        if not row.messages:
            raise _RefusedError("messages is empty", code="empty_prompt")
        given = {"messages": row.messages, "kwargs": row.template_kwargs}
        if self._shield.found_in(given):
            self.warnings[CONTROL_IN_CONTENT] += 1
        mark = unused_mark(given, self.chat_template.source)
        hidden = self._shield.hide(given, mark)
        text = self.chat_template.render(hidden["messages"], **hidden["kwargs"])
        self._check_bytes(text.replace(mark, ""), max_model_len)
        return self._cut(text, specials=True, mark=mark)

    def _check_bytes(self, text: str, max_model_len: int) -> None:
        """Refuse what can't fit however it is cut, before any time is spent on cutting it."""
        try:
            size = len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            reason = f"the text holds a lone surrogate, {text[error.start]!a}"
            raise _RefusedError(reason, code="invalid_value") from None
        if (least := math.ceil(size / self._most_bytes)) >= max_model_len:
            reason = _too_long(f"{size} bytes, so at least {least}", max_model_len)
            raise _RefusedError(reason, code="context_length_exceeded")

    def _cut(self, text: str, *, specials: bool, mark: str = "") -> Parts:
        parts: list[int | str] = []
        for place, piece in enumerate(self._control_re.split(text) if specials else [text]):
            if place % 2:
                parts.append(self._control[piece])
            elif plain := piece.replace(mark, "") if mark else piece:
                cut = self._user_defined_re.split(plain)
                parts += [self._user_defined[p] if i % 2 else p for i, p in enumerate(cut) if p]
        return parts

    def _encode(self, rows: Sequence[Parts]) -> list[np.ndarray]:
        plain = [part for parts in rows for part in parts if isinstance(part, str)]
        encoded = iter(self._tokenizer.encode_batch_fast(plain, add_special_tokens=False))

        def ids_of(part: int | str) -> Sequence[int]:
            return next(encoded).ids if isinstance(part, str) else (part,)

        return [np.array([i for p in parts for i in ids_of(p)], np.int32) for parts in rows]


def _with_room(row: PromptRow, ids: np.ndarray, max_model_len: int) -> np.ndarray | RowError:
    if not len(ids):
        return _row_error(row, "the prompt has no tokens", code="empty_prompt")
    if len(ids) >= max_model_len:
        message = _too_long(f"{len(ids)}", max_model_len)
        return _row_error(row, message, code="context_length_exceeded")
    return ids


def _too_long(length: str, max_model_len: int) -> str:
    return f"the prompt has {length} tokens; it and one more must fit max_model_len={max_model_len}"


def _row_error(row: PromptRow, message: str, *, code: str) -> RowError:
    field = "prompt" if row.messages is None else "messages"
    return RowError(
        index=row.index,
        line=row.line,
        custom_id=row.custom_id,
        message=f"line {row.line}: {message}",
        code=code,
        param=field if row.token_ids is None else "prompt_token_ids",
    )

"""Chat templates: jinja2 in a sandbox, the way Hugging Face renders them."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Supplementary private use: no text standard and, as far as we know, no vocabulary uses it.
_PRIVATE = range(0xF0000, 0x10FFFE)


class TemplateError(ValueError):
    """A conversation the template refuses, in the template's own words, or a broken template."""


class ChatTemplate:
    """A compiled chat template. Rendering reaches no file, and no attribute beyond plain data."""

    def __init__(self, source: str, *, bos_token: str | None, eos_token: str | None) -> None:
        self.source = source
        given = {"bos_token": bos_token, "eos_token": eos_token}
        # Undefined renders as nothing; None would render as the word.
        self._specials = {name: token for name, token in given.items() if token is not None}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template can't be compiled: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt text. It opens the assistant's turn, unless `add_generation_prompt` is false
        or `continue_final_message` asks for text that ends with the last message's last character.
        """
        if "messages" in kwargs:
            raise TemplateError("chat_template_kwargs must not name messages")
        for given in (add_generation_prompt, continue_final_message):
            if given is not None and not isinstance(given, bool):
                raise TemplateError(
                    "add_generation_prompt and continue_final_message must be true or false"
                )
        if continue_final_message and add_generation_prompt:
            raise TemplateError("add_generation_prompt and continue_final_message exclude another")
        plain, end = [map_strings(message, str) for message in messages], ""
        if continue_final_message:
            end = unused_mark(plain)
            plain = [*plain[:-1], _append(plain, end)]
        names = {"tools": None, "documents": None, **self._specials, **kwargs, "messages": plain}
        names["add_generation_prompt"] = add_generation_prompt in (None, True) and not end
        text = self._run(names)
        if end and end not in text:
            raise TemplateError("the chat template leaves out the message to be continued")
        return text.rpartition(end)[0] if end else text

    def _run(self, names: Mapping[str, Any]) -> str:
        try:
            return self._template.render(names)
        except jinja2.TemplateError as error:
            raise TemplateError(error.message or type(error).__name__) from None
        except Exception as error:  # foreign code, and one row's fault must not end the run
            raise TemplateError(f"{type(error).__name__} in the chat template: {error}") from None


class Shield:
    """Breaks up control tokens that are spelled inside a user's text, so that only the template's
    own can be cut out of what it renders. The marks it puts in are then taken out again."""

    def __init__(self, spellings: Collection[str]) -> None:
        self._whole = any_of(spellings)
        # A text may also open a token that the next message closes. Openings that are words
        # are left alone: a role such as `user` must still compare equal in the template.
        openings = {s[:n] for s in spellings if not s[:1].isalnum() for n in range(1, len(s))}
        self._openings = tuple(openings)

    def found_in(self, value: Any) -> bool:
        return any(self._whole.search(text) for text in strings_in(value))

    def hide(self, value: Any, mark: str) -> Any:
        return map_strings(value, lambda text: self._hide(text, mark))

    def _hide(self, text: str, mark: str) -> str:
        # A mark at every joint and at both ends: no shorter or overlapping token survives.
        hidden = self._whole.sub(lambda m: mark + mark.join(m[0]) + mark, text)
        return hidden + mark if text.endswith(self._openings) else hidden


def any_of(spellings: Collection[str]) -> re.Pattern[str]:
    """Matches the longest of the spellings, as a group: `split` then puts them at odd places."""
    longest_first = sorted(filter(None, spellings), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def unused_mark(*values: Any) -> str:
    """A private-use character that none of the values' strings holds."""
    texts = list(strings_in(values))
    return next(c for c in map(chr, _PRIVATE) if not any(c in text for text in texts))


def strings_in(value: Any) -> Iterator[str]:
    """Every string of JSON-like data, keys left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from strings_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of JSON-like data as plain lists and dicts, its strings changed, its keys not."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return value


def _append(messages: Sequence[Mapping[str, Any]], end: str) -> dict[str, Any]:
    last = messages[-1] if messages else {}
    if not isinstance(last.get("content"), str):
        raise TemplateError("continue_final_message needs a last message whose content is a string")
    return {**last, "content": last["content"] + end}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a trainer would learn from; here it renders what it holds."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration is a plain set)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    extensions = [jinja2.ext.loopcontrols, _Generation]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    # One date for the whole run: rows that straddle midnight still share their prefix.
    now = datetime.datetime.now()
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = now.strftime
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes for HTML, which a model was not trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )

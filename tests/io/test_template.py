"""Chat templates: what Hugging Face's renderer would give, in a sandbox."""

import contextlib
import re
from typing import Any

import pytest

from blendjax.io.template import ChatTemplate, Shield, TemplateError, unused_mark

CHAT = """\
{%- if messages[0].role == 'system' %}
    {{- raise_exception('no system role: "' ~ messages[0].content ~ '"') }}
{%- endif %}
{{- bos_token }}
{%- for m in messages %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
    {{- '<' + m.role + '>' + m.content | trim }}
    {%- if not loop.last %}{{ eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""


def render(source: str, *contents: str, **kwargs: Any) -> str:
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, **kwargs)


def test_turns_and_generation_prompt() -> None:
    assert (
        render(CHAT, " Hi ", "Yes", "so?")
        == "<s><user>Hi</s><assistant>Yes</s><user>so?<assistant>"
    )
    assert render(CHAT, "Hi", add_generation_prompt=False) == "<s><user>Hi"
    assert render(CHAT, *"abcde").count("<user>") == 2  # loop controls are there


def test_a_missing_bos_renders_as_nothing() -> None:
    template = ChatTemplate("{{ bos_token }}x", bos_token=None, eos_token=None)
    assert template.render([]) == "x"


def test_blocks_leave_no_white_space() -> None:
    assert render("  {% if true %}\n  a\n  {% endif %}\nb") == "  a\nb"


def test_json_is_not_escaped_for_html() -> None:
    tools = [{"name": "<é> & 'x'"}]
    assert render("{{ tools | tojson }}", tools=tools) == '[{"name": "<é> & \'x\'"}]'
    assert render("{{ tools | tojson(indent=1) }}", tools=[1]) == "[\n 1\n]"


def test_names_of_hugging_face() -> None:
    assert render("{% generation %}a{% endgeneration %}b") == "ab"
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}"))
    assert render("{{ tools is none }}{{ documents is none }}") == "TrueTrue"
    assert render("{{ flag }}", flag=7) == "7"


@pytest.mark.parametrize("last", ["Sure:\n\n", "", "Hi"])
def test_a_continued_message_ends_at_its_last_character(last: str) -> None:
    text = render(CHAT, "Hi", last, continue_final_message=True)
    assert text == "<s><user>Hi</s><assistant>" + last


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "exclude"),
        ({"messages": []}, "messages"),
    ],
)
def test_contradictions_are_refused(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        ChatTemplate(CHAT, bos_token=None, eos_token=None).render(
            [{"role": "user", "content": "a"}], **kwargs
        )


def test_nothing_to_continue() -> None:
    for messages in ([], [{"role": "user"}]):
        with pytest.raises(TemplateError, match="last message"):
            ChatTemplate("", bos_token=None, eos_token=None).render(
                messages, continue_final_message=True
            )
    with pytest.raises(TemplateError, match="leaves out"):
        render("x", "a", continue_final_message=True)


def test_a_refusal_is_in_the_templates_own_words() -> None:
    template = ChatTemplate(CHAT, bos_token=None, eos_token=None)
    with pytest.raises(TemplateError) as caught:
        template.render([{"role": "system", "content": "be brief"}])
    assert str(caught.value) == 'no system role: "be brief"'


@pytest.mark.parametrize(
    "source", ["{{ 1 + 'a' }}", "{{ 1 / 0 }}", "{{ messages[9].content + '' }}"]
)
def test_a_fault_of_the_template_is_a_template_error(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source, "a")


def test_a_broken_template_is_refused_when_made() -> None:
    with pytest.raises(TemplateError, match="compiled"):
        render("{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ strftime_now.__self__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{% for _ in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    """Refused, or rendered as nothing."""
    with contextlib.suppress(TemplateError):
        assert render(source, "a") == ""


def test_messages_are_copied_not_changed() -> None:
    given = ({"role": "user", "content": "a"},)
    template = ChatTemplate("{{ messages + [1] }}", bos_token=None, eos_token=None)
    assert template.render(given).endswith(", 1]")
    assert given == ({"role": "user", "content": "a"},)


def test_the_shield_breaks_whole_overlapping_and_half_spellings() -> None:
    shield = Shield(["<a>", "<<a>>", "><b", "user"])
    mark = unused_mark("x")
    assert unused_mark("x" + mark) != mark
    assert shield.found_in({"k": ["x", ("<a>",)]})
    assert not shield.found_in(["a>", "<", 3, None])
    for text in ("<a>", "<<a>>", "<a><b", "x<", "<a"):
        hidden = shield.hide([text], mark)[0]
        assert hidden.replace(mark, "") == text
        assert not shield.found_in(hidden + "a>")
    assert shield.hide("us", mark) == "us"  # a word, as roles are: left alone
    assert shield.hide({"n": 3, "<a>": None}, mark) == {"n": 3, "<a>": None}

"""Stop strings against every way of cutting a text into tokens."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from blendjax.io.gguf_vocab import SpecialTokens
from blendjax.io.stops import StopFinder
from blendjax.io.tokenizer import TextCodec

CONTROL = 256
SPECIALS = SpecialTokens(
    control={"<|end|>": CONTROL},
    user_defined={},
    bos_id=None,
    eos_id=None,
    eos_ids=frozenset(),
    add_bos=False,
)


def codec(*words: str) -> TextCodec:
    """Ids 0 to 255 are the bytes, 256 adds no text, and the words follow."""
    table = (*(bytes([byte]) for byte in range(256)), b"", *(word.encode() for word in words))
    return TextCodec(Tokenizer(models.BPE()), table, specials=SPECIALS, chat_template=None)


def found_at(stops: tuple[str, ...], ids: list[int], model: TextCodec) -> int | None:
    """How many tokens it takes until a stop string is found."""
    finder = StopFinder(stops, model)
    return next((n for n, i in enumerate(ids, 1) if finder.push(i)), None)


def in_bytes(text: str) -> list[int]:
    return list(text.encode())


def test_stops_across_token_borders() -> None:
    model = codec("lo\n\nQ", "aEN", "Dx", "END", "E", "N")
    word = dict(zip(["lo\n\nQ", "aEN", "Dx", "END", "E", "N"], range(257, 263), strict=True))
    stops = ("\n\nQ", "END")
    assert found_at(stops, [word["lo\n\nQ"]], model) == 1  # begins inside a token
    assert found_at(stops, [word["aEN"], word["Dx"]], model) == 2  # and ends inside the next
    assert found_at(stops, [word["E"], word["N"], word["Dx"]], model) == 3
    assert found_at(stops, [word["E"], CONTROL, word["N"], CONTROL, word["Dx"]], model) == 5
    assert found_at(stops, [word["E"], word["E"], word["N"], word["E"]], model) is None
    assert found_at(("x", "longer than all of it"), [word["Dx"]], model) == 1


def test_a_stop_ends_inside_a_split_character() -> None:
    ids = in_bytes("a😀b")
    assert found_at(("a😀",), ids, codec()) == 5
    assert found_at(("😀b",), ids, codec()) == 6
    assert found_at(("😁",), ids, codec()) is None


def test_a_match_is_reported_with_its_last_token_only() -> None:
    finder = StopFinder(("x", "END", "longer"), codec())
    assert [finder.push(i) for i in in_bytes("xaENDbx")] == [c in "xD" for c in "xaENDbx"]


def test_odd_stops() -> None:
    assert found_at((), in_bytes("abc"), codec()) is None
    assert found_at(("\ud800",), in_bytes("abc"), codec()) is None
    assert found_at(("<|end|>",), [CONTROL], codec()) is None  # a control token has no text
    assert found_at(("<|end|>",), in_bytes("<|end|>"), codec()) == 7


TEXT = st.text("ab\né😀", max_size=12)
STOPS = st.lists(st.text("ab\né😀", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


@given(TEXT, STOPS, st.lists(st.integers(1, 5), min_size=1))
def test_found_when_and_only_when_the_text_holds_it(
    text: str, stops: tuple[str, ...], widths: list[int]
) -> None:
    """Cut anywhere, between bytes too: found with the first token that completes a match."""
    raw, pieces = text.encode(), []
    for width in widths * len(raw):
        pieces, raw = [*pieces, raw[:width]], raw[width:]
    table = [piece for piece in pieces if piece]
    model = TextCodec(
        Tokenizer(models.BPE()), tuple(table) or (b"",), specials=SPECIALS, chat_template=None
    )
    seen = [model.decode(range(n)) for n in range(1, len(table) + 1)]
    first = next((n for n, t in enumerate(seen, 1) if any(stop in t for stop in stops)), None)
    assert found_at(stops, list(range(len(table))), model) == first

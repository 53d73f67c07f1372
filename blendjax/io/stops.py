"""Stop strings: found while tokens arrive, whatever token borders they lie across."""

from __future__ import annotations

from collections.abc import Sequence

from blendjax.io.tokenizer import TextCodec


class StopFinder:
    """Searches one row's generated text, a token at a time; the prompt is never fed to it.

    It works on bytes: UTF-8 has no match that starts or ends inside a character, so a match of
    bytes is a match of text, and a character split over tokens needs no care. (A stop that holds
    U+FFFD matches a real one only, not the replacement of a broken character.)
    """

    __slots__ = ("_keep", "_stops", "_tail", "_token_bytes")

    def __init__(self, stops: Sequence[str], codec: TextCodec) -> None:
        self._token_bytes = codec.token_bytes
        # A lone surrogate can't be generated, but must not raise either.
        self._stops = tuple(stop.encode("utf-8", "surrogatepass") for stop in stops)
        self._keep = max(map(len, self._stops), default=1) - 1
        self._tail = b""

    def push(self, token_id: int) -> bool:
        """Take the next generated token; true when a stop string ends in it."""
        seen = len(self._tail)
        window = self._tail + self._token_bytes[token_id]
        # A match may begin in the tail but not lie in it: that one was reported before.
        self._tail = window[max(0, len(window) - self._keep) :]
        return any(window.find(s, max(0, seen - len(s) + 1)) >= 0 for s in self._stops)

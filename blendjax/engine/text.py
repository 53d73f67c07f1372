"""Text of running rows: stop strings while tokens arrive, the final text when a row ends."""

from __future__ import annotations

from blendjax.core import Completion, FinishReason
from blendjax.io.stops import StopFinder
from blendjax.io.tokenizer import TextCodec
from blendjax.sched.plan import Sequence


class TextTracker:
    """Holds a `StopFinder` for each running row that has stop strings; nothing for the others."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._finders: dict[int, tuple[StopFinder, int]] = {}

    def stopped(self, seq: Sequence) -> bool:
        """Whether a stop string ends in the row's newest token."""
        held = self._finders.get(seq.row)
        finder, fed = held or (StopFinder(seq.request.sampling.stop, self._codec), 0)
        hit = False
        for token in seq.generated[fed:]:
            hit = finder.push(token)
        self._finders[seq.row] = finder, len(seq.generated)
        return hit

    def forget(self, seq: Sequence) -> None:
        """The row has ended."""
        self._finders.pop(seq.row, None)

    def complete(self, seq: Sequence, reason: FinishReason) -> Completion:
        """The finished row. The id or the string that stopped it is not in its text."""
        request, tokens = seq.request, seq.generated
        by_id = reason == "stop" and tokens[-1] in request.stop_ids
        text = self._codec.decode(tokens[:-1] if by_id else tokens)
        if reason == "stop" and not by_id:
            text = self._cut(tokens, request.sampling.stop)
        return Completion(
            request=request,
            token_ids=tuple(tokens),
            text=text,
            finish_reason=reason,
            cached_tokens=seq.cached,
            margins=tuple(seq.margins),
        )

    def _cut(self, tokens: list[int], stops: tuple[str, ...]) -> str:
        """The text before the first stop string that ends in the last token (one that ended earlier
        was passed over: min_tokens had not been reached)."""
        before = self._bytes(tokens[:-1])
        full = before + self._bytes(tokens[-1:])
        needles = [stop.encode("utf-8", "surrogatepass") for stop in stops]
        found = [full.find(n, max(0, len(before) - len(n) + 1)) for n in needles]
        return full[: min(at for at in found if at >= 0)].decode("utf-8", "replace")

    def _bytes(self, tokens: list[int]) -> bytes:
        return b"".join(self._codec.token_bytes[token] for token in tokens)

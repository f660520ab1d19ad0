"""Stop strings: found in text that comes in pieces."""


class StopFilter:
    """Lets text through up to the first stop string, holding back a tail that may still become one.

    The stop string that is complete first wins (of two complete at once, the longer), so the result does not depend
    on how the text was cut into pieces.
    """

    def __init__(self, stops: tuple[str, ...], *, keep_match: bool = False) -> None:
        self._stops = stops
        self._keep_match = keep_match
        self._held = ""
        self.matched: str | None = None
        """The stop string found. Nothing may be pushed after it."""

    def push(self, text: str) -> str:
        """Take the next piece; returns what may be shown. Sets `matched` when a stop string is complete."""
        if not self._stops:
            return text
        self._held += text
        found = self._first_match()
        if found is not None:
            start, self.matched = found
            end = start + len(self.matched) if self._keep_match else start
            shown, self._held = self._held[:end], ""
            return shown
        keep = self._tail_len()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def pass_by(self, text: str) -> str:
        """Show text without looking for stop strings in it."""
        return self.flush() + text

    def flush(self) -> str:
        """The output is over: what was held back is ordinary text."""
        shown, self._held = self._held, ""
        return shown

    def _first_match(self) -> tuple[int, str] | None:
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _tail_len(self) -> int:
        """Length of the longest suffix that is a proper prefix of a stop string."""
        longest = min(len(self._held), max(len(stop) for stop in self._stops) - 1)
        for size in range(longest, 0, -1):
            if any(len(stop) > size and stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0

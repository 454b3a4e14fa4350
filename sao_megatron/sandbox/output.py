"""What one piece of code prints, as far as it is kept."""
from __future__ import annotations

from collections import deque


class Output:
    """What one cell prints: its first and its last bytes, `limit` together."""

    def __init__(self, limit: int):
        self.half, self.count = limit // 2, 0
        self.head, self.tail, self.tail_length = b"", deque(), 0

    def add(self, data: bytes) -> None:
        self.count += len(data)
        room = max(0, self.half - len(self.head))
        self.head += data[:room]
        if rest := data[room:]:
            self.tail.append(rest[-self.half:])
            self.tail_length += len(self.tail[-1])
        while self.tail and self.tail_length - len(self.tail[0]) >= self.half:
            self.tail_length -= len(self.tail.popleft())

    def text(self) -> str:
        tail = b"".join(self.tail)[-self.half:]
        missing = self.count - len(self.head) - len(tail)
        notice = f"\n[… {missing} bytes of output left out …]\n".encode() if missing else b""
        return (self.head + notice + tail).decode(errors="replace")

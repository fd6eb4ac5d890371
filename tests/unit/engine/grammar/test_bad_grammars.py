"""What cannot be compiled, and what would cost too much, by a running engine."""

from __future__ import annotations


class Letters:
    """Ids 1 to 95 are the printable ASCII characters, EOS aside; the rest is unknown."""

    vocab_size = 96

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 31 for letter in text]

    def decode(self, token_ids: object, *, skip_special: bool = True) -> str:
        return "".join(self.token_bytes(token).decode() for token in token_ids)  # type: ignore[attr-defined]

    def detokenizer(self) -> object:
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id + 31,)) if 1 <= token_id < 96 else b""

    def is_added(self, token_id: int) -> bool:
        return False

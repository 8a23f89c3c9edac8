"""`Cause`: a sentence on what makes two models part, with what tells it from others; `in_words(dtype)`."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Cause(NamedTuple):
    """What differs at a site. Two sites have the same cause where the words are the same.

    size: how much, the end of the sentence.
    cast: the dtype that values are rounded to.
    of_rotary: True where it is in a table of rotary frequencies, or in how one is used.
    """

    words: str
    size: str = ""
    cast: torch.dtype | None = None
    of_rotary: bool = False

    def __str__(self) -> str:
        return f"{self.words} {self.size}".rstrip()


def in_words(dtype: torch.dtype) -> str:
    """Its name: "bfloat16"."""
    return str(dtype).removeprefix("torch.")

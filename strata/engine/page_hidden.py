"""Hidden states that outlive a window: for each page, that of the last token in it, which a head needs to go on behind it.

A history is resumed at the end of a page or at its live end; in both cases the token before is the last one written to its page. The
states are kept by page, so they go with a page wherever it goes: shared, parked, restored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.engine.stage import Hidden, StageModel
from strata.messages import Tokens, Window

Floats = NDArray[np.float32]


class PageHidden:
    """float32 [pages, width], zeros at first."""

    def __init__(self, num_pages: int, page_tokens: int, width: int) -> None:
        self.page_tokens = page_tokens
        self.states = np.zeros((num_pages, width), np.float32)

    def before(self, pages: Tokens, position: int) -> Floats:
        """Of the token before ``position`` in a slot with these pages: [1, width]; zeros before the first."""
        if position == 0:
            return np.zeros((1, self.states.shape[1]), np.float32)
        page = pages[(position - 1) // self.page_tokens]
        return self.states[page:page + 1].copy()

    def store(self, pages: Tokens, start: int, hidden: Floats) -> None:
        """``hidden`` [rows, width] of the tokens from ``start`` on: the last in each page stays."""
        end = start + len(hidden)
        for place in range(start // self.page_tokens, (end - 1) // self.page_tokens + 1):
            self.states[pages[place]] = hidden[min((place + 1) * self.page_tokens, end) - 1 - start]


class PagesWithHidden:
    """A last stage whose pages are copied with their hidden states. Implements stage.StageModel around ``model``."""

    def __init__(self, model: StageModel, hidden: PageHidden) -> None:
        self.model, self.hidden = model, hidden

    def forward(self, window: Window, hidden: Hidden | None) -> Hidden:
        return self.model.forward(window, hidden)

    def copy_out(self, pages: Tokens) -> tuple[Any, Floats]:
        return self.model.copy_out(pages), self.hidden.states[list(pages)]

    def copy_in(self, image: tuple[Any, Floats], pages: Tokens) -> None:
        self.model.copy_in(image[0], pages)
        self.hidden.states[list(pages)] = image[1][:len(pages)]

"""Which tokens a head drafts where it runs over a part of the vocabulary: the most frequent ones, and those of the texts it drafts for.

Theory. The output matrix over all tokens would cost a fifth of a small model's pass for every draft. Some thousand frequent tokens are
nearly all that is ever written, and most of the rest a text has said before: names, and what it is about. On 40 held-out prompts 1,024
frequent tokens and those of the text accept as many drafts as all 49,152 do (1.01 in a window); 4,096 frequent ones alone 0.94.

Rules. The first half of the places is for the most frequent tokens. The other half begins with those that follow, and goes round: a token
that is read or picked and has no place takes that of the one that came in longest ago. All slots share the places. Which tokens have
one depends on what else the server does, as drafts may, and answers do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
NO_PLACE = -1


class DraftVocabulary:
    """``ids`` int64 [places]: the token of each row of the head's output matrix; ``place_of`` int64 [vocabulary]: its row, or NO_PLACE."""

    def __init__(self, frequent: Ids, vocab_size: int) -> None:
        """``frequent``: no token twice, the most frequent first."""
        self.ids = frequent.copy()
        self.place_of = np.full(vocab_size, NO_PLACE, np.int64)
        self.place_of[self.ids] = np.arange(len(frequent))
        self._first = self._next = len(frequent) - len(frequent) // 2

    def see(self, tokens: Sequence[int]) -> Ids:
        """These tokens were read or picked. The places that have another token now, int64; of too many new tokens the last get one."""
        room = len(self.ids) - self._first
        new = [token for token in dict.fromkeys(reversed(tokens)) if self.place_of[token] == NO_PLACE][:room][::-1]
        places = self._first + (self._next - self._first + np.arange(len(new))) % max(room, 1)
        self.place_of[self.ids[places]] = NO_PLACE
        self.ids[places] = new
        self.place_of[new] = places
        self._next = self._first + (self._next - self._first + len(new)) % max(room, 1)
        return places

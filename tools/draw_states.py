"""Draws docs/states.svg from the state tables of ``strata/slots/states.py``, so that the picture cannot say anything else.

    python tools/draw_states.py           write the picture
    python tools/draw_states.py --check   exit 1 where the picture in docs is not what the tables say
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from strata.slots import states  # noqa: E402

PICTURE = ROOT / "docs" / "states.svg"
WIDTH, HEIGHT = 104, 34
Place = tuple[float, float]

# Where a state stands is the only thing the tables do not say: column and row of a grid.
SLOT_PLACES = {"empty": (0, 0), "held": (0, 2), "restoring": (3, 0), "reading": (1.5, 1), "decoding": (3, 1), "leaving": (1.5, 2)}
REQUEST_PLACES = {"waiting": (0, 0), "seated": (1.5, 0), "preempted": (3, 0), "ended": (1.5, 1.1)}
CONVERSATION_PLACES = {
    "busy": (0, 0), "held": (1.5, 0), "shelved": (3, 0), "restoring": (0, 1.3), "gone": (1.5, 1.3), "parking": (3, 1.3),
    "parked": (1.5, 2.4),
}


def center(place: Place, top: float) -> Place:
    return 90 + place[0] * 190, top + 40 + place[1] * 100


def border(start: Place, end: Place) -> Place:
    """Where the line from the middle of the box at ``start`` towards ``end`` leaves it."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    scale = min(WIDTH / 2 / abs(dx) if dx else 9e9, HEIGHT / 2 / abs(dy) if dy else 9e9)
    return start[0] + dx * scale, start[1] + dy * scale


def arrow(start: Place, end: Place, label: str) -> str:
    """A line bent to its right, so that an arrow there and one back do not lie on each other."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = max(1.0, (dx * dx + dy * dy) ** 0.5)
    bend = 26 if length < 330 else 46
    middle = (start[0] + end[0]) / 2 - dy / length * bend, (start[1] + end[1]) / 2 + dx / length * bend
    first, last = border(start, middle), border(end, middle)
    # The curve's middle lies half way between the chord and its control point.
    text = (first[0] + last[0]) / 4 + middle[0] / 2, (first[1] + last[1]) / 4 + middle[1] / 2
    words = f'x="{text[0]:.1f}" y="{text[1]:.1f}"'
    return (
        f'<path d="M {first[0]:.1f} {first[1]:.1f} Q {middle[0]:.1f} {middle[1]:.1f} {last[0]:.1f} {last[1]:.1f}" class="edge"/>\n'
        f'<text {words} class="halo">{escape(label)}</text>\n<text {words} class="label">{escape(label)}</text>\n'
    )


def diagram(title: str, table: Mapping[Any, Mapping[Any, Any]], places: Mapping[str, Place], top: float) -> tuple[str, float]:
    """One table as SVG; also how far down it reaches. Raises ``KeyError`` for a state that has no place yet."""
    spots = {state: center(places[state.value], top + 30) for state in table}
    edges: dict[tuple[Enum, Enum], list[str]] = {}
    for state, row in table.items():
        for event, after in row.items():
            edges.setdefault((state, after), []).append(event.value)
    parts = [f'<text x="38" y="{top + 20:.1f}" class="title">{escape(title)}</text>\n']
    parts += [arrow(spots[start], spots[end], " / ".join(events)) for (start, end), events in edges.items()]
    for state, (x, y) in spots.items():
        kind = "state" if table[state] else "state last"
        parts.append(f'<rect x="{x - WIDTH / 2:.1f}" y="{y - HEIGHT / 2:.1f}" width="{WIDTH}" height="{HEIGHT}" rx="9" class="{kind}"/>\n')
        parts.append(f'<text x="{x:.1f}" y="{y + 5:.1f}" class="name">{escape(state.value)}</text>\n')
    return "".join(parts), max(y for _, y in spots.values()) + 50


STYLE = """
text { font-family: sans-serif; text-anchor: middle; fill: #222 }
.title { font-size: 17px; font-weight: bold; text-anchor: start }
.name { font-size: 14px }
.label, .halo { font-size: 11px; fill: #555 }
.halo { stroke: #fff; stroke-width: 4px }
.state { fill: #eef4fb; stroke: #36638f; stroke-width: 1.5 }
.last { fill: #f3f3f3; stroke: #777 }
.edge { fill: none; stroke: #888; stroke-width: 1.3; marker-end: url(#tip) }
"""


def picture() -> str:
    """The three life cycles, one below the other."""
    body, top = "", 10.0
    for title, table, places in (
        ("A slot", states.SLOT, SLOT_PLACES),
        ("A request", states.REQUEST, REQUEST_PLACES),
        ("A conversation", states.CONVERSATION, CONVERSATION_PLACES),
    ):
        part, top = diagram(title, table, places, top)
        body += part
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    tip += '<path d="M0 0 8 4 0 8z" fill="#888"/></marker>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {top:.0f}" width="760" height="{top:.0f}">\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n<style>{STYLE}</style>\n<defs>{tip}</defs>\n{body}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        is_same = PICTURE.exists() and PICTURE.read_text(encoding="utf-8") == picture()
        raise SystemExit(0 if is_same else f"error: {PICTURE} is out of date; run python tools/draw_states.py")
    PICTURE.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Which held histories begin like this prompt, and for how many tokens: a radix tree over token ids.

Every conversation is an *owner* of one path from the root. An edge is a run of tokens packed as 32-bit ids, so that comparing
a hundred thousand tokens is one memcmp (about 10 us), and a prompt is compared once with what all its relatives share, never with
every token of every slot. Equality is exact; there are no hashes that could collide. Edges with one owner are merged, so depth is the
number of forks, not of turns.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

WIDTH = array("i").itemsize


def pack(tokens: Iterable[int]) -> bytes:
    """Token ids as native 32-bit integers, one after the other."""
    return array("i", tokens).tobytes()


def common_tokens(packed: bytes, start: int, edge: bytes | bytearray) -> int:
    """How many tokens ``packed`` from byte ``start`` and ``edge`` have in common at their beginning."""
    low, high = 0, min(len(packed) - start, len(edge)) // WIDTH
    while low < high:
        middle = (low + high + 1) // 2
        a, b = low * WIDTH, middle * WIDTH
        if packed[start + a:start + b] == edge[a:b]:
            low = middle
        else:
            high = middle - 1
    return low


class _Node:
    __slots__ = ("edge", "parent", "children", "owners")

    def __init__(self, edge: bytes | bytearray, parent: _Node | None) -> None:
        self.edge = bytearray(edge)
        self.parent = parent
        self.children: dict[bytes, _Node] = {}
        self.owners: set[int] = set()


class PrefixIndex:
    """Owners (conversation ids) by their token histories."""

    def __init__(self) -> None:
        self._root = _Node(b"", None)
        self._leaves: dict[int, _Node] = {}

    def __contains__(self, owner: int) -> bool:
        return owner in self._leaves

    def __len__(self) -> int:
        return len(self._leaves)

    def match(self, packed: bytes) -> list[tuple[int, list[int]]]:
        """(common length in tokens, owners that have exactly that much in common), longest first; 0 is left out."""
        levels: list[tuple[int, list[int]]] = []
        depth, outer = 0, self._root
        for node, common in self._walk(self._root, packed):
            if depth:
                levels.append((depth, sorted(outer.owners - node.owners)))
            depth, outer = depth + common, node
        if depth:
            levels.append((depth, sorted(outer.owners)))
        return [level for level in reversed(levels) if level[1]]

    def put(self, owner: int, packed: bytes) -> None:
        """Set (or replace) the history of ``owner``."""
        path, old = self._insert(owner, self._root, packed)
        if old is not None:
            self._prune(old, owner, set(path))
        self._join(path)

    def extend(self, owner: int, packed: bytes) -> None:
        """Append to the history of ``owner``."""
        path, _ = self._insert(owner, self._leaves[owner], packed)
        self._join(path)

    def remove(self, owner: int) -> None:
        """Forget ``owner``; unknown ones are ignored."""
        leaf = self._leaves.pop(owner, None)
        if leaf is not None:
            self._prune(leaf, owner, {self._root})

    def _walk(self, node: _Node, packed: bytes) -> Iterator[tuple[_Node, int]]:
        """The nodes along ``packed`` with the tokens of their edges that agree; only the last one may agree in part."""
        at = 0
        while True:
            child = node.children.get(packed[at:at + WIDTH])
            if child is None:
                return
            if packed.startswith(child.edge, at):
                yield child, len(child.edge) // WIDTH
            else:
                yield child, common_tokens(packed, at, child.edge)
                return
            node, at = child, at + len(child.edge)

    def _insert(self, owner: int, start: _Node, packed: bytes) -> tuple[list[_Node], _Node | None]:
        """Make ``owner`` end ``packed`` below ``start``; returns the nodes from ``start`` to its leaf, and its former leaf."""
        path, at = [start], 0
        for node, common in self._walk(start, packed):
            if common * WIDTH < len(node.edge):
                self._split(node, common)
            path.append(node)
            at += common * WIDTH
        if at < len(packed):
            leaf = _Node(packed[at:], path[-1])
            path[-1].children[packed[at:at + WIDTH]] = leaf
            path.append(leaf)
        for node in path[1:]:
            node.owners.add(owner)
        old = self._leaves.get(owner)
        self._leaves[owner] = path[-1]
        return path, old

    def _split(self, node: _Node, tokens: int) -> None:
        """Cut ``node``'s edge after ``tokens``; what follows becomes its only child."""
        cut = tokens * WIDTH
        lower = _Node(node.edge[cut:], node)
        del node.edge[cut:]
        lower.children, node.children = node.children, {bytes(lower.edge[:WIDTH]): lower}
        lower.owners = set(node.owners)
        self._adopt(lower, node)

    def _adopt(self, node: _Node, former: _Node) -> None:
        """What hung on ``former`` (children, owners that end there) hangs on ``node`` now."""
        for child in node.children.values():
            child.parent = node
        for owner in node.owners:
            if self._leaves.get(owner) is former:
                self._leaves[owner] = node

    def _prune(self, node: _Node, owner: int, keep: set[_Node]) -> None:
        """Take ``owner`` off the path above ``node`` until a node of ``keep``; nodes without owners go."""
        while node not in keep:
            parent = node.parent
            assert parent is not None
            node.owners.discard(owner)
            if not node.owners:
                del parent.children[bytes(node.edge[:WIDTH])]
            else:
                self._merge(node)
            node = parent

    def _join(self, path: list[_Node]) -> None:
        """An insertion has changed the owners of its path: from its end up, so that a node takes over a child that is whole."""
        for node in reversed(path):
            self._merge(node)

    def _merge(self, node: _Node) -> None:
        """Join ``node`` with its only child where both have the same owners."""
        if node.parent is None or len(node.children) != 1:
            return
        (child,) = node.children.values()
        if len(child.owners) != len(node.owners):
            return
        node.edge += child.edge
        node.children = child.children
        self._adopt(node, child)
        child.parent, child.children = None, {}

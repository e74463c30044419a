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


def common_tokens(packed: bytes, start: int, edge: bytes) -> int:
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

    def __init__(self, edge: bytes, parent: _Node | None, owners: set[int]) -> None:
        self.edge = edge
        self.parent = parent
        self.children: dict[bytes, _Node] = {}
        self.owners = owners


class PrefixIndex:
    """Owners (conversation ids) by their token histories."""

    def __init__(self) -> None:
        self._root = _Node(b"", None, set())
        self._leaves: dict[int, _Node] = {}

    def __contains__(self, owner: int) -> bool:
        return owner in self._leaves

    def __len__(self) -> int:
        return len(self._leaves)

    def match(self, packed: bytes) -> list[tuple[int, list[int]]]:
        """(common length in tokens, owners that have exactly that much in common), longest first; 0 is left out."""
        levels: list[tuple[int, list[int]]] = []
        depth, outer = 0, self._root
        for node, common in self._walk(packed):
            if depth:
                levels.append((depth, sorted(outer.owners - node.owners)))
            depth, outer = depth + common, node
        if depth:
            levels.append((depth, sorted(outer.owners)))
        return [level for level in reversed(levels) if level[1]]

    def put(self, owner: int, packed: bytes) -> None:
        """Set (or replace) the history of ``owner``."""
        path, depth = [self._root], 0
        for node, common in self._walk(packed):
            if common * WIDTH < len(node.edge):
                node = self._split(node, common)
            path.append(node)
            depth += common
        if depth * WIDTH < len(packed):
            rest = packed[depth * WIDTH:]
            leaf = _Node(rest, path[-1], set())
            path[-1].children[rest[:WIDTH]] = leaf
            path.append(leaf)
        for node in path[1:]:
            node.owners.add(owner)
        old = self._leaves.get(owner)
        self._leaves[owner] = path[-1]
        if old is not None:
            self._prune(old, owner, set(path))
        if len(path) > 2:
            self._merge(path[-2])

    def remove(self, owner: int) -> None:
        """Forget ``owner``; unknown ones are ignored."""
        leaf = self._leaves.pop(owner, None)
        if leaf is not None:
            self._prune(leaf, owner, {self._root})

    def _walk(self, packed: bytes) -> Iterator[tuple[_Node, int]]:
        """The nodes along ``packed`` with the tokens of their edges that agree; only the last one may agree in part."""
        node, at = self._root, 0
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

    def _split(self, node: _Node, tokens: int) -> _Node:
        """Cut ``node``'s edge after ``tokens``; returns the new upper node (the lower one keeps the old identity)."""
        assert node.parent is not None
        cut = tokens * WIDTH
        upper = _Node(node.edge[:cut], node.parent, set(node.owners))
        node.parent.children[upper.edge[:WIDTH]] = upper
        node.edge, node.parent = node.edge[cut:], upper
        upper.children[node.edge[:WIDTH]] = node
        return upper

    def _prune(self, node: _Node, owner: int, keep: set[_Node]) -> None:
        """Take ``owner`` off the path above ``node`` until a node of ``keep``; nodes without owners go."""
        while node not in keep:
            parent = node.parent
            assert parent is not None
            node.owners.discard(owner)
            if not node.owners:
                del parent.children[node.edge[:WIDTH]]
            else:
                self._merge(node)
            node = parent
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
        for grandchild in node.children.values():
            grandchild.parent = node
        for owner in node.owners:
            if self._leaves.get(owner) is child:
                self._leaves[owner] = node
        child.parent, child.children = None, {}

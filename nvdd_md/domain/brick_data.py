"""Bricks as nested lists of integers, for a file."""

from __future__ import annotations

from typing import Any

import numpy as np

from nvdd_md.domain.partition import Bricks, Cut, Leaf


def to_data(bricks: Bricks) -> dict[str, object]:
    """Return what JSON can hold: a leaf is a rank, a cut is [axis, key, low, high]."""
    return {
        "n_ranks": bricks.n_ranks,
        "origin": bricks.origin.tolist(),
        "root": _node_to_data(bricks.root),
    }


def from_data(data: dict[str, Any]) -> Bricks:
    """Return the bricks that :func:`to_data` was given."""
    origin = np.array(data["origin"], dtype=np.int64)
    return Bricks(_node_from_data(data["root"]), origin, data["n_ranks"])


def _node_to_data(node: Cut | Leaf) -> int | list[object]:
    if isinstance(node, Leaf):
        return node.rank
    return [node.axis, list(node.key), _node_to_data(node.low), _node_to_data(node.high)]


def _node_from_data(data: int | list[Any]) -> Cut | Leaf:
    if isinstance(data, int):
        return Leaf(data)
    axis, (first, second, third, atom), low, high = data
    key = (first, second, third, atom)
    return Cut(axis, key, _node_from_data(low), _node_from_data(high))

"""What a running forward may ask: which rows are mine, and how they move.

The engine activates a :class:`DDContext` for the duration of one forward; the verbs of
:mod:`nvdd_md.helpers` read it. Outside a forward they find an inert context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nvdd_md.comm import Communicator
from nvdd_md.domain.exchange import TokenChain
from nvdd_md.domain.routing import HaloRouting

if TYPE_CHECKING:
    from nvdd_md.policies import StoragePolicy


@dataclass
class DDContext:
    """How the rows of one forward are spread over ranks.

    Attributes
    ----------
    comm : Communicator or None
        None in the inert context.
    policy : StoragePolicy or None
        How node rows are replicated and folded; None where nothing is distributed.
    routing : HaloRouting or None
    n_owned : int or None
        Rows that count as this rank's; None: all.
    owned_offset : int
        Where they start.
    n_systems : int
    chain : TokenChain
        Links the exchanges of this forward.
    """

    comm: Communicator | None = None
    policy: StoragePolicy | None = None
    routing: HaloRouting | None = None
    n_owned: int | None = None
    owned_offset: int = 0
    n_systems: int = 1
    chain: TokenChain = field(default_factory=TokenChain)

    @property
    def is_distributed(self) -> bool:
        """Whether rows live on several ranks (or are treated so, see ``force_halo``)."""
        return self.policy is not None

    @property
    def rank(self) -> int:
        """The rank within the communicator of the forward; 0 in the inert context."""
        return self.comm.rank if self.comm is not None else 0

    @property
    def world_size(self) -> int:
        """Ranks of the communicator of the forward; 1 in the inert context."""
        return self.comm.size if self.comm is not None else 1


_ACTIVE: ContextVar[DDContext | None] = ContextVar("nvdd_md_context", default=None)


def current_dd_context() -> DDContext:
    """Return the context of the running forward, or an inert one outside."""
    return _ACTIVE.get() or DDContext()


@contextmanager
def active(context: DDContext) -> Iterator[DDContext]:
    """Make ``context`` the current one in the ``with`` block; nested use restores the outer one."""
    reset = _ACTIVE.set(context)
    try:
        yield context
    finally:
        _ACTIVE.reset(reset)

"""What a rank does before its program ends: the others must not wait for it for ever."""

from __future__ import annotations

import atexit
import logging
import sys

from nvdd_md.agreement import leave
from nvdd_md.comm import Communicator

REMARK_AFTER_S = 60.0

_log = logging.getLogger(__name__)
# Not weak: all ranks must take leave of the same ones, whatever each of them still refers to.
_communicators: list[Communicator] = []


def leave_at_exit(comm: Communicator) -> None:
    """Let ranks that still come to a meeting on ``comm`` know when this program has ended.

    They then raise an error at once, instead of waiting. A communicator that was given up ends
    the whole job. Does nothing for a group of one rank, or when called again for the same ranks.
    """
    if comm.size == 1 or "leave at exit" in comm.state.once:
        return
    comm.state.once.add("leave at exit")
    _communicators.append(comm)
    # Not at import: what shuts torch.distributed down must have been registered before.
    atexit.unregister(_leave_all)
    atexit.register(_leave_all)


def _leave_all() -> None:
    # The smaller groups were made last; their ranks are waited for first.
    while _communicators:
        comm = _communicators.pop()
        if not comm.is_open:
            continue
        if comm.given_up is not None:
            print(
                f"nvdd_md: rank {comm.rank} of {comm.size} ends the job: {comm.given_up}",
                file=sys.stderr,
                flush=True,
            )
            comm.abort(1)
        comm.on_wait = _Remark(comm.rank)
        try:
            leave(comm)
        except Exception as error:  # the others are gone, or are being ended
            _log.debug("rank %d could not take leave: %s", comm.rank, error)
        except BaseException:  # Ctrl-C: the others may wait for ever
            comm.abort(1)


class _Remark:
    """Says once what this rank is waiting for."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.said = False

    def __call__(self, what: str, waited_s: float) -> None:
        if waited_s > REMARK_AFTER_S and not self.said:
            self.said = True
            _log.warning("rank %d has ended its program and waits for the others", self.rank)

"""One rank that stops must not leave the others waiting."""

import sys
import traceback
from types import TracebackType

from nvdd_md.comm.communicator import Communicator
from nvdd_md.comm.launch import job_rank

__all__ = ["install_excepthook"]

_installed: list[Communicator] = []


def install_excepthook(comm: Communicator) -> None:
    """Let an uncaught exception on any rank end the whole job, with the rank in its traceback.

    Also for ``KeyboardInterrupt``. The hook that was installed before is still called. Does
    nothing in a job of one rank, or when called again.
    """
    if comm.job_size == 1 or _installed:
        return
    _installed.append(comm)
    earlier = sys.excepthook

    def abort_job(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        headline = (
            f"[rank {job_rank()} of {comm.job_size}] uncaught exception, the job is aborted:\n"
        )
        try:
            if earlier is sys.__excepthook__:
                # In one write, so that several ranks' tracebacks do not mix.
                lines = traceback.format_exception(kind, error, trace)
                sys.stderr.write(headline + "".join(lines))
            else:
                sys.stderr.write(headline)
                earlier(kind, error, trace)
        finally:
            comm.abort(1)

    sys.excepthook = abort_job

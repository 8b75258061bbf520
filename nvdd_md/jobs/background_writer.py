"""A thread that writes while the run goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from nvdd_md.jobs.frame import Frame

_log = logging.getLogger(__name__)

CAPACITY = 2
"""Frames that may wait: more would only take memory where the disk is too slow for the run."""


class BackgroundWriter:
    """Writes frames in the order in which they are submitted, on a thread of its own.

    Exists on rank 0 only. All methods are for the thread that made it.

    Parameters
    ----------
    write : callable
        Gets one frame after the other.
    capacity : int
        Frames that may wait; :meth:`submit` waits while so many do.

    Attributes
    ----------
    waited_s : float
        Seconds that :meth:`submit` and :meth:`drain` have waited: what writing cost the run.
    busy_s : float
        Seconds that the thread has spent in writing.
    """

    def __init__(self, write: Callable[[Frame], None], capacity: int = CAPACITY) -> None:
        self.waited_s = 0.0
        self.busy_s = 0.0
        self._write = write
        self._capacity = capacity
        self._frames: deque[Frame] = deque()
        self._changed = threading.Condition()
        self._writing = False
        self._closing = False
        self._error: BaseException | None = None
        self._reported = False
        # A daemon: a run that ends by an error must not wait for its disk for ever.
        self._thread = threading.Thread(target=self._work, name="nvdd_md output", daemon=True)
        self._thread.start()

    def submit(self, frame: Frame) -> None:
        """Hand over a frame, whose arrays nobody changes from now on.

        Raises
        ------
        BaseException
            The first error that the thread has met. This frame is not written then.
        RuntimeError
            After :meth:`close`.
        """
        with self._changed:
            self._wait_until(lambda: len(self._frames) < self._capacity)
            self._frames.append(frame)
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all frames are written.

        Raises
        ------
        BaseException
            The first error that the thread has met.
        RuntimeError
            After :meth:`close`.
        """
        with self._changed:
            self._wait_until(lambda: not self._frames and not self._writing)

    def check(self) -> None:
        """Raise the first error that the thread has met, if there is one.

        Raises
        ------
        BaseException
            That error.
        """
        with self._changed:
            self._raise_error()

    def close(self) -> None:
        """End the thread, after it has written what waits. Does nothing the second time.

        Does not raise what went wrong, so that it can be called while another error is on its way:
        call :meth:`drain` before. An error that nobody has seen is logged.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self._error is not None and not self._reported:
            self._reported = True
            _log.error("output was not written", exc_info=self._error)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for the thread, with the lock held; an error or the end of the thread ends it."""
        start = time.perf_counter()
        self._changed.wait_for(lambda: self._error is not None or self._closing or condition())
        self.waited_s += time.perf_counter() - start
        self._raise_error()
        if self._closing:
            raise RuntimeError("the background writer is closed")

    def _raise_error(self) -> None:
        if self._error is not None:
            self._reported = True
            raise self._error

    def _work(self) -> None:
        """Write frames until the end, or until the first error: then nothing more is written."""
        try:
            while (frame := self._next()) is not None:
                start = time.perf_counter()
                self._write(frame)
                self.busy_s += time.perf_counter() - start
                with self._changed:
                    self._writing = False
                    self._changed.notify_all()
        except BaseException as error:  # whatever it is, the run must learn of it
            with self._changed:
                self._error = error
                self._frames.clear()
                self._changed.notify_all()

    def _next(self) -> Frame | None:
        """Wait for a frame and take it; None when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._frames or self._closing)
            if not self._frames:
                return None
            self._writing = True
            frame = self._frames.popleft()
            self._changed.notify_all()
            return frame

"""Exceptions of the communication layer."""

__all__ = ["CommError", "CommTimeoutError", "LaunchError"]


class CommError(RuntimeError):
    """A communicator cannot be used, or was called in a way that it cannot serve."""


class CommTimeoutError(CommError):
    """Some ranks did not arrive within the time limit."""


class LaunchError(CommError):
    """The job's processes do not see each other as the launcher intended."""

"""A process that starts ranks of jobs by forking: imports take seconds, a fork takes none.

Every line of its standard input is a request in JSON, each answered by one line. ``start`` forks
the ranks of one ``nvdd-md run`` and returns their process numbers; more than one find each other
through gloo, as `torch.distributed` does it. ``wait`` returns exit codes, minus the signal where
one ended the process.

A request may have hooks, which make something happen to a rank at a certain place: see
:func:`install`.
"""

import atexit
import gc
import json
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import ase.parallel
import torch

from nvdd_md import cli
from nvdd_md.integrators.sharded_engine import ShardedEngine
from nvdd_md.jobs.input import read_job
from nvdd_md.jobs.structure_input import read_structure

CHANGES = ("write", "pwrite", "ftruncate", "fsync", "open", "replace", "unlink", "mkdir", "rmdir")
"""Functions of `os` that change the disk, or make changes last."""


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        answer = start(request) if "ranks" in request else wait(**request)
        print(json.dumps(answer), flush=True)


def warm_up(job_file: Path) -> None:
    """Do once what all ranks would do in their first steps, as far as no thread is started."""
    read_structure(read_job(job_file))
    import_module("torch.fx.experimental.symbolic_shapes")  # by the first torch.autograd.grad
    ase.parallel.world.comm = None  # as if it had not been used yet


def start(request: dict) -> list[int]:
    """Fork the ranks of a job; return their process numbers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    pids = []
    for rank in range(request["ranks"]):
        pid = os.fork()
        if pid == 0:
            become(rank, port, request)
        pids.append(pid)
    return pids


def become(rank: int, port: str, request: dict) -> None:
    """Be one rank of a job, to the end of this process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    words = os.open(f"{request['words']}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for there, here in ((nowhere, 0), (words, 1), (words, 2)):
        os.dup2(there, here)
    size = str(request["ranks"])
    if request["ranks"] > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank)}
        os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= request["environment"]
    for hook in request["hooks"]:
        if hook.pop("rank", rank) == rank:
            install(**hook)
    try:
        code = cli.main(["run", *request["arguments"]])
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    # As at the end of a program, but without taking apart all that was imported.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def wait(pids: list[int], limit_s: float) -> list[int | None]:
    """Wait for processes; kill those that take too long, whose code is None then."""
    codes: dict[int, int | None] = {}
    end = time.monotonic() + limit_s
    while len(codes) < len(pids):
        for pid in pids:
            late = time.monotonic() > end
            if pid in codes:
                continue
            if late:
                os.kill(pid, signal.SIGKILL)
            found, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if found:
                codes[pid] = None if late else os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


# -- Hooks


def install(what: str, **details: object) -> None:
    """Make something happen to this process.

    ``what`` is "call" (at the n-th call of a function), "disk" (at the n-th change of the disk),
    "list" (write down all changes of the disk), or "forces" (a number in place of an atom's
    forces).
    """
    {"call": at_call, "disk": at_change, "list": list_changes, "forces": set_forces}[what](
        **details
    )


def act(do: str) -> None:
    """Do what a hook says: a signal to this process, a limit on files, an error."""
    if do.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, do))
    elif do.startswith("limit "):
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(do.split()[1]), hard))
    else:
        raise OSError(28, do)


def at_call(place: str, do: str, nth: int = 1, after: bool = False) -> None:
    """Act at the n-th call of ``module:name`` or ``module:Class.name``."""
    module, _, name = place.partition(":")
    *outer, name = name.split(".")
    owner = import_module(module)
    for part in outer:
        owner = getattr(owner, part)
    real, calls = getattr(owner, name), 0

    def replacement(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        now = calls == nth
        if now and not after:
            act(do)
        value = real(*args, **kwargs)
        if now and after:
            act(do)
        return value

    setattr(owner, name, replacement)


def watch_changes(before: Callable[[str, str, tuple], None]) -> None:
    """Have a function called before each change of the disk, with its name and the file's."""

    def watched(name: str, real: Callable) -> Callable:
        def replacement(*args: object, **kwargs: object) -> object:
            if name != "open" or args[1] & (os.O_WRONLY | os.O_RDWR):
                target = args[1] if name == "replace" else args[0]
                if isinstance(target, int):
                    target = os.readlink(f"/proc/self/fd/{target}")
                before(name, str(target), args)
            return real(*args, **kwargs)

        return replacement

    for name in CHANGES:
        setattr(os, name, watched(name, getattr(os, name)))


def at_change(do: str, nth: int, files: str, part: float = 0.5) -> None:
    """Act before the n-th change of files whose names match, or in the middle of a write."""
    count = 0
    real = {"write": os.write, "pwrite": os.pwrite}

    def before(name: str, file: str, args: tuple) -> None:
        nonlocal count
        if not re.search(files, file):
            return
        count += 1
        if count == nth:
            if name in real:
                descriptor, data, *offset = args
                real[name](descriptor, data[: int(part * len(data))], *offset)
            act(do)

    watch_changes(before)


def list_changes(to: str) -> None:
    """Write all changes of the disk into a file, at the end."""
    changes: list[tuple[str, str]] = []
    watch_changes(lambda name, file, args: changes.append((name, file)))
    atexit.register(lambda: Path(to).write_text(json.dumps(list(changes))))


def set_forces(atom: int, step: int, value: float) -> None:
    """Put a number in place of the forces on an atom, at a step of a job that starts."""
    real, calls = ShardedEngine.evaluate, 0

    def evaluate(self: ShardedEngine, particles: object, around: object) -> object:
        nonlocal calls
        results = real(self, particles, around)
        if calls == step:
            rows = torch.nonzero(particles.ids == atom)[:, 0]
            results.forces[rows] = value
        calls += 1
        return results

    ShardedEngine.evaluate = evaluate


if __name__ == "__main__":
    # What is asked for ends with the one who asks; Ctrl-C is his to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warm_up(Path(sys.argv[1]))
    gc.freeze()
    serve()

"""The ASE calculator: every rank holds the same ``Atoms``, the model's work is divided."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import (
    Calculator,
    PropertyNotImplementedError,
    all_changes,
)
from numpy.typing import NDArray

from nvdd_md import agreement
from nvdd_md.agreement import CALLS, agree, meet
from nvdd_md.comm import DEFAULT_WATCHDOG_S, SerialCommunicator, Traffic
from nvdd_md.construction import DEFAULT_SKIN, check_settings, join, settle
from nvdd_md.domain.decomposition import Decomposition
from nvdd_md.engine import ForceEngine
from nvdd_md.potential import Potential
from nvdd_md.report import RankReport, Report, log_summary
from nvdd_md.system import System
from nvdd_md.watchdog import Watchdog

_log = logging.getLogger(__name__)

_STANDARD = ("energy", "free_energy", "energies", "forces", "stress", "stresses")


@dataclass(frozen=True)
class RankLoad:
    """What one rank holds.

    Attributes
    ----------
    rank, owned, ghosts, edges : int
        Edges are counted up to cutoff + skin.
    """

    rank: int
    owned: int
    ghosts: int
    edges: int


class DistributedCalculator(Calculator):
    """ASE calculator that evaluates a potential on all ranks of a communicator. **Collective**.

    Every rank of ``comm`` creates it, holds the same ``Atoms`` and asks for the same properties
    (an ordinary script under ``mpirun``); results are those of one process, and the same bits on
    every rank. On one rank no MPI is needed.

    Parameters
    ----------
    potential : Potential
    comm : mpi4py communicator, torch.distributed process group, Communicator or None
        The ranks that share the work. None: all ranks of the job.
    skin : float, Å
        Neighbour lists reach this far beyond the cutoff and live until a pair may be missed.
        Never changes a result, only the time.
    cut_axes : sequence of int
        Cell axes (0, 1, 2) that may be cut into domains.
    device : str, torch.device or None
        None: the GPU of this node-local rank where there is one, else the CPU.
    watchdog_s : float or None
        Where all ranks must come together, a missing one is a warning after a minute, and ends
        the job after this many seconds. None: wait for ever.
    force_halo : bool
        Take the distributed path on a single rank too (for tests and measurements).

    Attributes
    ----------
    results : dict
        ``energy`` and ``free_energy`` (float, eV), ``forces`` (n, 3) eV/Å; ``energies`` (n,) eV if
        the potential has them; ``stress`` (6,) eV/Å³ in the order xx yy zz yz xz xy, positive
        under tension, if the cell has a volume and a periodic axis; ``stresses`` (n, 6) once asked
        for. All float64.

    Raises
    ------
    TypeError
        If ``potential`` is no Potential.
    ValueError
        For a negative skin, unknown axes, a potential whose outputs have reserved names, or (as
        ``DisagreementError``) ranks that hold different models or settings. In an evaluation, on
        all ranks alike: values that are not finite, unknown elements, a singular cell, or (as
        ``DisagreementError``) ranks that hold different systems. The calculator stays usable.
    CommError
        If another rank's program has ended.
    NonFiniteError
        On all ranks: the model returned NaN or inf.
    """

    def __init__(
        self,
        potential: Potential,
        comm: object = None,
        *,
        skin: float = DEFAULT_SKIN,
        cut_axes: Sequence[int] = (0, 1, 2),
        device: str | torch.device | None = None,
        watchdog_s: float | None = DEFAULT_WATCHDOG_S,
        force_halo: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        check_settings(potential, skin, cut_axes, watchdog_s)
        self.comm = join(comm, watchdog_s)
        self._watchdog = Watchdog(self.comm, watchdog_s)
        settings = (float(skin), tuple(cut_axes), bool(force_halo))
        self._seat = settle(potential, settings, device, self._watchdog)
        self._prepare(
            ForceEngine(
                potential, self.comm, skin=skin, cut_axes=tuple(cut_axes), force_halo=force_halo
            )
        )

    def _prepare(self, engine: ForceEngine) -> None:
        """Start without results."""
        self.engine = engine
        potential = engine.potential
        extra = [name for name in potential.outputs if name not in _STANDARD]
        self.implemented_properties = [
            name for name in _STANDARD if name != "energies" or name in potential.outputs
        ] + extra
        self._system: System | None = None
        self._warned: set[str] = set()
        self._closed = False
        self._traffic = Traffic()
        self._summary = weakref.finalize(self, log_summary, engine)

    @property
    def potential(self) -> Potential:
        """The potential that is evaluated; another one needs another calculator."""
        return self.engine.potential

    def set(self, **parameters: object) -> dict[str, object]:
        """Refuse ASE's way of changing parameters: they are given when the calculator is made.

        Raises
        ------
        TypeError
            If any parameter is given.
        """
        if parameters:
            raise TypeError(
                f"a DistributedCalculator has no parameters to set, got {sorted(parameters)}: "
                "make another one"
            )
        return {}

    def __copy__(self) -> Self:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return a calculator of its own that shares the potential and the communicator.

        Without communication, so that one rank alone may copy its atoms.
        """
        engine = self.engine
        new = type(self).__new__(type(self))
        Calculator.__init__(new)
        new.comm, new._watchdog, new._seat = self.comm, self._watchdog, self._seat
        new._prepare(
            ForceEngine(
                self.potential,
                self.comm,
                skin=engine.skin,
                cut_axes=engine.cut_axes,
                force_halo=engine.force_halo,
            )
        )
        return new

    def __getstate__(self) -> dict[str, object]:
        """Return what is pickled, in a single process only: ranks cannot be stored.

        Raises
        ------
        TypeError
            If the calculator stands for ranks of MPI or torch.distributed.
        """
        if not isinstance(self.comm, SerialCommunicator):
            raise TypeError(
                "a DistributedCalculator of a parallel job cannot be pickled; pickle atoms.copy(), "
                "which has no calculator"
            )
        return {key: value for key, value in self.__dict__.items() if key != "_summary"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._summary = weakref.finalize(self, log_summary, self.engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop lists, routing and results; later evaluations raise. May be called twice.

        Logs what the evaluations cost, as the end of the program does for a calculator that was
        never closed.
        """
        self._summary()
        self._closed = True
        self.reset()
        self.engine.decomposition = None

    def reset(self) -> None:
        """Forget the results; the next property is computed anew."""
        super().reset()  # type: ignore[no-untyped-call]
        self._system = None

    def check_state(self, atoms: Atoms, tol: float = 0.0) -> list[str]:
        """Return what changed since the last evaluation: nothing, or everything.

        Compares every bit of what the potential reads, its ``info`` and ``arrays`` keys included
        (``tol`` is there for ASE's signature and has no effect).
        """
        if self._system is None:
            return list(all_changes)
        try:
            unchanged = self._system.same_as(System.from_atoms(atoms, self.potential))
        except ValueError:
            unchanged = False
        return [] if unchanged else list(all_changes)

    def get_property(
        self, name: str, atoms: Atoms | None = None, allow_calculation: bool = True
    ) -> object:
        """Return a result, from the cache or a new evaluation. **Collective** in the latter case.

        Raises
        ------
        PropertyNotImplementedError
            For a stress without three cell vectors and a periodic axis, or an unknown name.
        """
        try:
            return super().get_property(name, atoms, allow_calculation)  # type: ignore[no-untyped-call]
        except PropertyNotImplementedError as error:
            if name not in ("stress", "stresses"):
                raise
            raise PropertyNotImplementedError(
                f"there is no {name}: it needs three cell vectors and a periodic axis"
            ) from error

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = tuple(all_changes),
    ) -> None:
        """Evaluate ``atoms``; one evaluation serves all properties. **Collective**.

        Called by ASE when a cached result does not do.

        Raises
        ------
        RuntimeError
            If the calculator is closed.
        ValueError, NonFiniteError
            See the class.
        """
        target = atoms if atoms is not None else self.atoms
        if target is None:
            raise ValueError("no atoms to evaluate")
        current = not self.check_state(target) and bool(self.results)
        stresses = "stresses" in properties
        if current and not (stresses and "stress" in self.results):
            return
        call = agreement.EVALUATE
        if stresses:
            call = agreement.STRESSES_ONLY if current else agreement.EVALUATE_WITH_STRESSES
        if not current:
            self.reset()
        before = self.comm.traffic.snapshot()
        system = self._agreed(target, call)
        with self._watchdog.inside(CALLS[call]):
            if not current:
                self.results = dict(self.engine.evaluate(system))
                self._system = system
            if stresses and "stress" in self.results:
                self.results["stresses"] = (
                    self.engine.per_atom_stresses() if len(system) else np.zeros((0, 6))
                )
        self._traffic += self.comm.traffic - before
        self.atoms = target.copy()

    def report(self) -> Report:
        """Return where the time of all evaluations so far went, on all ranks. **Collective**.

        ``print0(calc.report())`` shows it as a table, with a sentence on whether more ranks would
        help.

        Raises
        ------
        RuntimeError
            If the calculator is closed.
        DisagreementError
            If other ranks are in another call.
        """
        self._check_open()
        call = CALLS[agreement.REPORT]
        with self._watchdog.entry(call):
            meet(self.comm, agreement.REPORT, bytes(16))
        engine = self.engine
        current = engine.decomposition
        host, device, threads = self._seat
        mine = RankReport(
            rank=self.comm.rank,
            host=host,
            device=device,
            threads=threads,
            owned=0 if current is None else len(current.owned),
            ghosts=0 if current is None else len(current.ghosts),
            edges=0 if current is None else len(current.edge_centre),
            seconds=dict(engine.times.seconds),
            traffic=self._traffic,
        )
        with self._watchdog.inside(call):
            ranks = tuple(self.comm.gather_objects(mine))
        return Report(
            ranks=ranks,
            evaluations=engine.n_evaluations,
            rebuilds=engine.n_rebuilds,
            atoms=0 if current is None else len(current.owners),
        )

    def partition_report(self, atoms: Atoms) -> list[RankLoad]:
        """Return what every rank holds, without running the model. **Collective**.

        Raises
        ------
        ValueError
            As for an evaluation.
        """
        current = self._decomposition(atoms)
        if current is None:
            return [RankLoad(rank, 0, 0, 0) for rank in range(self.comm.size)]
        mine = torch.tensor(
            [[self.comm.rank, len(current.owned), len(current.ghosts), len(current.edge_centre)]],
            device="cpu",
        )
        return [RankLoad(*row) for row in self.comm.gather_rows(mine).tolist()]

    def owners(self, atoms: Atoms) -> NDArray[np.int64]:
        """Return the owning rank of each atom, (n,) int64. **Collective**.

        Raises
        ------
        ValueError
            As for an evaluation.
        """
        current = self._decomposition(atoms)
        return np.zeros(0, dtype=np.int64) if current is None else current.owners.copy()

    def _decomposition(self, atoms: Atoms) -> Decomposition | None:
        """Return the decomposition of ``atoms``, None where there are none. Collective."""
        system = self._agreed(atoms, agreement.DECOMPOSE)
        with self._watchdog.inside(CALLS[agreement.DECOMPOSE]):
            return self.engine.decomposition_for(system) if len(system) else None

    def _agreed(self, atoms: Atoms, call: int) -> System:
        self._check_open()
        with self._watchdog.entry(CALLS[call]), self.engine.times.measure("agree"):
            system = agree(
                atoms,
                self.potential,
                self.comm,
                list_cutoff=self.engine.list_cutoff,
                call=call,
            )
        self._warn_about_defaults(system)
        return system

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(
                "this DistributedCalculator is closed: ask for results and for the report before"
            )

    def todict(self, skip_default: bool = True) -> dict[str, object]:
        """Return a description that trajectory files can store."""
        return {"potential": self.potential.name, "skin": self.engine.skin}

    def _warn_about_defaults(self, system: System) -> None:
        for key in system.defaulted:
            if key not in self._warned and self.comm.rank == 0:
                default = self.potential.info_keys[key].default
                _log.warning(
                    "%s reads atoms.info[%r], which is not given: %g is used",
                    self.potential.name,
                    key,
                    default,
                )
            self._warned.add(key)

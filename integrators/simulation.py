"""Molecular dynamics in which atoms stay on their ranks."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from numpy.typing import NDArray

from nvdd_md import agreement
from nvdd_md.agreement import CALLS, DisagreementError, meet
from nvdd_md.comm import DEFAULT_WATCHDOG_S, Communicator
from nvdd_md.construction import DEFAULT_SKIN, check_settings, join, settle
from nvdd_md.evaluation import NonFiniteError
from nvdd_md.integrators import initial_velocities, saved_state
from nvdd_md.integrators.dynamics import FRAME_FIELDS, Dynamics
from nvdd_md.integrators.particles import ARRAY_PREFIX, gather_to_all, gather_to_root
from nvdd_md.integrators.runaway import Limits, RunawayError
from nvdd_md.integrators.sharded_engine import ShardedEngine
from nvdd_md.integrators.state import SimulationState
from nvdd_md.integrators.submission import Header, as_given, assembled, submit
from nvdd_md.integrators.thermo import Thermo
from nvdd_md.integrators.velocity_verlet import VelocityVerlet
from nvdd_md.phase_times import PhaseTimes
from nvdd_md.potential import Potential
from nvdd_md.report import RankReport, Report
from nvdd_md.system import Surroundings
from nvdd_md.watchdog import Watchdog

_log = logging.getLogger(__name__)

Observer = Callable[["Simulation"], None]


@dataclass
class _Attached:
    """An observer, how often it is called, and at which step it was called last."""

    observer: Observer
    every: int
    last_call: int


class Simulation:
    """Molecular dynamics with atoms that stay on their ranks. Every method is **collective**.

    Between steps each rank holds its own atoms only; they change ranks when the neighbour list is
    rebuilt. Within the life of a list a step costs one small gather besides the exchanges of the
    potential, and no step gathers the system. The same trajectory on any number of ranks, up to
    the round-off of sums in another order.

    Parameters
    ----------
    atoms : Atoms or None
        Rank 0's are taken, and never touched; on other ranks the same, or None. Its momenta are the
        initial ones. Its calculator is not used.
    potential : Potential
    integrator : VelocityVerlet
        With or without a thermostat.
    comm : mpi4py communicator, torch.distributed process group, Communicator or None
        The ranks that share the work. None: all ranks of the job.
    skin : float, Å
        Neighbour lists reach this far beyond the cutoff and live until a pair may be missed.
    cut_axes : sequence of int
        Cell axes (0, 1, 2) that may be cut into domains.
    device : str, torch.device or None
        None: the GPU of this node-local rank where there is one, else the CPU.
    limits : Limits or None
        Beyond which a run is stopped as having run away. None: the defaults.
    watchdog_s : float or None
        See :class:`nvdd_md.calculators.DistributedCalculator`.

    Attributes
    ----------
    comm : Communicator
    stop_reason : int
        Why the last run ended before its time; 0: it did not.

    Raises
    ------
    TypeError, ValueError
        For arguments of the wrong kind, atoms that the potential cannot be evaluated on, or (as
        ``DisagreementError``) ranks that give different ones. The same on all ranks.
    """

    def __init__(
        self,
        atoms: Atoms | None,
        potential: Potential,
        integrator: VelocityVerlet,
        comm: object = None,
        *,
        skin: float = DEFAULT_SKIN,
        cut_axes: Sequence[int] = (0, 1, 2),
        device: str | torch.device | None = None,
        limits: Limits | None = None,
        watchdog_s: float | None = DEFAULT_WATCHDOG_S,
    ) -> None:
        self._join(potential, integrator, comm, skin, cut_axes, device, limits, watchdog_s)
        header, particles = submit(atoms, potential, potential.cutoff + skin, self._watchdog)
        self._begin(header, integrator, limits)
        self._dynamics.take(particles)
        with self._watchdog.inside(CALLS[agreement.SIMULATE]):
            self._dynamics.distribute()

    @classmethod
    def restore(
        cls,
        state: SimulationState | None,
        potential: Potential,
        integrator: VelocityVerlet,
        comm: object = None,
        *,
        skin: float = DEFAULT_SKIN,
        cut_axes: Sequence[int] = (0, 1, 2),
        device: str | torch.device | None = None,
        limits: Limits | None = None,
        watchdog_s: float | None = DEFAULT_WATCHDOG_S,
    ) -> Self:
        """Go on from a saved state, on any number of ranks. **Collective**.

        On as many ranks as it was saved on the trajectory continues bit by bit, on others up to
        round-off.

        Parameters
        ----------
        state : SimulationState or None
            What :meth:`state` returned. Rank 0's is taken.
        integrator : VelocityVerlet
            As it was; the state of its thermostat is restored.
        potential, comm, skin, cut_axes, device, limits, watchdog_s
            As for a new simulation.

        Raises
        ------
        ValueError
            On all ranks, if timestep or kind of thermostat are others than those of the state.
        """
        self = cls.__new__(cls)
        self._join(potential, integrator, comm, skin, cut_axes, device, limits, watchdog_s)
        saved = saved_state.receive(state, potential, integrator, self._watchdog)
        self._begin(saved.header, integrator, limits)
        with self._watchdog.inside(CALLS[agreement.SIMULATE]):
            saved_state.apply(saved, self._dynamics)
        self._observed = self._saved_observed = saved.observed
        return self

    def _join(
        self,
        potential: Potential,
        integrator: VelocityVerlet,
        comm: object,
        skin: float,
        cut_axes: Sequence[int],
        device: str | torch.device | None,
        limits: Limits | None,
        watchdog_s: float | None,
    ) -> None:
        """Do what needs no atoms. Collective."""
        check_settings(potential, skin, cut_axes, watchdog_s)
        _check_integrator(integrator)
        if limits is not None and not isinstance(limits, Limits):
            raise TypeError(f"limits must be a Limits or None, got {limits!r}")
        self.comm: Communicator = join(comm, watchdog_s)
        self._watchdog = Watchdog(self.comm, watchdog_s)
        settings = (float(skin), tuple(cut_axes), integrator.description(), limits)
        self._seat = settle(potential, settings, device, self._watchdog)
        self._engine = ShardedEngine(potential, self.comm, skin=skin, cut_axes=tuple(cut_axes))
        self._traffic = self.comm.traffic.snapshot()

    def _begin(self, header: Header, integrator: VelocityVerlet, limits: Limits | None) -> None:
        self._header = header
        self._dynamics = Dynamics(self._engine, integrator, header, limits or Limits())
        self.stop_reason = 0
        self._observers: list[_Attached] = []
        self._observed = self._saved_observed = -1

    # -- What there is

    @property
    def step(self) -> int:
        """The absolute step that the state belongs to."""
        return self._dynamics.motion.step

    @property
    def time_fs(self) -> float:
        """Simulated time, fs."""
        return self.step * self.integrator.timestep_fs

    @property
    def n_atoms(self) -> int:
        """Atoms of the whole system."""
        return self._header.n_atoms

    @property
    def surroundings(self) -> Surroundings:
        """Cell, periodicity, and what the potential reads of ``atoms.info``."""
        return self._header.surroundings

    @property
    def times(self) -> PhaseTimes:
        """Seconds of this rank in each phase; an observer adds its own to ``output``."""
        return self._engine.times

    @property
    def n_owned(self) -> int:
        """Atoms that live on this rank at present."""
        return len(self._dynamics.motion.particles)

    @property
    def n_rebuilds(self) -> int:
        """Neighbour lists built so far."""
        return self._engine.n_rebuilds

    @property
    def integrator(self) -> VelocityVerlet:
        """The integrator; another one is set with :meth:`set_integrator`."""
        return self._dynamics.integrator

    @property
    def stop_request(self) -> Callable[[], int] | None:
        """Asked at every step, without communication, whether this rank wants to stop.

        Any number but 0 is a reason: all ranks then end the run after the step that is being made.
        """
        return self._dynamics.stop_request

    @stop_request.setter
    def stop_request(self, request: Callable[[], int] | None) -> None:
        self._dynamics.stop_request = request

    # -- Changing it

    def set_integrator(self, integrator: VelocityVerlet) -> None:
        """Go on with another integrator, as in the next stage of a job. **Collective**.

        The conserved energy continues without a jump.

        Raises
        ------
        TypeError, ValueError
            If it is none, or has another timestep: simulated time is steps times timestep.
        """
        failure: Exception | None = None
        try:
            _check_integrator(integrator)
            if integrator.timestep_fs != self.integrator.timestep_fs:
                raise ValueError(
                    f"this simulation has a timestep of {self.integrator.timestep_fs:g} fs from "
                    f"its first step on, the new integrator has {integrator.timestep_fs:g} fs"
                )
        except (TypeError, ValueError) as error:
            failure = error
        submitted = "" if failure else integrator.description()
        self._meet(agreement.INTEGRATOR, submitted, failure)
        self._dynamics.set_integrator(integrator)

    def attach(self, observer: Observer, every: int = 1) -> None:
        """Have ``observer(simulation)`` called on all ranks at steps divisible by ``every``.

        Also at the step a run starts from, unless it was called there already. An observer makes
        its collective calls first; an exception that it raises afterwards on some rank ends the
        run on all of them.

        Raises
        ------
        ValueError
            If ``every`` is no integer above 0.
        """
        if _integer(every, "every") < 1:
            raise ValueError(f"every must be a number of steps above 0, got {every!r}")
        self._observers.append(_Attached(observer, int(every), self._saved_observed))

    def draw_velocities(
        self,
        temperature_K: float,
        seed: int,
        *,
        replace: bool = False,
        remove_momentum: bool = True,
        remove_rotation: bool = False,
    ) -> bool:
        """Draw momenta from a Maxwell-Boltzmann distribution. **Collective**.

        The numbers are functions of (seed, atom id).

        Parameters
        ----------
        temperature_K : float
        seed : int
        replace : bool
            If False, momenta that the atoms came with are kept.
        remove_momentum, remove_rotation : bool
            Take out what moves or turns the whole system. The temperature is not adjusted after it.

        Returns
        -------
        bool
            Whether momenta were drawn.

        Raises
        ------
        ValueError
            For a negative temperature or a bad seed.
        """
        wanted = (temperature_K, seed, replace, remove_momentum, remove_rotation)
        self._meet(agreement.VELOCITIES, wanted)
        motion = self._dynamics.motion
        ids, masses = motion.particles.ids, motion.particles.masses
        momenta = initial_velocities.maxwell_boltzmann(ids, masses, temperature_K, seed)
        if not replace and motion.kinetic_energy() > 0.0:
            if self.comm.rank == 0:
                _log.info("the atoms have velocities, which are kept")
            return False
        if remove_momentum:
            momenta = initial_velocities.remove_momentum(momenta, masses, self.comm)
        if remove_rotation:
            momenta = initial_velocities.remove_rotation(
                self._dynamics.unwrapped(), momenta, masses, self.comm
            )
        motion.particles.columns["momenta"] = momenta
        self._dynamics.forget()
        return True

    # -- Running

    def run(self, n_steps: int) -> None:
        """Make ``n_steps`` steps, or fewer if some rank wants to stop. **Collective**.

        Raises
        ------
        ValueError
            If ``n_steps`` is no integer >= 0, or (``DisagreementError``) not the same everywhere.
        NonFiniteError, RunawayError
            On all ranks, at the step at which the model returned NaN or inf, or atoms flew apart.
            The state is then the one that the model was asked about.
        Exception
            What an observer raised on some rank, on all of them.
        """
        failure: Exception | None = None
        try:
            if _integer(n_steps, "n_steps") < 0:
                raise ValueError(f"n_steps must be >= 0, got {n_steps}")
        except ValueError as error:
            failure = error
        cadences = [attached.every for attached in self._observers]
        self._meet(agreement.RUN, (str(n_steps), self.step, cadences), failure)
        dynamics = self._dynamics
        self.stop_reason = 0
        with self._watchdog.inside(CALLS[agreement.RUN]):
            dynamics.evaluate_if_needed()
            self._observe()
            for _ in range(n_steps):
                self.stop_reason = dynamics.make_step()
                self._observe()
                if self.stop_reason:
                    break
        with self._watchdog.entry(CALLS[agreement.END_OF_RUN]):
            dynamics.end()

    def observe(self, observer: Observer) -> None:
        """Call an observer once, now. **Collective**.

        Raises
        ------
        Exception
            What it raised on some rank, on all of them.
        """
        self._meet(agreement.RUN, "observe")
        self._call(observer)
        with self._watchdog.entry(CALLS[agreement.END_OF_RUN]):
            self._dynamics.end()

    def _observe(self) -> None:
        """Call the observers that are due."""
        self._observed = self.step
        for attached in self._observers:
            if self.step % attached.every or attached.last_call == self.step:
                continue
            attached.last_call = self.step
            self._call(attached.observer)

    def _call(self, observer: Observer) -> None:
        """Call an observer; its error is raised on all ranks when they meet next."""
        try:
            observer(self)
        except (NonFiniteError, RunawayError):
            raise  # on all ranks
        except Exception as error:
            self._dynamics.failure = self._dynamics.failure or error

    # -- Looking at the state

    def thermo(self) -> Thermo:
        """Return energies, temperature and pressure of the present step. **Collective**.

        Raises
        ------
        NonFiniteError
            On all ranks, if they are not finite.
        """
        return self._dynamics.thermo()

    def gather(self) -> Atoms:
        """Return all atoms with the results of the present step, on every rank. **Collective**.

        Positions are unwrapped: an atom that has left the cell is outside of it.
        """
        self._meet(agreement.GATHER, "all")
        thermo = self.thermo()
        names = ["numbers", "positions", "momenta", "masses", "forces"]
        names += [item.name for item in self._header.fields if item.name.startswith(ARRAY_PREFIX)]
        columns = {name: self._dynamics.column(name) for name in names}
        ids, counts = self._dynamics.motion.particles.ids, self._engine.domain.owned_counts
        gathered = gather_to_all(columns, ids, counts, self.comm)
        arrays = {name: column.cpu().numpy() for name, column in gathered.items()}
        forces = arrays.pop("forces")
        atoms = assembled(self._header, arrays)
        results: dict[str, object] = {"energy": thermo.potential_eV, "forces": forces}
        if thermo.stress is not None:
            results["stress"] = np.array(thermo.stress)
        atoms.calc = SinglePointCalculator(atoms, **results)
        return atoms

    def gather_arrays(self, names: Sequence[str]) -> dict[str, NDArray[np.generic]] | None:
        """Return per-atom arrays by atom id on rank 0, None on others. **Collective**.

        Parameters
        ----------
        names : sequence of str
            Of :data:`FRAME_FIELDS` (``velocities`` in Å/fs, ``positions`` unwrapped), or of
            ``atoms.arrays``.

        Raises
        ------
        KeyError
            For an unknown name.
        """
        self._dynamics.evaluate_if_needed()
        columns = {
            name: self._dynamics.column(name if name in FRAME_FIELDS else ARRAY_PREFIX + name)
            for name in names
        }
        ids, counts = self._dynamics.motion.particles.ids, self._engine.domain.owned_counts
        with self._engine.times.measure("output"):
            gathered = gather_to_root(columns, ids, counts, self.comm)
        if gathered is None:
            return None
        return {n: as_given(self._header, n, c.cpu().numpy()) for n, c in gathered.items()}

    def state(self) -> SimulationState | None:
        """Return all that a later run needs, on rank 0; None on others. **Collective**.

        Raises
        ------
        NonFiniteError
            On all ranks, if energies or forces are not finite: such a state is not worth keeping.
        """
        self.thermo()
        with self._engine.times.measure("output"):
            return saved_state.save(self._dynamics, self._observed)

    def report(self) -> Report:
        """Return where the time of all steps so far went, on all ranks. **Collective**."""
        self._meet(agreement.REPORT, "")
        domain = self._engine.domain
        host, device, threads = self._seat
        mine = RankReport(
            rank=self.comm.rank,
            host=host,
            device=device,
            threads=threads,
            owned=len(domain.owned),
            ghosts=len(domain.ghosts),
            edges=len(domain.edge_centre),
            seconds=dict(self._engine.times.seconds),
            traffic=self.comm.traffic - self._traffic,
        )
        with self._watchdog.inside(CALLS[agreement.REPORT]):
            ranks = tuple(self.comm.gather_objects(mine))
        n_evaluations = self._engine.evaluator.n_evaluations
        return Report(ranks, n_evaluations, self.n_rebuilds, self.n_atoms)

    def _meet(self, call: int, submitted: object, failure: Exception | None = None) -> None:
        """Check that all ranks make the same call with the same arguments. Collective."""
        digest = hashlib.blake2b(repr(submitted).encode(), digest_size=16).digest()
        with self._watchdog.entry(CALLS[call]):
            if meet(self.comm, call, digest, failure):
                return
            offers = self.comm.gather_objects(repr(submitted))
        ranks = "; ".join(f"rank {rank}: {offer}" for rank, offer in enumerate(offers))
        raise DisagreementError(f"the ranks ask for different things in {CALLS[call]}: {ranks}")


def _check_integrator(integrator: object) -> None:
    if not isinstance(integrator, VelocityVerlet):
        raise TypeError(f"integrator must be a VelocityVerlet, got {integrator!r}")


def _integer(value: object, name: str) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    return int(value)

"""One step after another on this rank, in lockstep with the others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NoReturn

import torch
from ase import units
from torch import Tensor

from nvdd_md.agreement import END_OF_RUN, meet, raise_shared
from nvdd_md.comm import Communicator
from nvdd_md.evaluation import LocalResults, NonFiniteError
from nvdd_md.integrators.meeting import Minutes, Record, Status, hold
from nvdd_md.integrators.motion import Motion, no_heat
from nvdd_md.integrators.particles import ARRAY_PREFIX, Particles
from nvdd_md.integrators.runaway import Limits, first_bad_atom, judge
from nvdd_md.integrators.sharded_engine import ShardedEngine, translations
from nvdd_md.integrators.submission import Header
from nvdd_md.integrators.thermo import Thermo, measure
from nvdd_md.integrators.velocity_verlet import VelocityVerlet
from nvdd_md.potential import OutputKind

FRAME_FIELDS = ("numbers", "positions", "momenta", "velocities", "forces", "energies", "masses")
"""Per-atom quantities that every simulation offers; ``energies`` where the potential has them."""


class Dynamics:
    """Moves the atoms of this rank. All methods are collective unless they say otherwise.

    Parameters
    ----------
    engine : ShardedEngine
    integrator : VelocityVerlet
        A copy is used: another simulation may begin with the same object.
    header : Header
    limits : Limits

    Attributes
    ----------
    motion : Motion
        After :meth:`take`.
    stop_request : callable or None
        Asked at every step, without communication, whether this rank wants to stop.
    failure : Exception or None
        Why this rank cannot go on; shared, and raised on all ranks, in the next step.
    first_conserved : float or None
        The conserved energy that drift is measured from, eV.
    """

    motion: Motion

    def __init__(
        self, engine: ShardedEngine, integrator: VelocityVerlet, header: Header, limits: Limits
    ) -> None:
        self.engine = engine
        self.comm: Communicator = engine.comm
        self.integrator = copy.deepcopy(integrator)
        self.header = header
        self.limits = limits
        self.stop_request: Callable[[], int] | None = None
        self.failure: Exception | None = None
        self.first_conserved: float | None = None
        self._results: LocalResults | None = None
        self._thermo: Thermo | None = None
        self._thermostat_energy = 0.0
        self._surroundings = header.surroundings

    def take(self, particles: Particles, step: int = 0, heat: float = 0.0) -> None:
        """Begin with these atoms, in any division over the ranks. Without communication."""
        device = self.engine.potential.device
        columns = {name: column.to(device) for name, column in particles.columns.items()}
        n_atoms = self.header.n_atoms
        self.motion = Motion(
            particles=Particles(columns, particles.fields),
            forces=torch.zeros((0, 3), dtype=torch.float64, device=device),
            comm=self.comm,
            step=step,
            n_atoms=n_atoms,
            degrees_of_freedom=self.integrator.degrees_of_freedom(n_atoms),
            heat=heat,
            local_heat=no_heat(device),
        )
        self._keep()

    def distribute(self) -> None:
        """Give every atom to its rank, for the first time."""
        with self.guard():
            self.motion.particles = self.engine.distribute(
                self.motion.particles, self._surroundings.lattice, None
            )

    def forget(self) -> None:
        """Drop what was measured: something has been changed from outside."""
        self._thermo = None
        self.first_conserved = None

    def set_integrator(self, integrator: VelocityVerlet) -> None:
        """Go on with another integrator; the conserved energy has no jump."""
        motion = self.motion
        motion.heat -= self.integrator.thermostat.energy(motion)
        self.integrator = copy.deepcopy(integrator)
        motion.degrees_of_freedom = integrator.degrees_of_freedom(motion.n_atoms)
        self._thermostat_energy = integrator.thermostat.energy(motion)
        motion.heat += self._thermostat_energy
        self._thermo = None

    # -- A step

    def make_step(self) -> int:
        """Go from one step to the next; return why some rank wants to stop, or 0.

        Raises
        ------
        NonFiniteError, RunawayError, Exception
            On all ranks; see :meth:`Simulation.run`. The state is then that of the step before.
        """
        motion, times = self.motion, self.engine.times
        self._keep()
        with self.guard():
            kinetic = motion.local_kinetic_energy()
            motion.step += 1
            with times.measure("integrate"):
                self.integrator.first_half(motion)
                record = self._record(kinetic)
            with times.measure("agree"):
                minutes = hold(record, self.comm)
        self._judge(minutes)
        motion.heat += minutes.heat
        motion.local_heat = no_heat(motion.forces.device)
        with self.guard():
            self._follow_list(minutes.moves)
            self._evaluate()
            with times.measure("integrate"):
                self.integrator.second_half(motion)
            self._thermostat_energy = self.integrator.thermostat.energy(motion)
        self._thermo = None
        return minutes.stop

    def end(self) -> None:
        """Share what is wrong after the last step of a run, as the next step would have done.

        Raises
        ------
        NonFiniteError, Exception
            On all ranks.
        """
        failure, self.failure = self.failure, None
        finite = self._results is None or self._is_finite(self.engine.energy(self.results))
        # Unlike the digest of any other rank, so that all see that something is wrong.
        digest = bytes(16) if finite else (1 + self.comm.rank).to_bytes(16)
        same = meet(self.comm, END_OF_RUN, digest, failure)
        if not (same and finite):
            self._raise_not_finite(self.motion.particles.columns, self.motion.step)

    def _is_finite(self, energy: Tensor) -> bool:
        """Tell whether this rank's energy and forces are finite. Without communication."""
        return bool(torch.isfinite(self.motion.forces).all() & torch.isfinite(energy))

    def evaluate_if_needed(self) -> None:
        """Evaluate the potential, where that has not been done."""
        if self._results is None:
            with self.guard():
                self._evaluate()
                self._thermostat_energy = self.integrator.thermostat.energy(self.motion)

    def _keep(self) -> None:
        """Remember the state before a step, in case the step is refused."""
        self._before = dict(self.motion.particles.columns)
        self._heat_before = self.motion.heat
        self._thermostat_before = self.integrator.thermostat.state()

    def _evaluate(self) -> None:
        self._results = self.engine.evaluate(self.motion.particles, self._surroundings)
        self.motion.forces = self._results.forces[: len(self.motion.particles)]

    def _record(self, kinetic: Tensor) -> Record:
        """Return what this rank brings to the meeting of the step."""
        motion, engine = self.motion, self.engine
        particles = motion.particles
        moved = particles.positions - self._before["positions"]
        lengths = torch.linalg.vector_norm(moved, dim=1)
        energy = engine.energy(self.results)
        status = Status.FINE
        if not self._is_finite(energy):
            status = Status.NOT_FINITE
        elif self.failure is not None:
            status = Status.FAILED
        return Record(
            status=status,
            stop=self.stop_request() if self.stop_request else 0,
            moves=engine.largest_moves(particles, self._surroundings.lattice),
            longest_step=lengths.max() if len(lengths) else lengths.sum(),
            potential=energy,
            kinetic=kinetic,
            heat=motion.local_heat,
        )

    def _judge(self, minutes: Minutes) -> None:
        """Raise, on all ranks alike, if the step must not go on."""
        motion = self.motion
        try:
            if (minutes.statuses == Status.NOT_FINITE).any():
                self._raise_not_finite(self._before, motion.step - 1)
            if (minutes.statuses == Status.FAILED).any():
                failure, self.failure = self.failure, None
                raise_shared(failure, self.comm)
            total = minutes.potential + minutes.kinetic
            conserved = total + self._thermostat_energy - self._heat_before
            if self.first_conserved is None:
                self.first_conserved = conserved
            drift = (conserved - self.first_conserved) / motion.n_atoms
            judge(self.limits, minutes, drift, motion, self._before)
        except BaseException:
            motion.particles.columns.update(self._before)
            motion.heat = self._heat_before
            self.integrator.thermostat.restore(self._thermostat_before)
            motion.local_heat = no_heat(motion.forces.device)
            motion.step -= 1
            raise

    def _raise_not_finite(self, columns: dict[str, Tensor], step: int) -> NoReturn:
        """Raise for the first atom whose forces are not finite."""
        bad = first_bad_atom(self.motion.forces, columns, self.comm.rank)
        first = min((found for found in self.comm.gather_objects(bad) if found), default=None)
        where = "the energy is" if first is None else f"the forces on {first.describe()} are"
        raise NonFiniteError(f"step {step}: {where} not finite")

    def _follow_list(self, moves: float) -> None:
        """Rebuild the list, and move atoms to their new ranks, if a pair may be missed."""
        lattice = self._surroundings.lattice
        if not self.engine.covers(moves, lattice):
            self.motion.particles = self.engine.distribute(
                self.motion.particles, lattice, self.engine.domain.bricks
            )

    # -- The state

    @property
    def results(self) -> LocalResults:
        """This rank's part of the last evaluation. Without communication.

        Raises
        ------
        RuntimeError
            If nothing was evaluated yet.
        """
        if self._results is None:
            raise RuntimeError("nothing was evaluated yet")
        return self._results

    def thermo(self) -> Thermo:
        """Return energies, temperature and pressure of the present step.

        Raises
        ------
        NonFiniteError
            On all ranks, if they are not finite.
        """
        if self._thermo is None:
            self.evaluate_if_needed()
            with self.engine.times.measure("gather"):
                thermo = measure(
                    self.motion,
                    self.integrator,
                    self.engine.energy(self.results),
                    self.results.virial,
                    self._surroundings,
                )
            if thermo is None:
                self._raise_not_finite(self.motion.particles.columns, self.motion.step)
            self._thermo = thermo
        return self._thermo

    def column(self, name: str) -> Tensor:
        """Return a per-atom quantity of this rank's atoms (n_owned, ...). Without communication.

        Parameters
        ----------
        name : str
            Of :data:`FRAME_FIELDS`, or a field (``array:tags``).

        Raises
        ------
        KeyError
            For an unknown name.
        """
        particles = self.motion.particles
        if name == "positions":
            return self.unwrapped()
        if name == "velocities":
            return particles.momenta / particles.masses[:, None] * units.fs
        if name == "forces":
            return self.motion.forces
        if name == "energies" and self.engine.potential.outputs.get(name) is OutputKind.PER_NODE:
            return self.results.outputs[name][: len(particles)].to(torch.float64)
        if name not in particles.columns:
            own = [item.name for item in self.header.fields if item.name.startswith(ARRAY_PREFIX)]
            known = sorted({*FRAME_FIELDS, *(item.removeprefix(ARRAY_PREFIX) for item in own)})
            asked = name.removeprefix(ARRAY_PREFIX)
            raise KeyError(f"no per-atom quantity {asked!r}; there are {known}")
        return particles.columns[name]

    def unwrapped(self) -> Tensor:
        """Return positions (n_owned, 3) in Å as if there were no cell. Without communication."""
        particles, lattice = self.motion.particles, self._surroundings.lattice
        return particles.positions + translations(particles.columns["images"], lattice)

    def guard(self) -> AbstractContextManager[None]:
        """Take the job down if this rank fails where the others wait for it."""
        load = getattr(self.engine, "domain", "before the first list")
        return self.engine.evaluator.nobody_left_waiting(load)

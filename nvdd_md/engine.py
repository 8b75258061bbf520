"""One energy, force and stress evaluation of a system that all ranks hold."""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from nvdd_md.comm import Communicator
from nvdd_md.domain.decomposition import Decomposition, decompose
from nvdd_md.domain.lattice import FloatArray
from nvdd_md.evaluation import Evaluator, LocalRows
from nvdd_md.phase_times import PhaseTimes
from nvdd_md.potential import Potential
from nvdd_md.results import Results, consolidate
from nvdd_md.shard import ShardTensor
from nvdd_md.system import System

_log = logging.getLogger(__name__)


class ForceEngine:
    """Evaluates one potential over the ranks of one communicator.

    Keeps the decomposition, its edges and its routing as long as no pair can be missed, and
    rebuilds them on all ranks together when one may be.

    Parameters
    ----------
    potential : Potential
    comm : Communicator
    skin : float, Å
        Edges up to ``cutoff + skin`` are listed, so that a list outlives small displacements.
    cut_axes : tuple of int
        Cell axes that may be cut.
    force_halo : bool
        Take the distributed path on a single rank too (for tests and measurements).
    """

    def __init__(
        self,
        potential: Potential,
        comm: Communicator,
        *,
        skin: float,
        cut_axes: tuple[int, ...] = (0, 1, 2),
        force_halo: bool = False,
    ) -> None:
        self.potential = potential
        self.comm = comm
        self.skin = skin
        self.cut_axes = cut_axes
        self.force_halo = force_halo
        self.decomposition: Decomposition | None = None
        self.times = PhaseTimes(comm.traffic)
        self.n_rebuilds = 0
        self._evaluator = Evaluator(potential, comm, self.times, force_halo=force_halo)
        self._numbers = np.zeros(0, dtype=np.int64)
        self._volume: float | None = None

    @property
    def n_evaluations(self) -> int:
        """How often the potential was evaluated."""
        return self._evaluator.n_evaluations

    @property
    def list_cutoff(self) -> float:
        """Length up to which edges are listed, Å."""
        return self.potential.cutoff + self.skin

    def decomposition_for(self, system: System) -> Decomposition:
        """Return a decomposition that covers ``system``, rebuilt where necessary. Collective."""
        with self._evaluator.nobody_left_waiting(self):
            return self._covering(system)

    def _covering(self, system: System) -> Decomposition:
        current = self.decomposition
        with self.times.measure("neighbours"):
            if current is not None and not np.array_equal(system.numbers, self._numbers):
                current = None
            if current is not None and current.covers(system.positions, system.lattice):
                return current
        self.decomposition = decompose(
            system.positions,
            system.lattice,
            self.comm,
            cutoff=self.potential.cutoff,
            skin=self.skin,
            previous=current,
            cut_axes=self.cut_axes,
            device=self.potential.device,
            times=self.times,
        )
        self._numbers = system.numbers
        self.n_rebuilds += 1
        _log.debug("list %d, rank %d: %s", self.n_rebuilds, self.comm.rank, self)
        return self.decomposition

    def evaluate(self, system: System) -> Results:
        """Return the results of ``system``, the same bits on every rank. Collective.

        All ranks must have agreed on ``system``. A failure on one rank of several between here
        and the last exchange takes the job down, because the others wait for this rank.

        Raises
        ------
        NonFiniteError
            On all ranks, if the model's energies or forces are not finite.
        """
        if not len(system):
            return _nothing(self.potential, system)
        with self._evaluator.nobody_left_waiting(self):
            decomposition = self._covering(system)
            with self.times.measure("graph"):
                rows = self._rows(system, decomposition)
            local = self._evaluator.evaluate(rows, system.surroundings, decomposition)
            self._volume = system.volume
            with self.times.measure("gather"):
                return consolidate(local, self.potential, system, decomposition, self.comm)

    def per_atom_stresses(self) -> FloatArray:
        """Return the stresses (n_atoms, 6) eV/Å³ of the last evaluation. Collective.

        Half of each edge's virial goes to its centre, half to its neighbour, divided by the total
        volume: the rows add up to the stress. (This is not the heat-flux virial of many-body
        models.)

        Raises
        ------
        RuntimeError
            If there is no evaluation, or its cell has no volume.
        """
        if self._volume is None:
            raise RuntimeError("no evaluation with a volume to take stresses from")
        with self._evaluator.nobody_left_waiting(self):
            own, domain = self._evaluator.per_atom_virials()
            if not isinstance(domain, Decomposition):
                raise TypeError("the last evaluation was not of a system that all ranks hold")
            stresses = ShardTensor(own, domain).full_tensor() / self._volume
        return np.asarray(stresses.cpu().numpy())

    def _rows(self, system: System, decomposition: Decomposition) -> LocalRows:
        """Take this rank's rows out of the system."""
        potential, routing = self.potential, decomposition.routing
        ids = decomposition.local_ids
        if not routing.n_owned:
            ids = np.concatenate((np.zeros(1, dtype=np.int64), ids))
        numbers = system.numbers[ids]
        if not routing.n_owned:
            numbers[0] = potential.dummy_element

        def to_device(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(potential.device)

        own = ids[: routing.n_own_rows]
        return LocalRows(
            numbers=to_device(numbers),
            positions=to_device(system.positions[ids]),
            arrays={key: to_device(array[own]) for key, array in system.arrays.items()},
        )

    def __str__(self) -> str:
        current = self.decomposition
        return "before the first decomposition" if current is None else str(current)


def _nothing(potential: Potential, system: System) -> Results:
    """Return the results of a system without atoms."""
    results: Results = {"energy": 0.0, "free_energy": 0.0, "forces": np.zeros((0, 3))}
    if "energies" in potential.outputs:
        results["energies"] = np.zeros(0)
    if system.volume is not None:
        results["stress"] = np.zeros(6)
    return results

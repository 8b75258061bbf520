"""Forces on atoms that stay on their ranks: who owns what, the neighbour list, the evaluation."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nvdd_md.comm import Communicator
from nvdd_md.domain.decomposition import BALANCE_TOLERANCE, Domain, ListRange, build_domain
from nvdd_md.domain.lattice import IntArray, Lattice
from nvdd_md.domain.partition import Bricks, bisect
from nvdd_md.evaluation import Evaluator, LocalResults, LocalRows
from nvdd_md.integrators.particles import ARRAY_PREFIX, Particles
from nvdd_md.phase_times import PhaseTimes
from nvdd_md.potential import OutputKind, Potential
from nvdd_md.system import Surroundings

_log = logging.getLogger(__name__)


class ShardedEngine:
    """Keeps this rank's domain, and evaluates the potential on it.

    Nothing here is larger than this rank's atoms, their ghosts and their edges.

    Parameters
    ----------
    potential : Potential
    comm : Communicator
    skin : float, Å
        Edges up to ``cutoff + skin`` are listed.
    cut_axes : tuple of int
        Cell axes that may be cut.

    Attributes
    ----------
    domain : Domain
        Of the last :meth:`distribute` or :meth:`restore`.
    list_lattice : Lattice
        What the list was built with.
    n_rebuilds, n_rebalanced, n_moved : int
        Lists built, bricks cut anew because the work was uneven, and atoms that came to this rank.
    """

    domain: Domain
    list_lattice: Lattice

    def __init__(
        self, potential: Potential, comm: Communicator, *, skin: float, cut_axes: tuple[int, ...]
    ) -> None:
        self.potential = potential
        self.comm = comm
        self.skin = skin
        self.cut_axes = cut_axes
        self.times = PhaseTimes(comm.traffic)
        self.evaluator = Evaluator(potential, comm, self.times)
        self.n_rebuilds = self.n_rebalanced = self.n_moved = 0
        self._numbers = torch.zeros(0, dtype=torch.int64, device="cpu")

    # -- Who owns what

    def distribute(
        self, particles: Particles, lattice: Lattice, bricks: Bricks | None
    ) -> Particles:
        """Give every atom to the rank of its brick and build the list. Collective.

        The bricks are cut anew where there are none, and where the atoms' weights have become
        uneven. Weights of a first list are a guess: if the counted ones turn out uneven, that list
        is thrown away.

        Parameters
        ----------
        particles : Particles
            Any division of all atoms over the ranks.
        lattice : Lattice
        bricks : Bricks or None
            Those of the list before.

        Returns
        -------
        Particles
            This rank's atoms, wrapped into the cell, with new weights and reference positions.
        """
        particles = wrapped(particles, lattice)
        known = bool(bricks) or self._are_counted(particles)
        with self.times.measure("neighbours"):
            positions, ids = _host(particles.positions), _host(particles.ids)
            owners = None if bricks is None else bricks.owners(positions, ids, lattice)
            if bricks is None or owners is None or self._is_uneven(particles, owners):
                self.n_rebalanced += bricks is not None
                bricks = self._bisect(particles, lattice)
                owners = bricks.owners(positions, ids, lattice)
        particles = self._settle(particles, owners, bricks, lattice)
        if known or not self.domain.is_uneven:
            return particles
        bricks = self._bisect(particles, lattice)
        owners = bricks.owners(_host(particles.positions), _host(particles.ids), lattice)
        return self._settle(particles, owners, bricks, lattice)

    def restore(self, particles: Particles, list_lattice: Lattice, bricks: Bricks) -> Particles:
        """Rebuild the list that a checkpoint was written with, for as many ranks. Collective.

        Parameters
        ----------
        particles : Particles
            Any division over the ranks; ``reference`` has the positions of the list.
        list_lattice : Lattice
        bricks : Bricks
        """
        reference = particles.columns["reference"]
        owners = bricks.owners(_host(reference), _host(particles.ids), list_lattice)
        return self._settle(particles, owners, bricks, list_lattice, new=False)

    def _settle(
        self,
        particles: Particles,
        owners: IntArray,
        bricks: Bricks,
        lattice: Lattice,
        new: bool = True,
    ) -> Particles:
        """Move atoms to their owners and build the domain there. Collective."""
        with self.times.measure("routing"):
            self.n_moved -= int((owners == self.comm.rank).sum())
            particles = particles.moved(owners, self.comm)
            self.n_moved += len(particles)
        if new:
            particles.columns["reference"] = particles.positions.clone()
        self.domain = build_domain(
            bricks,
            _host(particles.ids),
            _host(particles.columns["reference"]),
            lattice,
            self.comm,
            list_cutoff=self.potential.cutoff + self.skin,
            device=self.potential.device,
            times=self.times,
        )
        self.list_lattice = lattice
        particles.columns["weights"] = torch.from_numpy(self.domain.weights).to(
            self.potential.device
        )
        self._numbers = self._local_numbers(particles)
        self.n_rebuilds += 1
        _log.debug("list %d, rank %d: %s", self.n_rebuilds, self.comm.rank, self.domain)
        return particles

    def _bisect(self, particles: Particles, lattice: Lattice) -> Bricks:
        return bisect(
            _host(particles.positions),
            _host(particles.ids),
            _host(particles.columns["weights"]),
            lattice,
            self.comm,
            cut_axes=self.cut_axes,
        )

    def _are_counted(self, particles: Particles) -> bool:
        """Tell whether the weights come from a list (of a checkpoint). Collective."""
        heaviest = particles.columns["weights"].max() if len(particles) else torch.tensor(0.0)
        return bool(self.comm.sum(torch.tensor([heaviest > 1.0], device="cpu"))[0])

    def _is_uneven(self, particles: Particles, owners: IntArray) -> bool:
        """Tell whether the ranks would get uneven work. Collective."""
        weights = _host(particles.columns["weights"])
        mine = np.bincount(owners, weights=weights, minlength=self.comm.size)
        work = self.comm.sum(torch.from_numpy(mine)).numpy()
        return bool(work.max() > BALANCE_TOLERANCE * work.mean())

    def _local_numbers(self, particles: Particles) -> Tensor:
        """Return atomic numbers of the local rows, dummy and ghosts included. Collective."""
        own = particles.columns["numbers"]
        if not len(own):
            own = torch.full((1,), self.potential.dummy_element, device=own.device)
        return torch.cat((own, self.domain.routing.ghosts(own)))

    # -- The list

    def largest_moves(self, particles: Particles, lattice: Lattice) -> Tensor:
        """Return the two largest displacements (2,) in Å of this rank's atoms since the list."""
        reference = particles.columns["reference"]
        strain = self._range.strain(lattice)
        if strain is not None:
            reference = reference @ torch.from_numpy(strain).to(reference.device)
        distances = torch.linalg.vector_norm(particles.positions - reference, dim=1)
        moves = torch.zeros(2, dtype=torch.float64, device=distances.device)
        largest = distances.topk(min(2, len(distances))).values
        moves[: len(largest)] = largest
        return moves

    def covers(self, moves: float, lattice: Lattice) -> bool:
        """Tell whether the list has every pair below the cutoff.

        Parameters
        ----------
        moves : float, Å
            Sum of the two largest displacements over all ranks.
        lattice : Lattice
        """
        return self._range.allows(moves, lattice)

    @property
    def _range(self) -> ListRange:
        return ListRange(self.list_lattice, self.potential.cutoff, self.skin)

    # -- The evaluation

    def evaluate(self, particles: Particles, around: Surroundings) -> LocalResults:
        """Return this rank's part of energies, forces and virial. Collective."""
        routing = self.domain.routing
        own = _with_dummy(particles.positions, routing.n_own_rows)
        with self.times.measure("graph"):
            positions = torch.cat((own, routing.ghosts(own)))
            arrays = {
                key: _with_dummy(particles.columns[ARRAY_PREFIX + key], routing.n_own_rows)
                for key in self.potential.array_keys
            }
        rows = LocalRows(self._numbers, positions, arrays)
        return self.evaluator.evaluate(rows, around, self.domain)

    def energy(self, results: LocalResults) -> Tensor:
        """Return this rank's part of the energy, () float64 in eV."""
        potential, n_owned = self.potential, self.domain.routing.n_owned
        total = results.forces.new_zeros(())
        for name in potential.energy_terms:
            kind, value = potential.outputs[name], results.outputs[name].to(torch.float64)
            if kind is OutputKind.PER_NODE:
                total = total + value[:n_owned].sum()
            elif kind is OutputKind.SYSTEM_PARTIAL or self.comm.rank == 0:
                total = total + value.sum()
        return total


def wrapped(particles: Particles, lattice: Lattice) -> Particles:
    """Return particles with positions inside the cell along periodic axes, images adjusted."""
    positions = particles.positions
    inverse = torch.from_numpy(np.linalg.inv(lattice.vectors)).to(positions.device)
    pbc = torch.from_numpy(lattice.pbc).to(positions.device)
    crossed = torch.where(pbc, torch.floor(positions @ inverse), 0.0)
    columns = dict(particles.columns)
    columns["positions"] = positions - translations(crossed, lattice)
    columns["images"] = columns["images"] + crossed.to(torch.int64)
    return Particles(columns, particles.fields)


def translations(images: Tensor, lattice: Lattice) -> Tensor:
    """Return lattice translations (n, 3) in Å of integer ``images`` (n, 3)."""
    # No matrix product: its last bit may depend on which other rows there are.
    counts, vectors = images.to(torch.float64), torch.from_numpy(lattice.vectors).to(images.device)
    total = counts[:, :1] * vectors[0]
    for axis in (1, 2):
        total = total + counts[:, axis : axis + 1] * vectors[axis]
    return total


def _with_dummy(own: Tensor, n_rows: int) -> Tensor:
    """Return own rows, or one row of zeros where there is none."""
    return own if len(own) == n_rows else own.new_zeros((n_rows, *own.shape[1:]))


def _host(column: Tensor) -> NDArray[Any]:
    return np.asarray(column.cpu().numpy())

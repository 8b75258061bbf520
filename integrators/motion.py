"""What an integrator works on: this rank's atoms, their forces, and the sums over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvdd_md.comm import Communicator
from nvdd_md.integrators.particles import Particles


@dataclass
class Motion:
    """The state of one simulation on one rank.

    Attributes
    ----------
    particles : Particles
    forces : (n_owned, 3) float64, eV/Å
    comm : Communicator
    step : int
        The absolute step that is being made, or was made last.
    n_atoms : int
        Of the whole system.
    degrees_of_freedom : int
    heat : float, eV
        Energy that thermostats have put into the system so far; the same bits on every rank.
    local_heat : () float64 tensor, eV
        This rank's part of what they put in during the present step, before it is added up.
    """

    particles: Particles
    forces: Tensor
    comm: Communicator
    step: int
    n_atoms: int
    degrees_of_freedom: int
    heat: float
    local_heat: Tensor

    def kinetic_energy(self) -> float:
        """Return the kinetic energy of all atoms, eV, the same bits on every rank. Collective."""
        return float(self.comm.sum(self.local_kinetic_energy().cpu()))

    def local_kinetic_energy(self) -> Tensor:
        """Return the kinetic energy of this rank's atoms, () float64, eV."""
        momenta, masses = self.particles.momenta, self.particles.masses
        return 0.5 * (momenta * momenta / masses[:, None]).sum()

    def scale_momenta(self, factor: float) -> None:
        """Multiply all momenta by a number."""
        self.particles.columns["momenta"] = self.particles.momenta * factor

    def is_local_heat(self, before: Tensor) -> None:
        """Count the kinetic energy gained since it was ``before`` (this rank's) as heat."""
        self.local_heat = self.local_heat + (self.local_kinetic_energy() - before)


def no_heat(device: torch.device) -> Tensor:
    """Return a local heat of zero."""
    return torch.zeros((), dtype=torch.float64, device=device)

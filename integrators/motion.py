"""What an integrator works on: this rank's atoms, their forces, and the sums over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvdd_md.comm import Communicator
from nvdd_md.integrators.particles import Particles


@dataclass(frozen=True)
class ThermalMotion:
    """The part of the motion that a temperature measures, the same bits on every rank.

    Attributes
    ----------
    energy : float, eV
    drift : (3,) float64 tensor, ASE's units
        The velocity that it is relative to.
    """

    energy: float
    drift: Tensor

    @classmethod
    def of(cls, sums: Tensor, about_centre: bool) -> ThermalMotion:
        """Take it from total kinetic energy, momentum and mass (5,)."""
        kinetic, momentum, mass = float(sums[0]), sums[1:4], float(sums[4])
        if not about_centre:
            return cls(kinetic, torch.zeros_like(momentum))
        of_centre = 0.5 * float((momentum * momentum).sum()) / mass
        return cls(max(kinetic - of_centre, 0.0), momentum / mass)


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

    def local_sums(self) -> Tensor:
        """Return this rank's kinetic energy, momentum (3) and mass: (5,) float64, ASE's units."""
        particles = self.particles
        kinetic, mass = self.local_kinetic_energy(), particles.masses.sum()
        return torch.cat((kinetic[None], particles.momenta.sum(0), mass[None]))

    def thermal_motion(self, about_centre: bool) -> ThermalMotion:
        """Return what of the motion is heat. Collective (one sum).

        Parameters
        ----------
        about_centre : bool
            Whether the motion of the centre of mass is none of it.
        """
        total = self.comm.sum(self.local_sums().cpu())
        return ThermalMotion.of(total, about_centre and self.n_atoms > 1)

    def scale_thermal_motion(self, factor: float, drift: Tensor) -> None:
        """Multiply velocities relative to ``drift`` (3,), ASE's units, by a number."""
        particles = self.particles
        moving = particles.masses[:, None] * drift.to(particles.masses.device)
        particles.columns["momenta"] = moving + (particles.momenta - moving) * factor

    def is_local_heat(self, before: Tensor) -> None:
        """Count the kinetic energy gained since it was ``before`` (this rank's) as heat."""
        self.local_heat = self.local_heat + (self.local_kinetic_energy() - before)


def no_heat(device: torch.device) -> Tensor:
    """Return a local heat of zero."""
    return torch.zeros((), dtype=torch.float64, device=device)

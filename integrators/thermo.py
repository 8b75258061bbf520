"""Energies, temperature and pressure of one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from ase import units
from torch import Tensor

from nvdd_md.evaluation import voigt
from nvdd_md.integrators.meeting import ordered_sum
from nvdd_md.integrators.motion import Motion, ThermalMotion
from nvdd_md.integrators.velocity_verlet import VelocityVerlet
from nvdd_md.system import Surroundings


@dataclass(frozen=True)
class Thermo:
    """The state of a simulation in a few numbers, the same bits on all ranks.

    Attributes
    ----------
    step : int
    time_fs : float
    potential_eV, kinetic_eV, total_eV : float
    conserved_eV : float
        What the equations of motion conserve: the total energy without what thermostats put in.
    temperature_K : float
        ``2 K / (N_f k)``. Where total momentum is conserved, K is relative to the centre of mass
        and N_f = 3 N - 3; else, and for one atom, K is all of it and N_f = 3 N.
    target_temperature_K : float or None
    stress : tuple of 6 floats or None
        Of the potential, eV/Å³, in the order xx yy zz yz xz xy, positive under tension.
    pressure_GPa : float or None
        ``2 K / (3 V) - (xx + yy + zz) / 3``, with the K of the temperature.
    volume_A3 : float or None
        None: without three cell vectors and a periodic axis there is no volume.
    """

    step: int
    time_fs: float
    potential_eV: float
    kinetic_eV: float
    total_eV: float
    conserved_eV: float
    temperature_K: float
    target_temperature_K: float | None
    stress: tuple[float, ...] | None
    pressure_GPa: float | None
    volume_A3: float | None


def measure(
    motion: Motion,
    integrator: VelocityVerlet,
    energy: Tensor,
    virial: Tensor,
    around: Surroundings,
) -> Thermo | None:
    """Add up the parts of all ranks; None if one, or a force, is not finite. Collective.

    One gather.

    Parameters
    ----------
    motion : Motion
    integrator : VelocityVerlet
    energy : () float64, eV
    virial : (3, 3) float64, eV
        This rank's parts.
    around : Surroundings
    """
    row = torch.cat((energy[None], motion.local_sums(), virial.reshape(-1)))
    # Energies may be finite where forces are not: those of two atoms at one point.
    row = torch.where(torch.isfinite(motion.forces).all(), row, torch.nan).cpu()[None]
    table = motion.comm.gather_rows(row).numpy()
    if not np.isfinite(table).all():
        return None
    sums = [ordered_sum(column) for column in table.T]
    potential, kinetic = sums[:2]
    total = potential + kinetic
    thermal = ThermalMotion.of(
        torch.tensor(sums[1:6], dtype=torch.float64, device="cpu"),
        integrator.thermostat.conserves_momentum and motion.n_atoms > 1,
    ).energy
    volume = around.volume
    stress: tuple[float, ...] | None = None
    pressure: float | None = None
    if volume is not None:
        virials = np.array(sums[6:]).reshape(3, 3)
        stress = tuple((voigt(virials) / volume).tolist())
        pressure = (2.0 * thermal / volume - sum(stress[:3])) / 3.0 / units.GPa
    return Thermo(
        step=motion.step,
        time_fs=motion.step * integrator.timestep_fs,
        potential_eV=potential,
        kinetic_eV=kinetic,
        total_eV=total,
        conserved_eV=total + integrator.thermostat.energy(motion) - motion.heat,
        temperature_K=2.0 * thermal / (motion.degrees_of_freedom * units.kB),
        target_temperature_K=integrator.target_K(motion.step),
        stress=stress,
        pressure_GPa=pressure,
        volume_A3=volume,
    )

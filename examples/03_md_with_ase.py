"""Molecular dynamics with ASE: solid argon, a thermostat first and constant energy then.

Random numbers must be the same on all ranks. ASE's own velocities and thermostats see to that:
rank 0 draws, the others get what it drew. The seed only makes the run repeatable.
"""

import numpy as np
from ase import units
from ase.build import bulk
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import Stationary, thermalize_momenta
from ase.md.verlet import VelocityVerlet

from nvdd_md import print0
from nvdd_md.calculators import DistributedCalculator, load_potential

ARGON = {"sigma": 3.4, "epsilon": 0.0104, "rc": 8.5, "smooth": True}  # Å, eV, Å
TEMPERATURE = 40.0  # K
TIMESTEP = 4.0 * units.fs
EVERY = 10  # steps between two lines of the log, and two frames of the trajectory


def main():
    atoms = bulk("Ar", cubic=True, a=5.3) * (3, 3, 3)
    atoms.calc = calc = DistributedCalculator(load_potential("lennard-jones", **ARGON))

    rng = np.random.default_rng(1)
    thermalize_momenta(atoms, temperature_K=2 * TEMPERATURE, rng=rng)
    Stationary(atoms)
    thermostat = {"temperature_K": TEMPERATURE, "friction": 0.005 / units.fs, "fixcm": False}
    Langevin(atoms, TIMESTEP, rng=rng, **thermostat).run(100)

    # Files: ASE opens them on rank 0 only. Give them to the dynamics on all ranks.
    temperatures, energies = [], []
    with VelocityVerlet(
        atoms, TIMESTEP, logfile="md.log", trajectory="md.traj", loginterval=EVERY
    ) as dynamics:
        for _ in dynamics.irun(200):
            # A cached result costs nothing, but keep such lines on all ranks all the same.
            temperatures.append(atoms.get_temperature())
            energies.append(atoms.get_total_energy())

    drift = (energies[-1] - energies[0]) / len(atoms)
    print0(f"mean temperature = {np.mean(temperatures):.6f} K")
    print0(f"total energy = {energies[-1]:.9f} eV")
    print0(f"drift of the energy = {drift:.3e} eV/atom")

    # Where the time went, and whether more ranks would help. All ranks call report().
    print0()
    print0(calc.report())


if __name__ == "__main__":
    main()

"""Molecular dynamics with atoms that stay on their ranks: solid argon, melted and cooled.

The same system as in ``03_md_with_ase.py``. There every rank holds all atoms and ASE moves them;
here each rank moves its own, so that a step costs a rank what its share of the atoms costs.
"""

import numpy as np
from ase.build import bulk

from nvdd_md import print0
from nvdd_md.calculators import load_potential
from nvdd_md.integrators import Langevin, Linear, Simulation, VelocityVerlet

ARGON = {"sigma": 3.4, "epsilon": 0.0104, "rc": 8.5, "smooth": True}  # Å, eV, Å
TIMESTEP_FS = 4.0


def main():
    atoms = bulk("Ar", cubic=True, a=5.3) * (4, 4, 4)
    cooling = Linear(120.0, 40.0, first_step=0, n_steps=200)  # K, by the absolute step
    thermostat = Langevin(temperature_K=cooling, friction_per_ps=5.0, seed=1)
    simulation = Simulation(
        atoms,
        load_potential("lennard-jones", **ARGON),
        VelocityVerlet(TIMESTEP_FS, thermostat),
    )
    simulation.draw_velocities(temperature_K=120.0, seed=1)

    def show(simulation):
        # All ranks call thermo(), which adds up what they have; print0 prints on one.
        now = simulation.thermo()
        print0(f"step {now.step:4d}  T {now.temperature_K:6.1f} K  E {now.total_eV:.6f} eV")

    simulation.attach(show, every=50)
    simulation.run(200)

    # Without a thermostat the energy stays what it is.
    simulation.set_integrator(VelocityVerlet(TIMESTEP_FS))
    before = simulation.thermo()
    simulation.run(200)
    after = simulation.thermo()

    # Only now do all atoms come together, with forces and energy. Positions are unwrapped.
    final = simulation.gather()
    final.write("argon.traj")  # on all ranks; ASE lets rank 0 do it
    print0(f"drift of the energy = {(after.total_eV - before.total_eV) / len(final):.3e} eV/atom")
    print0(f"total energy = {after.total_eV:.9f} eV")
    print0(f"largest force = {np.abs(final.get_forces()).max():.9f} eV/A")
    print0(f"atoms on rank 0 = {simulation.n_owned}")
    print0()
    print0(simulation.report())


if __name__ == "__main__":
    main()

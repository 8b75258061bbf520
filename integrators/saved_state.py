"""From a simulation to what a checkpoint keeps, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.io.jsonio import decode, encode
from torch import Tensor

from nvdd_md.agreement import CALLS, SIMULATE, meet
from nvdd_md.domain import brick_data
from nvdd_md.domain.lattice import Lattice
from nvdd_md.integrators.dynamics import Dynamics
from nvdd_md.integrators.particles import Field, Particles, gather_to_root, scatter
from nvdd_md.integrators.state import SimulationState
from nvdd_md.integrators.submission import Header
from nvdd_md.integrators.velocity_verlet import VelocityVerlet
from nvdd_md.potential import Potential
from nvdd_md.system import check_elements
from nvdd_md.watchdog import Watchdog


@dataclass(frozen=True)
class Saved:
    """A state on its way to all ranks.

    Attributes
    ----------
    header : Header
    scalars : mapping
        As in :class:`SimulationState`.
    particles : Particles
        Divided evenly, not yet on their ranks.
    """

    header: Header
    scalars: Mapping[str, Any]
    particles: Particles

    @property
    def observed(self) -> int:
        """The last step that observers have seen."""
        return int(self.scalars["observed"])


def save(dynamics: Dynamics, observed: int) -> SimulationState | None:
    """Return the state on rank 0, None on others. Collective.

    Parameters
    ----------
    dynamics : Dynamics
    observed : int
        The last step that observers have seen.

    Raises
    ------
    TypeError
        On all ranks, if ``atoms.info`` holds what ASE cannot write as JSON.
    """
    motion, engine, header = dynamics.motion, dynamics.engine, dynamics.header
    info = encode(header.template.info)  # before any message: it fails on all ranks or on none
    columns = {n: c for n, c in motion.particles.columns.items() if n != "ids"}
    gathered = gather_to_root(
        columns, motion.particles.ids, engine.domain.owned_counts, dynamics.comm
    )
    if gathered is None:
        return None
    scalars = {
        "n_atoms": header.n_atoms,
        "step": motion.step,
        "observed": observed,
        "heat_eV": motion.heat,
        "first_conserved_eV": dynamics.first_conserved,
        "cell": header.template.cell.array.tolist(),
        "celldisp": header.template.get_celldisp().tolist(),
        "pbc": header.template.pbc.tolist(),
        "potential_info": dict(header.info),
        "atoms_info": info,
        "fields": [[f.name, str(f.dtype).removeprefix("torch."), f.shape] for f in header.fields],
        "labels": {name: texts.tolist() for name, texts in header.labels.items()},
        "timestep_fs": dynamics.integrator.timestep_fs,
        "thermostat": type(dynamics.integrator.thermostat).__name__,
        "thermostat_state": dynamics.integrator.thermostat.state(),
        "list_lattice": engine.list_lattice.vectors.tolist(),
        "bricks": brick_data.to_data(engine.domain.bricks),
    }
    return SimulationState(scalars, {name: c.cpu().numpy() for name, c in gathered.items()})


def receive(
    state: SimulationState | None,
    potential: Potential,
    integrator: VelocityVerlet,
    watchdog: Watchdog,
) -> Saved:
    """Check rank 0's state and divide its atoms evenly. Collective.

    Raises
    ------
    ValueError
        The same on all ranks: no state, one of another integrator, or of atoms that the potential
        does not know.
    """
    comm = watchdog.comm
    failure: Exception | None = None
    try:
        if comm.rank == 0:
            _check(state, potential, integrator)
    except ValueError as error:
        failure = error
    with watchdog.entry(CALLS[SIMULATE]):
        meet(comm, SIMULATE, bytes(16), failure)
    with watchdog.inside(CALLS[SIMULATE]):
        scalars: Mapping[str, Any] = comm.broadcast_object(
            None if state is None else dict(state.scalars)
        )
        header = _header(scalars)
        columns: dict[str, Tensor] | None = None
        if comm.rank == 0 and state is not None:
            columns = {
                name: torch.from_numpy(np.require(array, requirements=["C", "W"]))
                for name, array in state.arrays.items()
            }
            columns["ids"] = torch.arange(header.n_atoms)
        return Saved(header, scalars, scatter(columns, header.fields, header.n_atoms, comm))


def apply(saved: Saved, dynamics: Dynamics) -> None:
    """Let the dynamics stand where it was saved. Collective.

    For as many ranks as before the list is built from what it was built from then; else the atoms
    are divided anew.
    """
    scalars, engine = saved.scalars, dynamics.engine
    dynamics.take(saved.particles, step=scalars["step"], heat=scalars["heat_eV"])
    dynamics.first_conserved = scalars["first_conserved_eV"]
    dynamics.integrator.thermostat.restore(scalars["thermostat_state"])
    bricks = brick_data.from_data(scalars["bricks"])
    if bricks.n_ranks != dynamics.comm.size:
        dynamics.distribute()
        return
    lattice = Lattice(np.array(scalars["list_lattice"]), np.array(scalars["pbc"], dtype=bool))
    with dynamics.guard():
        dynamics.motion.particles = engine.restore(dynamics.motion.particles, lattice, bricks)


def _check(state: SimulationState | None, potential: Potential, integrator: VelocityVerlet) -> None:
    if state is None:
        raise ValueError("rank 0 must give the state to go on from, got None")
    check_elements(state.arrays["numbers"], potential)
    timestep, thermostat = state.scalars["timestep_fs"], state.scalars["thermostat"]
    if timestep != integrator.timestep_fs:
        raise ValueError(
            f"the state was saved with a timestep of {timestep} fs, the integrator has "
            f"{integrator.timestep_fs} fs"
        )
    if thermostat != type(integrator.thermostat).__name__:
        raise ValueError(
            f"the state was saved with the thermostat {thermostat}, the integrator has "
            f"{type(integrator.thermostat).__name__}"
        )


def _header(scalars: Mapping[str, Any]) -> Header:
    template = Atoms(
        cell=scalars["cell"],
        pbc=scalars["pbc"],
        celldisp=scalars["celldisp"],
        info=decode(scalars["atoms_info"]),
    )
    fields = tuple(
        Field(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in scalars["fields"]
    )
    labels = {name: np.array(texts) for name, texts in scalars["labels"].items()}
    return Header(scalars["n_atoms"], template, scalars["potential_info"], fields, labels)

"""From a stage of a job file to the integrator that makes its steps."""

from __future__ import annotations

from nvdd_md import integrators
from nvdd_md.integrators import Linear, Thermostat, VelocityVerlet
from nvdd_md.jobs import input_models as tables
from nvdd_md.jobs.job import Job, Span

__all__ = ["integrator_of"]


def integrator_of(job: Job, span: Span) -> VelocityVerlet:
    """Return the integrator of one stage.

    Parameters
    ----------
    job : Job
    span : Span
        One of ``job.spans``; ramps begin and end with it.

    Raises
    ------
    ValueError
        For a thermostat that is not known here.
    """
    return VelocityVerlet(job.dynamics.timestep_fs, _thermostat(job, span))


def _thermostat(job: Job, span: Span) -> Thermostat | None:
    table = span.stage.thermostat
    match table:
        case tables.NoThermostat():
            return None
        case tables.Langevin():
            target = _target(table.temperature_K, span)
            return integrators.Langevin(target, table.friction_per_ps, job.seed)
        case tables.VelocityRescaling():
            target = _target(table.temperature_K, span)
            return integrators.VelocityRescaling(target, table.damping_fs, job.seed)
        case tables.NoseHooverChain():
            target = _target(table.temperature_K, span)
            return integrators.NoseHooverChain(target, table.damping_fs, table.chain_length)
    raise ValueError(f"there is no thermostat for {table!r}")


def _target(target: float | tables.Ramp, span: Span) -> Linear:
    if isinstance(target, tables.Ramp):
        return Linear(target.start, target.end, span.first, span.last - span.first)
    return Linear(target, target, span.first, 0)

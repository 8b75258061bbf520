"""Initial momenta on several ranks: those of one rank, some ranks without atoms."""

import math

import pytest
import torch
from ase import units

from nvdd_md.comm import SerialCommunicator
from nvdd_md.integrators.initial_velocities import (
    maxwell_boltzmann,
    remove_momentum,
    remove_rotation,
    scale_to_temperature,
)

FLOAT = torch.float64
N = 400


def system() -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions and masses, known to all ranks."""
    generator = torch.Generator().manual_seed(3)
    positions = torch.randn((N, 3), generator=generator, dtype=FLOAT) * 7.0 + 40.0
    masses = torch.rand(N, generator=generator, dtype=FLOAT) * 100.0 + 1.0
    return positions, masses


def rows_of(comm, spread: str) -> torch.Tensor:
    """Return the ids of this rank's atoms, in no order."""
    generator = torch.Generator().manual_seed(comm.size)
    owners = torch.randint(comm.size, (N,), generator=generator)
    if spread == "idle rank":
        owners[owners == 1] = 0
    elif spread == "all on the last":
        owners[:] = comm.size - 1
    order = torch.randperm(N, generator=generator)
    return order[owners[order] == comm.rank]


def functions(comm, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the result of each function for some atoms, the last one of all in turn."""
    positions, masses = (whole[rows] for whole in system())
    drawn = maxwell_boltzmann(rows, masses, 300.0, seed=2**40 + 1)
    drifting = drawn + masses[:, None] * torch.tensor([0.1, -0.2, 0.3], dtype=FLOAT)
    at_rest = remove_momentum(drifting, masses, comm)
    still = remove_rotation(positions, at_rest, masses, comm)
    scaled = scale_to_temperature(still, masses, 300.0, 3 * N - 6, comm)
    return {"drawn": drawn, "at rest": at_rest, "still": still, "scaled": scaled}


@pytest.mark.parametrize("spread", ["even", "idle rank", "all on the last"])
def test_as_on_one_rank(comm, spread):
    rows = rows_of(comm, spread)
    mine = functions(comm, rows)
    reference = functions(SerialCommunicator(), torch.arange(N))
    assert torch.equal(mine["drawn"], reference["drawn"][rows])
    for name, momenta in mine.items():
        torch.testing.assert_close(momenta, reference[name][rows], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spread", ["even", "idle rank", "all on the last"])
def test_the_whole_is_at_rest_at_the_temperature(comm, spread):
    rows = rows_of(comm, spread)
    positions, masses = (whole[rows] for whole in system())
    momenta = functions(comm, rows)["scaled"]
    twice_kinetic = (momenta**2 / masses[:, None]).sum()
    angular = torch.linalg.cross(positions, momenta).sum(0)
    total = comm.sum(torch.cat((momenta.sum(0), angular, twice_kinetic[None])))
    assert total[:6].abs().max() < 1e-9
    assert float(total[6]) / ((3 * N - 6) * units.kB) == pytest.approx(300.0, rel=1e-13)


def test_what_is_taken_off_has_the_same_bits_on_all_ranks(comm):
    """The ranks' sums differ, and one atom, the same on all ranks, shows what they agree on."""
    rows = rows_of(comm, "even")
    positions, masses = system()
    rows = torch.cat((torch.tensor([0]), rows[rows != 0]))
    momenta = maxwell_boltzmann(rows, masses[rows], 300.0, 1) + 1.0
    results = (
        remove_momentum(momenta, masses[rows], comm)[0],
        remove_rotation(positions[rows], momenta, masses[rows], comm)[0],
        scale_to_temperature(momenta, masses[rows], 200.0, N, comm)[0],
    )
    bits = [[x.hex() for x in result.tolist()] for result in results]
    assert comm.gather_objects(bits) == [bits] * comm.size


def test_number_of_sums(comm):
    rows = rows_of(comm, "even")
    positions, masses = (whole[rows] for whole in system())
    momenta = maxwell_boltzmann(rows, masses, 300.0, 1)
    before = comm.traffic.snapshot()
    maxwell_boltzmann(rows, masses, 300.0, 1)
    assert comm.traffic == before
    for n_sums, call in (
        (1, lambda: remove_momentum(momenta, masses, comm)),
        (2, lambda: remove_rotation(positions, momenta, masses, comm)),
        (1, lambda: scale_to_temperature(momenta, masses, 300.0, 3 * N, comm)),
    ):
        before = comm.traffic.snapshot()
        call()
        expected = n_sums if comm.size > 1 else 0
        assert (comm.traffic - before).collectives == expected


def test_all_ranks_refuse_what_only_one_could_see(comm):
    """The ranks' atoms move or not; only the sum decides, and all end the same way."""
    masses = torch.ones(2, dtype=FLOAT)
    momenta = torch.zeros((2, 3), dtype=FLOAT)
    with pytest.raises(ValueError, match="cannot be scaled"):
        scale_to_temperature(momenta, masses, 300.0, 6, comm)
    if comm.rank == 0:
        momenta = momenta + math.inf
    with pytest.raises(ValueError, match="cannot be scaled"):
        scale_to_temperature(momenta, masses, 300.0, 6, comm)
    if comm.rank == 0:
        momenta = torch.ones((2, 3), dtype=FLOAT)
    scaled = scale_to_temperature(momenta, masses, 300.0, 6, comm)
    assert bool(scaled.any()) == (comm.rank == 0)

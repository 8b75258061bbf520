"""A MACE model from a file, compared with MACE's own calculator on one process.

``python 05_mace_from_file.py model.pt`` takes a model of yours; without a file, a small one with
random weights is made, which is as good for a comparison and useless for anything else. Model
files are pickles, and loading a pickle runs the code in it: open only files you trust.
"""

import sys
from tempfile import TemporaryDirectory

import numpy as np
import torch
from ase.build import bulk

from nvdd_md import print0
from nvdd_md.calculators import DistributedCalculator, load_potential
from nvdd_md.comm import job_rank

DTYPE = "float64"


def main():
    if len(sys.argv) > 1:
        compare(sys.argv[1])
        return
    with TemporaryDirectory() as folder:
        path = f"{folder}/random.model"
        if job_rank() == 0:  # the only rank that opens the file later
            save_random_model(path)
        compare(path)


def compare(path):
    atoms = bulk("Si", cubic=True, a=5.431) * (2, 2, 2)
    atoms.rattle(0.05, seed=0)
    atoms.calc = DistributedCalculator(load_potential(f"mace:{path}", dtype=DTYPE))
    energy, forces = atoms.get_potential_energy(), atoms.get_forces()
    print0(f"energy = {energy:.9f} eV")
    print0(f"largest force component = {np.abs(forces).max():.9f} eV/Å")

    if job_rank() == 0:  # MACE's own calculator knows nothing of ranks
        from mace.calculators import MACECalculator

        atoms.calc = MACECalculator(model_paths=path, device="cpu", default_dtype=DTYPE)
        energy_difference = abs(energy - atoms.get_potential_energy())
        force_difference = np.abs(forces - atoms.get_forces()).max()
        print(f"difference of energies = {energy_difference:.1e} eV")
        print(f"largest difference of forces = {force_difference:.1e} eV/Å")


def save_random_model(path):
    from mace.modules import ScaleShiftMACE, interaction_classes

    from e3nn import o3  # isort: skip - after mace, which prepares torch for it

    torch.manual_seed(0)
    block = interaction_classes["RealAgnosticResidualInteractionBlock"]
    model = ScaleShiftMACE(
        r_max=5.0,
        num_bessel=8,
        num_polynomial_cutoff=5,
        max_ell=2,
        interaction_cls=block,
        interaction_cls_first=block,
        num_interactions=2,
        num_elements=2,
        atomic_numbers=[8, 14],
        atomic_energies=np.array([-4.0, -5.0]),  # eV
        hidden_irreps=o3.Irreps("16x0e + 16x1o"),
        MLP_irreps=o3.Irreps("16x0e"),
        avg_num_neighbors=30.0,
        correlation=3,
        gate=torch.nn.functional.silu,
        radial_MLP=[32, 32],
        atomic_inter_scale=400.0,  # random weights alone give tiny forces
        atomic_inter_shift=0.0,
    )
    torch.save(model.double(), path)


if __name__ == "__main__":
    main()

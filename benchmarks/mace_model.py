"""Writes a full-size MACE model with random weights: ``python -m benchmarks.mace_model FILE``.

It has the size of MACE-MP-0 medium (4.7 million parameters, 89 elements), so it costs the same,
and needs no download. Its energies mean nothing; they are scaled so that forces are tens of eV/Å.
"""

import sys
import warnings

import numpy as np
import torch

with warnings.catch_warnings(action="ignore"):
    from mace import modules  # before e3nn, which it prepares torch for

from e3nn import o3

INTERACTION = modules.RealAgnosticResidualInteractionBlock
N_ELEMENTS = 89


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = modules.ScaleShiftMACE(
        r_max=6.0,
        num_bessel=10,
        num_polynomial_cutoff=5,
        max_ell=3,
        interaction_cls=INTERACTION,
        interaction_cls_first=INTERACTION,
        num_interactions=2,
        num_elements=N_ELEMENTS,
        hidden_irreps=o3.Irreps("128x0e + 128x1o"),
        MLP_irreps=o3.Irreps("16x0e"),
        atomic_energies=np.zeros(N_ELEMENTS),
        avg_num_neighbors=61.9647,
        atomic_numbers=list(range(1, N_ELEMENTS + 1)),
        correlation=3,
        gate=torch.nn.functional.silu,
        radial_MLP=[64, 64, 64],
        radial_type="bessel",
        atomic_inter_scale=400.0,
        atomic_inter_shift=0.0,
    )
    torch.save(model, sys.argv[1])


if __name__ == "__main__":
    main()

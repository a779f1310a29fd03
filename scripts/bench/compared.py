"""How often `train compare` errs, and how many pairs it needs, on simulated differences: tables of docs/compare.md.

    python scripts/bench/compared.py            print the tables (five minutes)
    python scripts/bench/compared.py --write    write them into the page

Each simulated comparison is looked at after every pair, up to 100 pairs, and ends at its first verdict.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from trainer_cli.addons.compare.confidence import PairedVerdict, decide_in_order  # noqa: E402

PAGE = ROOT / "docs" / "compare.md"
BEGIN, END = "<!-- by scripts/bench/compared.py -->\n", "<!-- end -->"
TRIALS, MOST = 5000, 100
LOOKS = (5, 10, 30, 100)
EFFECTS = (0.5, 1.0, 2.0, 4.0, 10.0)
Draw = Callable[[random.Random], float]


def draw_normal(mean: float, chance: random.Random) -> float:
    """A normal distribution with a standard deviation of 1."""
    return mean + chance.gauss()


def draw_t5(chance: random.Random) -> float:
    """Student's t with 5 degrees of freedom."""
    return chance.gauss() / math.sqrt(sum(chance.gauss() ** 2 for _ in range(5)) / 5)


EQUALS: dict[str, Draw] = {
    "normal": lambda chance: chance.gauss(),
    "heavy tails: Student's t, 5 degrees of freedom": draw_t5,
    "skewed metrics: both lognormal": lambda chance: math.exp(chance.gauss()) - math.exp(chance.gauss()),
    "coarse metrics: whole numbers, two of three 0": lambda chance: float(round(0.5 * chance.gauss())),
    "slightly skewed: lognormal, sigma 0.5": lambda chance: math.exp(0.5 * chance.gauss()) - math.exp(0.125),
    "skewed: exponential": lambda chance: chance.expovariate(1) - 1,
    "strongly skewed: lognormal, sigma 1": lambda chance: math.exp(chance.gauss()) - math.exp(0.5),
    "rare outliers: one of ten is larger by 5": lambda chance: chance.gauss() + 5 * (chance.random() < 0.1) - 0.5,
    "rarer outliers: one of twenty is larger by 10": lambda chance: (
        chance.gauss() + 10 * (chance.random() < 0.05) - 0.5
    ),
}
"""Differences whose mean is 0."""


def count_decided(draw: Draw, trials: int, seed: str) -> list[int]:
    """Of each simulated comparison, the pairs after which it gave a verdict; more than `MOST` without one."""
    chance = random.Random(seed)
    counts = []
    for _ in range(trials):
        answer, count = decide_in_order([draw(chance) for _ in range(MOST)], 0.0)
        counts.append(MOST + 1 if answer is PairedVerdict.not_decided else count)
    return counts


def t_quantile(degrees: int) -> float:
    """The value that |t| exceeds with a probability of 5 %, by integration."""
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    area, t, step = 0.0, 0.0, 1e-4
    while area < 0.475:
        area += step * math.exp(log_scale - (degrees + 1) / 2 * math.log1p((t + step / 2) ** 2 / degrees))
        t += step
    return t


def power_of_t_test(effect: float, pairs: int, trials: int, seed: str) -> float:
    """The share of t tests, with a number of pairs that was fixed before, that find a difference."""
    chance, limit, found = random.Random(seed), t_quantile(pairs - 1), 0
    for _ in range(trials):
        values = [effect + chance.gauss() for _ in range(pairs)]
        mean = math.fsum(values) / pairs
        spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (pairs - 1))
        found += abs(mean) * math.sqrt(pairs) > limit * spread
    return found / trials


def make_tables(trials: int = TRIALS) -> str:
    """Both tables as Markdown."""
    lines = [f"False verdicts in {trials:,} comparisons of equals, ever up to that number of pairs:", ""]
    lines += [f"| differences | {' | '.join(map(str, LOOKS))} |", f"|---|{'--:|' * len(LOOKS)}"]
    for name, draw in EQUALS.items():
        counts = count_decided(draw, trials, name)
        cells = [f"{sum(count <= pairs for count in counts) / trials:.1%}" for pairs in LOOKS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", f"Differences that are found, in {trials:,} comparisons of normal differences, and in brackets by a"]
    lines += ["t test for which that number of pairs was fixed before, and which is looked at once:", ""]
    lines += [f"| mean, in standard deviations | {' | '.join(map(str, LOOKS))} |", f"|---|{'--:|' * len(LOOKS)}"]
    for effect in EFFECTS:
        counts = count_decided(partial(draw_normal, effect), trials, f"effect {effect}")
        shares = [sum(count <= pairs for count in counts) / trials for pairs in LOOKS]
        fixed = [power_of_t_test(effect, pairs, trials // 4, f"fixed {effect}") for pairs in LOOKS]
        cells = [f"{share:.0%} ({other:.0%})" for share, other in zip(shares, fixed, strict=True)]
        lines.append(f"| {effect:g} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the tables, or write them into the page."""
    tables = make_tables()
    if "--write" not in sys.argv[1:]:
        print(tables)
        return
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{tables}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()

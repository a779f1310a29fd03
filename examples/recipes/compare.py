"""Train recipes with `train` and by their hand-written loops, from the same start on the same batches, and compare.

python compare.py                 all recipes, 60 steps each
python compare.py vae ddpm        these
"""

import importlib
import subprocess
import sys
from pathlib import Path

import torch

STEPS = 60


def command(name: str, steps: int) -> list[str]:
    """The arguments of `train` that record a recipe."""
    record = f"{{_target_: record.Record, file: {name}.pt}}"
    return ["fit", name, f"run_dir=runs/compare_{name}", f"+callbacks.record={record}",
            f"loop.hard_stop={steps}", "loop.eval_interval=null", "checkpoint.enabled=false"]  # fmt: skip


def compare(name: str) -> tuple[float, float]:
    """The largest differences of the losses and of the final weights between both trainings of a recorded recipe."""
    record = torch.load(f"{name}.pt", weights_only=False)
    torch.set_rng_state(record["random"])
    model = record["model"]
    losses = importlib.import_module(f"originals.{name}").train(model, record["batches"])
    of_loss = max(abs(float(a) - float(b)) for a, b in zip(losses, record["losses"], strict=True))
    state = model.state_dict()
    of_weight = max(float((state[key].double() - value.double()).abs().max()) for key, value in record["end"].items())
    return of_loss, of_weight


def main() -> None:
    names = sys.argv[1:] or sorted(path.stem for path in Path("configs/experiment").glob("*.yaml"))
    for name in names:
        subprocess.run(["train", *command(name, STEPS)], check=True, stderr=subprocess.DEVNULL)
        of_loss, of_weight = compare(name)
        print(f"{name:12} losses differ by {of_loss:.1e}, weights by {of_weight:.1e} after {STEPS} steps")


if __name__ == "__main__":
    main()

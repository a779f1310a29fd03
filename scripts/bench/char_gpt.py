"""`train fit char_gpt` beside a hand-written loop of the same model, over the same steps and evaluations.

    python scripts/bench/char_gpt.py TEXT [--seeds 0 1 2] [--steps 2000]

Both run as whole processes, in turn: for each seed first one, then the other, and the next seed the other way
round. Each evaluates on the whole held-out tail every 500 steps and saves at the same steps: the loop with
`torch.save`, which promises nothing on a crash. Prints a line of JSON a run, then a table.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from timing import environment


def by_hand(text: str, seed: int, steps: int, folder: Path) -> float:
    """A plain training loop as one would write it; returns the last validation loss, in nats a character."""
    import torch
    from torch.nn import functional

    from trainer_cli.addons.text.gpt import GPT

    torch.manual_seed(seed)
    content = Path(text).read_text(encoding="utf-8")
    table = {character: index for index, character in enumerate(sorted(set(content)))}
    tokens = torch.tensor([table[character] for character in content])
    split = len(tokens) - round(len(tokens) * 0.1)
    train, val, context, batch_size = tokens[:split], tokens[split:], 64, 12
    model = GPT(len(table), context, layers=4, heads=4, width=128, bias=False)
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True)

    def evaluate() -> float:
        model.eval()
        windows = (len(val) - 1) // context
        x = val[: windows * context].view(windows, context)
        y = val[1 : windows * context + 1].view(windows, context)
        total = 0.0
        with torch.no_grad():
            for start in range(0, windows, batch_size):
                logits = model.logits(x[start : start + batch_size]).flatten(0, 1)
                total += functional.cross_entropy(
                    logits, y[start : start + batch_size].flatten(), reduction="sum"
                ).item()
        model.train()
        return total / (windows * context)

    loss_value = math.nan
    for step in range(steps):
        if step < 100:
            rate = (step + 1) / 101
        else:
            rate = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 100) / (steps - 100)))
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * rate
        starts = torch.randint(len(train) - context, (batch_size,))
        x = torch.stack([train[start : start + context] for start in starts])
        y = torch.stack([train[start + 1 : start + context + 1] for start in starts])
        loss = functional.cross_entropy(model.logits(x).flatten(0, 1), y.flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 50 == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", file=sys.stderr)
        if (step + 1) % 500 == 0 or step + 1 == steps:
            loss_value = evaluate()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"{step + 1}.pt")
    return loss_value


def timed(kind: str, text: str, seed: int, steps: int) -> dict[str, Any]:
    """Wall time of a whole process in seconds, and its last validation loss."""
    with tempfile.TemporaryDirectory() as folder:
        if kind == "train":
            command = [
                sys.executable, "-m", "trainer_cli", "fit", "char_gpt", f"data.path={text}",
                f"seed={seed}", f"loop.max_duration={steps}", "run_dir=run",
            ]  # fmt: skip
        else:
            command = [sys.executable, __file__, text, "--by-hand", str(seed), "--steps", str(steps)]
        began = time.perf_counter()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment())
        wall_s = time.perf_counter() - began
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        if kind == "train":
            lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
            loss = json.loads(lines[-1])["val/loss"]
        else:
            loss = float(done.stdout.strip().splitlines()[-1])
    return {"kind": kind, "seed": seed, "steps": steps, "wall_s": round(wall_s, 2), "val_loss": round(loss, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=lambda path: str(Path(path).resolve()))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--by-hand", type=int, metavar="SEED", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.by_hand is not None:
        print(by_hand(args.text, args.by_hand, args.steps, Path.cwd()))
        return
    rows: list[dict[str, Any]] = []
    for turn, seed in enumerate(args.seeds):
        kinds = ("train", "by hand") if turn % 2 == 0 else ("by hand", "train")
        for kind in kinds:
            rows.append(timed(kind, args.text, seed, args.steps))
            print(json.dumps(rows[-1]), flush=True)
    print("\n| | wall s (median) | validation loss (mean) |\n|---|---|---|")
    for kind in ("train", "by hand"):
        own = [row for row in rows if row["kind"] == kind]
        print(f"| {kind} | {median(row['wall_s'] for row in own):.1f} | {mean(row['val_loss'] for row in own):.4f} |")
    pairs = zip(*([r["wall_s"] for r in rows if r["kind"] == k] for k in ("train", "by hand")), strict=True)
    print(f"\nwall time, train over by hand, pair by pair (median): {median(a / b for a, b in pairs):.3f}")


if __name__ == "__main__":
    main()

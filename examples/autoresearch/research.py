"""Let a command edit network.py, and keep what `train compare` finds better than the best so far.

    trials/3/network.py     what is tried, and idea.txt beside it
    trials/3/answer.json    what `train compare --json` has answered

A folder or file is written under another name and renamed, so that a kill leaves all of it or nothing. The next call
goes on: it asks only for edits that are missing, and `train` resumes its own runs.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FILE, TRIALS, EXPERIMENT = Path("network.py"), Path("trials"), "digits_net"
IN_USE, STOPPED = (4, 68), (75, 130)
"""Exit codes of `train fit` and `train compare`: another process trains there; a signal has ended it."""


def train(*words: str) -> dict:
    """The answer of a command of `train`."""
    while True:
        done = subprocess.run(["train", *words, "--json"], stdout=subprocess.PIPE, text=True)
        if done.returncode < 0 or done.returncode in STOPPED:
            sys.exit(75)
        if done.returncode not in IN_USE:
            return json.loads(done.stdout)
        # What a killed call has started may train on for a moment.
        time.sleep(0.2)


def write(file: Path, text: str) -> None:
    """Replace a file as a whole."""
    part = file.with_name(f".{file.name}")
    part.write_text(text)
    os.replace(part, file)


def propose(command: list[str], number: int, best: int) -> None:
    """Make the folder of a trial: an edited copy of the best file, and the idea."""
    with tempfile.TemporaryDirectory(dir=TRIALS, prefix=".") as folder:
        draft = Path(folder) / "draft"
        draft.mkdir()
        shutil.copy(TRIALS / str(best) / FILE if number else FILE, draft / FILE)
        words = [*command, draft / FILE, TRIALS] if number else ["echo", "the beginning"]
        idea = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        (draft / "idea.txt").write_text(idea)
        draft.rename(TRIALS / str(number))


def describe(answer: dict) -> str:
    """The end of a trial in a few words."""
    if answer.get("error"):
        return f"failed: {answer['error'].splitlines()[0]}"
    if "verdict" not in answer:
        return answer["status"]
    outcome = "kept" if answer["verdict"] == "better" else "discarded"
    return f"{outcome}: {answer['verdict']} by {answer['mean']:.3g} after {len(answer['pairs'])} pairs"


def main() -> None:
    """Make the trials that are missing, and print all of them: below each the edits of it."""
    parser = argparse.ArgumentParser(description="Edit, compare, keep or discard.")
    parser.add_argument("trials", type=int, help="the number of edits, with those of earlier calls")
    parser.add_argument("--propose", default=f"{shlex.quote(sys.executable)} propose.py", help="the command that edits")
    parser.add_argument("--budget", default="40steps", help="the length of each run")
    parser.add_argument("--seeds", default="12", help="the most pairs of a comparison")
    args = parser.parse_args()
    TRIALS.mkdir(exist_ok=True)
    best, run, depth = 0, "runs/trial-0", 0
    for number in range(args.trials + 1):
        trial = TRIALS / str(number)
        if not trial.exists():
            propose(shlex.split(args.propose), number, best)
        if not (trial / "answer.json").exists():
            write(FILE, (trial / FILE).read_text())
            if number:
                limits = ["--budget", args.budget, "--seeds", args.seeds]
                answer = train("compare", run, EXPERIMENT, "--name", f"trial-{number}", *limits)
            else:
                answer = train("fit", EXPERIMENT, "name=trial-0", f"loop.max_duration={args.budget}")
            write(trial / "answer.json", json.dumps(answer))
        answer = json.loads((trial / "answer.json").read_text())
        idea, indent = (trial / "idea.txt").read_text(), "  " * (depth + (number > 0))
        print(f"{indent}{number} {idea} - {describe(answer)}", flush=True)
        if answer.get("verdict") == "better":
            best, run, depth = number, answer["pairs"][0]["b_run"], depth + 1
    write(FILE, (TRIALS / str(best) / FILE).read_text())


if __name__ == "__main__":
    main()

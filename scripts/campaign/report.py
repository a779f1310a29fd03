"""RELIABILITY.md and the section of the README, written from docs/reliability/results.json."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from campaign.fault_class import FaultClass, Size
from campaign.runner import State
from campaign.verdict import Verdict

PAGE, README, RESULTS = Path("RELIABILITY.md"), Path("README.md"), Path("docs/reliability/results.json")
_HEADING, _NEXT = "## Reliability\n", ("## Benchmarks\n", "## Documentation\n")
_SHORT_TITLES = ("Power cut", "Flipped bit", "Truncated file")
_SHORT_NAMES = ("torch.save", "safetensors", "DCP", "Lightning", "HF Trainer")
PROMISES = "docs/how-checkpoints-work.md#guarantees"
Report = dict[str, Any]
"""commit, size, machine, rows. Of a row: the fields of its class, and asked, trials, announced, seconds, most_s,
skipped, verdicts: word -> count, failures: trial, verdict, detail."""
Results = dict[str, Report]
"""`train`: the first table, `contenders`: the second; what was not run yet is absent."""


def make_report(classes: Iterable[FaultClass], state: State, machine: dict[str, Any]) -> Report:
    """What a page needs of a campaign."""
    size = Size(state["size"])
    rows = [_row(fault, state["classes"][fault.key], size) for fault in classes if size in fault.counts]
    return {"commit": state["commit"], "size": state["size"], "machine": machine, "rows": rows}


def _row(fault: FaultClass, state: State, size: Size) -> dict[str, Any]:
    outcomes = sorted((int(number), *outcome) for number, outcome in state["trials"].items())
    counts = Counter(verdict for _, verdict, *_ in outcomes)
    return {
        "key": fault.key,
        "title": fault.title,
        "what": fault.what,
        "promises": fault.promises,
        "contender": fault.contender,
        "asked": state["count"] or fault.counts[size],
        "trials": len(outcomes),
        "announced": sum(announced for _, _, _, announced, _ in outcomes),
        "seconds": round(state["seconds"]),
        "measures": fault.measures,
        "most_s": max((measured_s for *_, measured_s in outcomes), default=0.0),
        "skipped": state["skipped"],
        "verdicts": {verdict: counts[verdict] for verdict in Verdict},
        "failures": [
            {"trial": number, "verdict": verdict, "detail": detail}
            for number, verdict, detail, *_ in outcomes
            if verdict != Verdict.passed
        ],
    }


def write(results: Results, root: Path) -> None:
    """Write the results, the page, and the section of the README."""
    (root / RESULTS).parent.mkdir(parents=True, exist_ok=True)
    (root / RESULTS).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (root / PAGE).write_text(page(results), encoding="utf-8")
    readme = root / README
    readme.write_text(with_section(readme.read_text(encoding="utf-8"), results), encoding="utf-8")


def read(root: Path) -> Results:
    """The results of earlier campaigns."""
    path = root / RESULTS
    results: Results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return results


def page(results: Results) -> str:
    """RELIABILITY.md."""
    parts = [_INTRODUCTION]
    if ours := results.get("train"):
        parts += ["## Faults of `train`", _about(ours), table(ours["rows"])]
        if failed := failed_trials(ours):
            parts += ["### Trials that did not pass", "\n".join(failed)]
        parts += ["## The faults", "\n".join(_done(ours["rows"]))]
    if contenders := results.get("contenders"):
        versions = contenders["machine"].get("versions", {})
        parts += ["## The same faults, other savers", _about(contenders, " --peers")]
        parts += [contender_table(contenders["rows"], versions)]
        parts += [_ABOUT_CONTENDERS, "\n".join(_done(contenders["rows"]))]
    return "\n\n".join(parts) + "\n"


_MEANINGS = {
    Verdict.passed: "the newest valid checkpoint is no older than the last announced one, its tensors are those of the "
    "undisturbed run at that step, and the run ends with the weights, records and files of the undisturbed run",
    Verdict.hard_fail: "the run cannot continue, fails without a clear error, or hangs",
    Verdict.diverged: "the run continues, but its weights or records differ from those of the undisturbed run",
    Verdict.lost: "an announced checkpoint or a foreign file is gone, or a step is lost or recorded twice",
}
_INTRODUCTION = f"""# Reliability

Faults are injected into real runs, and each run is compared with the same run without faults. A trial is one fault, or
several in a row, and has one verdict:

| verdict | meaning |
| --- | --- |
{chr(10).join(f"| {verdict} | {meaning} |" for verdict, meaning in _MEANINGS.items())}

A checkpoint is announced once `committed step N` was printed. [L1 to L6]({PROMISES}) are the promises that the faults
test. With no failure in N trials, the probability of one in a trial is below 3/N (95 % confidence).

```sh
scripts/faults quick                         # at most 3 minutes on two cores
scripts/faults full                          # at most 10 minutes; writes this page
scripts/faults nightly                       # at most an hour; writes this page
scripts/faults --peers                       # the other savers, in their own environment
scripts/faults full --only kills --trial 17  # repeat one trial
```

The same command continues an interrupted campaign."""


_ABOUT_CONTENDERS = """All run the same training and are resumed as their documentation says
([peer_savers.py](scripts/campaign/peers/peer_savers.py)). torch.save, safetensors, DCP and torch_checkpointing have no
training loop, so ours calls them; `train`, Lightning and HF Trainer are used with their own. A save counts as announced
once its call has returned, with `DCP, async` once its future is done. HARD_FAIL includes a start that ends with an
error that names the damaged file: no older checkpoint is used, so the run does not continue by itself. PASS includes
damage that changes no weight, such as a flipped bit in a file that is not read."""


def _about(report: Report, flags: str = "") -> str:
    machine = report["machine"]
    facts = [f"{machine['processors']} cores", f"{machine['memory, GiB']} GiB", machine["file system"]]
    facts += [f"{name} {machine[name]}" for name in ("python", "torch") if name in machine]
    seconds = sum(row["seconds"] for row in report["rows"])
    minutes = f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds} s"
    return (
        f"`scripts/faults {report['size']}{flags}`, {machine['date']}, commit {report['commit']}, {minutes} on "
        f"{machine['system']}, {', '.join(facts)}."
    )


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each fault of `train`."""
    lines = [
        "| fault | trials | " + " | ".join(Verdict) + " | announced checkpoints | promises |",
        "| --- |" + " ---: |" * (len(Verdict) + 2) + " --- |",
    ]
    for row in rows:
        if row["skipped"]:
            lines.append(f"| {row['title']} | skipped: {row['skipped']} |" + " |" * (len(Verdict) + 1) + " |")
            continue
        counts = " | ".join(f"{row['verdicts'][verdict]:,}" for verdict in Verdict)
        announced = f"{row['announced']:,}" if row["announced"] else ""
        lines.append(f"| {_titled(row)} | {_trials(row)} | {counts} | {announced} | {row['promises']} |")
    total = {verdict: sum(row["verdicts"][verdict] for row in rows) for verdict in Verdict}
    trials = sum(row["trials"] for row in rows)
    counts = " | ".join(f"**{count:,}**" for count in total.values())
    announced = sum(row["announced"] for row in rows)
    lines.append(f"| **all** | **{trials:,}** | {counts} | **{announced:,}** | |")
    return "\n".join(lines)


def _titled(row: dict[str, Any]) -> str:
    """The title, with the most that was measured."""
    return f"{row['title']}; {row['measures']} at most {row['most_s']:.2f} s" if row["measures"] else str(row["title"])


def _trials(row: dict[str, Any]) -> str:
    """How many; with how many were asked for where the time ended before."""
    return f"{row['trials']:,}" if row["trials"] >= row["asked"] else f"{row['trials']:,} of {row['asked']:,}"


def short_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of a table with the trials that passed: for three faults, by `train` and by other savers."""
    lines = ["| | `train` | others |", "| --- | --- | --- |"]
    for title in _SHORT_TITLES:
        cells = {row["contender"]: row for row in rows if row["title"] == title and row["trials"]}
        if (ours := cells.pop("train", None)) is not None:
            others = [f"{name} {cells[name]['verdicts'][Verdict.passed]}" for name in _SHORT_NAMES if name in cells]
            passed = ours["verdicts"][Verdict.passed]
            lines.append(f"| {title} | {passed} of {ours['trials']} | {' · '.join(others)} |")
    return lines


def contender_table(rows: Sequence[dict[str, Any]], versions: Mapping[str, str]) -> str:
    """One line for each contender, with its version, and one column for each fault."""
    titles = list(dict.fromkeys(row["title"] for row in rows))
    lines = ["| | " + " | ".join(titles) + " |", "| --- |" + " --- |" * len(titles)]
    for contender in dict.fromkeys(row["contender"] for row in rows):
        cells = {row["title"]: _cell(row) for row in rows if row["contender"] == contender}
        version = f" ({versions[contender]})" if contender in versions else ""
        lines.append(f"| {contender}{version} | " + " | ".join(cells.get(title, "") for title in titles) + " |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    if row["skipped"]:
        return f"skipped: {row['skipped']}"
    if not row["trials"]:
        return "not run: no time was left"
    return ", ".join(f"{count} {verdict}" for verdict, count in row["verdicts"].items() if count)


def _done(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is done for each fault, once where several contenders meet it."""
    first = {row["title"]: row for row in reversed(rows)}
    titles = dict.fromkeys(row["title"] for row in rows)
    return [f"- {title} (`{first[title]['key']}`): {first[title]['what']}" for title in titles]


def failed_trials(report: Report) -> list[str]:
    """The trials that did not pass, with the command that repeats each."""
    return [
        f"- {failure['verdict']}: `scripts/faults {report['size']} --only {row['key']} --trial {failure['trial']}`: "
        + " ".join(failure["detail"].split())[:500]
        for row in report["rows"]
        for failure in row["failures"]
    ]


def with_section(readme: str, results: Results) -> str:
    """The README with one row on the campaign of `train`, in front of the benchmarks or the documentation."""
    report = results.get("train")
    if report is None:
        return readme
    rows, contenders = report["rows"], results.get("contenders")
    total = {verdict: sum(row["verdicts"][verdict] for row in rows) for verdict in Verdict}
    cells = " | ".join(f"{count:,}" for count in total.values())
    run = [row for row in rows if not row["skipped"]]
    section = "\n".join([
        _HEADING, "| faults | trials | " + " | ".join(Verdict) + " |", "| --- |" + " ---: |" * (1 + len(Verdict)),
        f"| [{len(run)} kinds]({PAGE}) | {sum(row['trials'] for row in rows):,} | {cells} |", "",
        "In each trial a real run on the CPU is disturbed, for example by `kill -9` at a random moment or by a power",
        "cut, and resumed. PASS: its checkpoints, final weights and records are bit for bit those of the undisturbed",
        "run. [The other words](RELIABILITY.md) are the ways to fail.",
        *([] if contenders is None else ["", "The same faults with other savers, trials passed:", ""]),
        *([] if contenders is None else short_table(contenders["rows"])),
    ])  # fmt: skip
    after = next(heading for heading in _NEXT if heading in readme)
    before, _, rest = readme.partition(after)
    before = before.partition(_HEADING)[0]
    return f"{before}{section}\n\n{after}{rest}"

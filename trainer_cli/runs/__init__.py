"""What a run directory holds: how a training writes it, and how everybody reads it.

`RunDir` is the directory of one run: its files, its lock, its id, and the record of each attempt (the table at the top
of `run_dir` has the files). `Run` reads a run from its files, while it trains or after: `look` is its state now
(`RunView`), `record` everything that it did (`RunRecord`), `until` the run as an attempt left it; `RunsBelow` finds and
follows all runs below a folder.
`BestSettings` is what a run's config says about which value, and so which checkpoint or run, is best.

It promises:
- One process trains in a directory: `RunDir.lock` refuses a second one and names the first.
- A directory without `config.yaml` was never a run; the file is written last, and every file is replaced as a whole or
  grows by lines.
- Reading never writes, never waits for the lock, and imports no torch; numpy only for a record.
- What is damaged, half-written or written by another program is left out and named in `problems`, and the rest is read.
- A file is read again only after it has changed, and of a file of lines only those that are new.

It decides nothing about a training: whether and from where a run resumes is decided in `running`.

Begin with `run_dir`, then `run`.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())

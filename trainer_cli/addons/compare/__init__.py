"""`train compare A B`: whether B is better than A, by pairs of runs with the same seed, batches and length.

After each pair the interval of the mean difference is computed anew; the trainings end as soon as it answers. It is
valid while it is looked at after every pair, so that to stop at an answer is no mistake.

It promises:
- The verdict depends on the pairs in the order of their seeds alone: not on `--jobs`, kills, or what else was trained.
- A pair that is finished is not trained again, unless source files of the project have changed since.
- The exit code of a verdict is never that of an error.

Begin with `command.py`, then `pairs.py`; `sides.py` composes A and B, `confidence.py` has the statistics. No other
package takes a name from this one.
"""

"""Find the values of a config that are `auto`, a batch size and a learning rate, by short trials before the first step.

`find_values` makes the trials with objects of its own, which are dropped before those of the training are built: the
training is, bit for bit, that of a config with the numbers that were found. All ranks get the same values. A run finds
a value once and stores it; a resume takes the stored one. `find_batch_size` and `find_learning_rate` (`find.py`) do the
same for a trainer in a program, and undo their trials.

Begin with `decisions.py`; `find.py` has the trials, `trial_memory.py` the memory that a batch may take. No other
package takes a name from this one: what the core asks for is a part in `addon.py`.
"""

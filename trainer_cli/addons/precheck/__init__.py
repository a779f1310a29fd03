"""What can be known before the first step: `train check data`, `train check model` and `train plan --probe`.

The checks build the objects of an experiment as a fit does, look at them in this process, and write nothing: no run
directory is made. What they find are values of `Suspicion`: where, how sure, what, and a cure. They promise no false
alarm for what is certain, and that they say what they could not look at.

Begin with `commands.py`; `data_check.py` looks at samples, `model_check.py` at a model with one batch. `probe.py` times
steps of a training in a process of its own, and leaves nothing either. No other package
takes a name from this one: what the core asks for is a part in `addon.py`.
"""

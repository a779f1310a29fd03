"""`train predict`: the outputs of a model for every sample of a dataset, written to files.

The samples are written in parts, each complete and on the disk before it has its name: a command that was killed
continues with the missing parts. Several processes each write a part of the samples and exchange nothing.

Begin with `predict.py`; `prediction_files.py` has parts and how they are joined, `prediction_writers.py` the formats.
No other package takes a name from this one.
"""

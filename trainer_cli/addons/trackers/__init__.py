"""Loggers that send metrics to other programs: `WandbLogger`, `MlflowLogger` and `TrackioLogger`.

All attempts of a run are one run of the service. Each needs the extra of its name, which is imported when the logger
starts. No other package takes a name from this one.
"""

"""Loggers that send metrics to other programs."""

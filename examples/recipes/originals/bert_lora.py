"""The loop of bert.py: a model of peft is trained as any other."""

from originals.bert import train

__all__ = ["train"]

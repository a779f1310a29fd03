"""Text as data: documents, files of token ids, mixtures of sources, and `GPT` and `lora` for models of text.

A sample is a pure function of the data, the seed and its position: `Text`, `TokenFiles` and `Mixture` can be read from
any position at once, so a resume takes the same time at any step. What was tokenized or packed is a cache that is made
again if it is missing.

Begin with `text.py` for texts, with `tokens.py` for files of token ids; `origin.py` tells where a sample comes from. No
other package takes a name from this one: what others ask for is a part in `addon.py`.
"""

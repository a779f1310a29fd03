"""The components of a config: nodes with `_target_`, what they may name, and the arguments that their targets take.

A node is a mapping with the key `_target_`, the dotted path of a class or function; its other keys are arguments. This
package reads nodes, checks them, and imports their targets; `running/build.py` alone calls a target.

- `check_components` never imports without `imports=True`, so that a config is checked without torch.
- A config that comes from disk is data: `Trust` says which targets it may name. The path is checked before any import,
  which runs code, and the object after it. The user's own config may name anything that Hydra does not block.
- Mistakes are `ConfigError`s with the key where they are (`location`); the file and line are added by `config`.

Begin with `nodes.py`; then `bind.py` for arguments, `targets.py` for imports and trust.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())

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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.components.bind import check_components as check_components
    from trainer_cli.components.nodes import (
        EVALUATED as EVALUATED,
        SAVER as SAVER,
        SCHEDULER_KEYS as SCHEDULER_KEYS,
        SECTIONS as SECTIONS,
        SPECIAL as SPECIAL,
        as_node as as_node,
        check_keys as check_keys,
        fill_from_data as fill_from_data,
        is_node as is_node,
        list_metric_intervals as list_metric_intervals,
        list_optimizers as list_optimizers,
        list_schedules as list_schedules,
        needs_data as needs_data,
    )
    from trainer_cli.components.shadows import refuse_shadows as refuse_shadows
    from trainer_cli.components.targets import (
        Trust as Trust,
        import_from as import_from,
        import_target as import_target,
    )

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "bind": "check_components",
            "nodes": (
                "as_node check_keys EVALUATED fill_from_data is_node list_metric_intervals list_optimizers "
                "list_schedules needs_data SAVER SCHEDULER_KEYS SECTIONS SPECIAL"
            ),
            "shadows": "refuse_shadows",
            "targets": "import_from import_target Trust",
        },
    )

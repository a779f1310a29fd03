"""What classes and functions take, and what is wrong with the arguments that a config or a program gives them.

The arguments of a node with `_target_` are checked before its target is called: names, number, and each value against
its annotation, as far as a YAML value can be checked by one (`trainer_cli.values`). The constructors of this package
check the same where a program calls them, so that a mistake in Python reads like one in YAML.

It never calls a target, never evaluates an annotation, and never checks the constructors of users' subclasses, whose
annotations may be wrong. Where an annotation says nothing, any value is accepted.

Begin with `calls.py`: `read_parameters` reads a signature, `find_misfits` checks a call by it, `CheckedArguments` is
the base class that does so for its subclasses here.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())

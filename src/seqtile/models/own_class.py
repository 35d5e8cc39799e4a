"""The class of a module that is tiled by itself: derived from the one it had, its forward runs what the module holds.

A forward is looked up through the type and given the module that is called. So a copy's forward runs on the copy, also
on a shallow one, as torch's DataParallel makes them; a forward bound on a module would go on to run on that module.
"""

import copy
import copyreg
from typing import Any

from torch import nn

from seqtile.models.stand_in import stand_in_for

HELD = "_seqtile_placement"  # what a module holds, None on its class


class _OwnClass(type):
    """The metaclass, by which pickle knows such a class. It is pickled as the one beneath: a module comes back untiled,
    and seqtile need not be there to load it."""


def _pickled(cls: type) -> Any:
    return (copy.copy, (cls.__base__,)) if is_own_class(cls) else cls.__qualname__  # copying a class returns it


copyreg.pickle(_OwnClass, _pickled)


def is_own_class(cls: type) -> bool:
    return HELD in vars(cls)


def own_class_of(module: nn.Module) -> type | None:
    """The class that a module got here, which another library may have derived one more from, as FSDP2 does; None if it
    got none."""
    return next((cls for cls in type(module).__mro__ if is_own_class(cls)), None)


def own_class(base: type) -> type:
    """A subclass of `base`, to be found where that was."""
    metaclass = _OwnClass
    if type(base) is not type:
        metaclass = type("_OwnClass", (_OwnClass, type(base)), {})
        copyreg.pickle(metaclass, _pickled)

    @stand_in_for(base.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        held = self._seqtile_placement
        return (base.forward if held is None else held.forward)(self, *args, **kwargs)

    vars(forward).pop("seqtile_placement", None)  # that of a tiled `base`
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__, HELD: None}
    cls = metaclass(base.__name__, (base,), names)
    cls.forward = forward  # now, since a decoder layer's class wraps the forward that it finds when it is made
    return cls

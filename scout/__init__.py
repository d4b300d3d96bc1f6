"""SCOUT: who among equivalent peers is wrong, slow or silent, and which checkpoint to trust.

Knows tensors and peers; knows nothing of sockets, processes or restarts.  Importing this package
loads neither torch nor anything outside the standard library; `protect` loads the torch half.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scout.protection import Protection

__all__ = ["protect"]


def protect(model: Any, optimizer: Any, **options: Any) -> "Protection":
    """Compare this rank with its equivalent peers from now on; see `scout.protection.protect`.

    Every rank calls it at the same point, after the process group exists and the model is wrapped.
    """
    from scout.protection import protect as begin  # noqa: PLC0415 - torch, only for who asks

    return begin(model, optimizer, **options)

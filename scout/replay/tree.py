"""Arguments and results of modules as trees of dicts, lists and tuples with tensors as leaves."""

from collections.abc import Callable, Mapping
from typing import Any

import torch


def tensors_of(value: Any) -> list[Any]:
    """Return the tensors of a tree in a fixed order."""
    found: list[Any] = []

    def collect(tensor: Any) -> Any:
        found.append(tensor)
        return tensor

    map_tensors(value, collect)
    return found


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the tree with every tensor changed; what is no container stays the same object."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [map_tensors(item, change) for item in value]
    if isinstance(value, Mapping):  # a result class that is also a mapping
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value


def describe(value: Any) -> str:
    """Return the shape of a tree: containers, dtypes, shapes, devices; plain values as they are."""
    if isinstance(value, torch.Tensor):
        grad = "+" if value.requires_grad else ""
        return f"{value.dtype}{list(value.shape)}@{value.device.type}{grad}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key!r}:{describe(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return type(value).__name__ + "(" + ",".join(describe(item) for item in value) + ")"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return type(value).__name__

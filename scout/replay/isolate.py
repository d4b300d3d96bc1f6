"""A copy of a module that can be run without anybody noticing.

The copy has the module's code, its parameters as leaves of their own graph, copies of its buffers
and none of its hooks: FSDP's, ours or a logger's.  Sharded parameters are gathered first, which
is a collective of the shard group.
"""

from typing import Any

import torch

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def materialized(module: Any) -> dict[int, Any]:
    """Return whole, detached parameters by the identity of the module's own.

    A collective where parameters are DTensors; a view of the same memory where they are not.
    """
    whole: dict[int, Any] = {}
    dtypes = _compute_dtypes(module)
    for parameter in module.parameters():
        full = getattr(parameter, "full_tensor", None)
        value = parameter.detach() if full is None else full().detach()
        value = value.to(dtypes.get(id(parameter), value.dtype))
        whole[id(parameter)] = value.requires_grad_(parameter.requires_grad)
    return whole


def _compute_dtypes(module: Any) -> dict[int, Any]:
    """Return the dtype in which FSDP computes with each parameter, where it is another."""
    found: dict[int, Any] = {}
    for inner in module.modules():  # the innermost comes last and wins
        state = getattr(inner, "_get_fsdp_state", None)
        dtype = (
            getattr(getattr(state(), "_mp_policy", None), "param_dtype", None) if state else None
        )
        if dtype is not None:
            found.update((id(it), dtype) for it in inner.parameters())
    return found


def isolated(module: Any, state: dict[int, Any], memo: dict[int, Any] | None = None) -> Any:
    """Return the copy of ``module`` whose parameters and buffers are those in ``state``.

    ``state`` maps the identity of each of the module's own to what stands in for it; buffers that
    it lacks are copied.
    """
    memo = {} if memo is None else memo
    if id(module) in memo:
        return memo[id(module)]
    copy = object.__new__(type(module))
    memo[id(module)] = copy
    copy.__dict__.update(module.__dict__)
    for name in _HOOKS:
        if name in module.__dict__:
            copy.__dict__[name] = type(module.__dict__[name])()
    copy.__dict__["_parameters"] = {
        name: None if it is None else state[id(it)]
        for name, it in module._parameters.items()  # noqa: SLF001 - there is no public way to a module's own
    }
    copy.__dict__["_buffers"] = {
        name: None if it is None else state.get(id(it), it).detach().clone()
        for name, it in module._buffers.items()  # noqa: SLF001 - same
    }
    copy.__dict__["_modules"] = {
        name: None if it is None else isolated(it, state, memo)
        for name, it in module._modules.items()  # noqa: SLF001 - same
    }
    return copy


def leaves(parameters: dict[int, Any]) -> list[Any]:
    """Return the parameters that have a gradient, in a fixed order."""
    return [it for it in parameters.values() if isinstance(it, torch.Tensor) and it.requires_grad]

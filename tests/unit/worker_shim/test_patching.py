"""A replaced function is replaced everywhere, also where names were looked up before a fork."""

import sys
from types import FunctionType, ModuleType

import pytest

from worker_shim import patching
from worker_shim.patching import Patches, Survey


def of_torch(name):
    """Return a new function that looks like one of torch's."""
    code = (lambda: None).__code__
    function = FunctionType(code, {"__name__": "torch.made_up"}, name)
    assert function.__module__ == "torch.made_up"
    return function


@pytest.fixture
def module(monkeypatch):
    """Return what makes a loaded module with the given names."""

    def make(key, **names):
        made = ModuleType(key)
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, key, made)
        return made

    return make


@pytest.fixture(params=["none", "taken"])
def survey(request, monkeypatch):
    """Return a survey, and what takes it where one is taken: the outcome is the same."""
    fresh = Survey()
    monkeypatch.setattr(patching, "SURVEY", fresh)
    return fresh.take if request.param == "taken" else lambda: None


def test_every_name_of_a_function_is_replaced(module, survey):
    """One call that goes past us is one collective that nobody counted."""
    function, other = of_torch("f"), of_torch("g")
    home = module("made_up_home", f=function, g=other)
    alias = module("made_up_alias", renamed=function)
    survey()
    grown = alias
    grown.second = function
    late = module("made_up_late", f=function)
    patches = Patches()
    assert patches.replace_function(home, "f", lambda _: lambda: "ours")
    assert [it() for it in (home.f, alias.renamed, grown.second, late.f)] == ["ours"] * 4
    assert home.g is other
    patches.remove()
    assert {home.f, alias.renamed, grown.second, late.f} == {function}


def test_what_replaced_a_function_can_be_replaced_itself(module, survey):
    """A wrapper says that it is torch's; nobody has looked up where it stands."""
    home = module("made_up_home", f=of_torch("f"))
    alias = module("made_up_alias", f=home.f)
    survey()
    patches = Patches()
    patches.replace_function(home, "f", lambda _: lambda: "first")
    patches.replace_function(home, "f", lambda first: lambda: first() + ", second")
    assert (home.f(), alias.f()) == ("first, second", "first, second")


def test_a_name_that_was_given_to_something_else_is_left_alone(module, survey):
    """A script may have put its own function there meanwhile."""
    function, own = of_torch("f"), of_torch("own")
    home, alias = module("made_up_home", f=function), module("made_up_alias", f=function)
    survey()
    alias.f = own
    Patches().replace_function(home, "f", lambda _: lambda: "ours")
    assert home.f() == "ours"
    assert alias.f is own

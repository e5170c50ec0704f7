"""The units of a model, and which of them only the root can hold."""

from legato.core.workload import Module, Op, Parameter, Tensor, Workload
from legato.fsdp.units import Precision, units_of


def rooted(modules, level=1):
    job = (Op("f", "forward", 1.0), Op("b", "backward", 1.0, (0,)))
    workload = Workload("test", job, (Tensor("w", 8, 1),), modules=tuple(modules))
    return {unit.path: unit.rooted for unit in units_of(workload, 2, Precision(), level=level)}


def module(path, **facts):
    return Module(path, (Parameter(f"{path}.weight", 8, 2),), **facts)


def test_a_unit_that_contains_others_belongs_to_the_root():
    modules = [module(""), module("embed"), module("h.0"), module("h.0.mlp"), module("h.1", calls=2), Module("h.1.act")]
    assert rooted(modules) == {"": True, "embed": False, "h.0": False, "h.1": True}
    assert rooted(modules, level=2) == {"": True, "embed": False, "h.0": True, "h.0.mlp": False, "h.1": True}


def test_a_list_of_modules_is_not_called_and_belongs_to_the_root():
    assert rooted([module("stages.0.0"), module("stages.0.1"), module("head")]) == {"stages.0": True, "head": False}
    assert rooted([Module("stages.0"), module("stages.0.0"), module("head")]) == {"stages.0": False, "head": False}


def test_tied_parameters_belong_to_the_root_unless_one_unit_has_them():
    tied = [module("embed", tied=("head",)), module("h.0.a", tied=("h.0.b",)), Module("h.0.b", tied=("h.0.a",))]
    assert rooted([Module("h.0"), *tied, Module("head", tied=("embed",))]) == {"embed": True, "h.0": False}

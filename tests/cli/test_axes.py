"""The table of axes fits the simulator, the options and the documentation."""

import dataclasses
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from support.command import run
from typer.main import get_command

from legato.commands import app
from legato.core.axes import FABRIC, NETWORK, SERVERS, SWEPT
from legato.core.quantities import parse_seconds
from legato.simulator.flow import FABRICS, Network
from legato.sweeps.grid import network_of

#: They make something else of the network than a field with their name.
MADE_OF = {"disturb": "disturbances"}


@pytest.mark.parametrize("axis", [axis for axis in NETWORK if axis is not SERVERS], ids=lambda axis: axis.name)
def test_an_axis_is_a_field_of_the_network_with_its_values_and_its_default(axis):
    fields = {field.name: field for field in dataclasses.fields(Network)}
    field = fields[MADE_OF.get(axis.field, axis.field)]
    if get_origin(axis.type) is Literal:
        assert get_args(axis.type) == get_args(get_type_hints(Network)[axis.field])
    if not axis.in_cluster and axis.field not in MADE_OF:
        assert axis.usual == field.default


def test_the_network_of_all_defaults_is_that_of_the_options():
    network = network_of({axis.field: axis.usual for axis in NETWORK})
    assert network == Network(workers=8, bandwidth_bps=10e9, latency_s=parse_seconds("30us"))


def test_options_of_fabrics_are_fields_of_some_fabric():
    fields = {field.name for fabric in FABRICS.values() for field in dataclasses.fields(fabric)}
    assert {axis.field for axis in FABRIC} <= fields


def test_every_axis_is_an_option_and_its_column_one_of_the_rows(capsys, workload):
    commands = get_command(app).commands
    for verb in ("simulate", "sweep"):
        assert {axis.name for axis in (*NETWORK, *FABRIC)} <= {option.name for option in commands[verb].params}
    _, out, _ = run(capsys, "sweep", workload, "--jobs", 1, "--json")
    assert all(f'"{axis.field}":' in out for axis in SWEPT)

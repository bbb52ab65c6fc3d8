"""Which field a validation message is about."""

import msgspec
import pytest

from control_plane.api.tenants import CreateTenant
from control_plane.bodies import field_at_fault


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": "a", "z": 1}, "z"),
        ({"name": "a", "limits": {"z": 1}}, "limits.z"),
        ({"name": "a", "limits": {"concurrency": "x"}}, "limits.concurrency"),
        ({"name": "a", "weight": 0}, "weight"),
        ({"name": 7}, "name"),
        ({}, "name"),
        ([], None),
    ],
)
def test_the_field_is_named_with_its_path(body, param):
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(body, CreateTenant)
    problem, found = field_at_fault(str(caught.value))
    assert found == param
    assert "$" not in problem


def test_a_message_without_a_path_is_told_as_it_is():
    assert field_at_fault("something else") == ("something else", None)

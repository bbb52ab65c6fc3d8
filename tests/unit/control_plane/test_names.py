"""What names may look like, wherever an operator writes one."""

import pkgutil
from importlib import import_module
from typing import get_args

import msgspec
import pytest

import control_plane.api
from control_plane.api import names
from core.safety import policy


def patterns():
    """Every pattern that a field of the admin API is held to, by where it is."""
    modules = [
        import_module(f"control_plane.api.{found.name}")
        for found in pkgutil.iter_modules(control_plane.api.__path__)
    ]
    for module in (*modules, policy):
        for name, value in vars(module).items():
            for meta in get_args(value)[1:]:
                if isinstance(meta, msgspec.Meta) and meta.pattern:
                    yield f"{module.__name__}.{name}", meta.pattern


PATTERNS = dict(patterns())


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_a_pattern_of_the_whole_text_ends_with_the_text(pattern):
    assert not pattern.endswith("$")  # which is also found before a last newline


@pytest.mark.parametrize("text", ["a\n", "\n", "\x1ba", "a\x1b", "a\nb", " a", "a ", ""])
def test_a_name_for_people_is_one_line_of_text(text):
    for kind in (names.TenantName, names.KeyName):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(text, kind)
        assert msgspec.convert("Ada L. Ünal", kind)


def test_there_are_patterns_to_look_at():
    assert {"control_plane.api.names.ModelName", "core.safety.policy.RuleName"} <= set(PATTERNS)

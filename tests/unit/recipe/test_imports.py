"""The codec as a library: what importing it loads, and its public names."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import headrace.recipe

HEAVY = ("torch", "numpy", "starlette", "numba", "PIL", "jsonschema_rs", "headrace.engine")


def loaded_after(code: str) -> set[str]:
    """The modules that are loaded when a fresh interpreter has run the code."""
    code += "\nimport sys; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_else() -> None:
    loaded = loaded_after("import headrace.recipe")
    assert not loaded & {*HEAVY, "msgspec", "tokenizers", "headrace.errors"}


def test_using_all_of_it_loads_no_engine() -> None:
    loaded = loaded_after("from headrace.recipe import *")
    assert {"headrace.recipe.stream", "headrace.recipe.protocols.responses"} <= loaded
    assert not loaded & set(HEAVY)
    assert not any(name.startswith(("headrace.model", "headrace.serve")) for name in loaded)


@pytest.mark.parametrize("name", headrace.recipe.__all__)
def test_public_names_are_what_they_say(name: str) -> None:
    value = getattr(headrace.recipe, name)
    # A submodule of the same name would take the place of a function.
    assert inspect.isclass(value) or inspect.isfunction(value)
    assert value.__name__ == name


def test_unknown_names_are_refused() -> None:
    assert headrace.recipe.__all__ == sorted(headrace.recipe._PUBLIC)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = headrace.recipe.no_such_name

"""Triton's interpreter patches its language once a launch.

By itself it does so for every function that a kernel calls, too, which takes most of its time.
"""

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

INTERPRETER = "triton.runtime.interpreter"


def when_imported() -> None:
    """Have the interpreter do so, which nothing imports for it."""
    if INTERPRETER in sys.modules:
        patch_once(sys.modules[INTERPRETER])
    else:
        sys.meta_path.insert(0, Finder())


class Finder(MetaPathFinder):
    """Finds the interpreter, once."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != INTERPRETER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            patch_once(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


def patch_once(interpreter: Any) -> None:
    """Leave out the patches of functions that kernels call, where the launch has made them."""
    language, patch = interpreter.tl, interpreter._patch_lang

    def patch_unless_patched(function: Any) -> Any:
        used = [x for x in function.__globals__.values() if x is language or x is language.core]
        if used and not any(language.core.is_builtin(each.arange) for each in used):
            return interpreter._LangPatchScope()
        return patch(function)

    interpreter._patch_lang = patch_unless_patched

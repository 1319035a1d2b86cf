"""Triton's interpreter, made quicker: much of its time goes to what it computes each time anew."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton import language
from triton.language import core, semantic
from triton.runtime import interpreter


def hasten_interpreter() -> None:
    """Keep what depends on a type alone, and compute nothing that is not looked at. Triton 3.6 gets
    the constants in bfloat16 that it lacks."""
    if not hasattr(interpreter.InterpreterBuilder, "get_bf16"):
        interpreter.InterpreterBuilder.get_bf16 = _bfloat16
    if not hasattr(interpreter, "_LangPatchScope"):
        return  # a version of Triton that does otherwise
    _patch_once()
    _call_builtins_directly()
    _keep_types()
    # Without `debug` it looks for overflow, with six operations, and says nothing of what it finds.
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    # Python asks every kind of number that anyone has registered.
    semantic.numbers = SimpleNamespace(Number=(int, float, complex, np.number))


def _bfloat16(builder: Any, value: float) -> Any:
    return builder.create_fp_trunc(builder.get_fp32(value), language.bfloat16)


def _patch_once() -> None:
    """Keep the interpreter from patching its language again for every function that a kernel calls:
    it looks through all of the language each time, and finds nothing to patch."""
    patch, scope = interpreter._patch_lang, interpreter._LangPatchScope

    def patch_if_needed(function: Any) -> Any:
        modules = [m for m in function.__globals__.values() if m is language or m is core]
        unpatched = any(core.is_builtin(module.load) for module in modules)
        return patch(function) if unpatched or not modules else scope()

    interpreter._patch_lang = patch_if_needed


def _call_builtins_directly() -> None:
    """Pass the function that a wrapper would call with what it asks for."""
    wrapper = core.load.__code__

    def patch(owner: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        known = getattr(member, "__code__", None) is wrapper
        function = member.__wrapped__ if known else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch


def _keep_types() -> None:
    """Make each type of blocks once, and what all tensors of a type have in common."""
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    find_dtype = interpreter._get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}
    dtypes: dict[str, Any] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = (getattr(size, "value", size) for size in shape)
        key = (element_ty.name, getattr(element_ty, "address_space", None), *sizes)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = self.__dict__
        self.__dict__ = blocks[key]

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if (common := type.__dict__.get("_of_tensors")) is None:
            make_tensor(self, handle, type)
            type._of_tensors = {key: x for key, x in self.__dict__.items() if key != "handle"}
        else:
            self.__dict__.update(common, handle=handle)

    def np_dtype(type: Any) -> Any:
        if type.name not in dtypes:
            dtypes[type.name] = find_dtype(type)
        return dtypes[type.name]

    core.block_type.__init__, core.tensor.__init__ = block, tensor
    interpreter._get_np_dtype = np_dtype

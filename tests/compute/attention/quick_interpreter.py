"""Triton's interpreter at a third of its time: what it makes anew at every operation is made once.

A kernel's values are computed by the interpreter's own functions. Only its bookkeeping is another: the functions that
stand in the place of Triton's, and the types of tensors.
"""

from typing import Any


def quicken(interpreter: Any) -> None:
    """`interpreter`: the module, in a process that only interprets."""
    _replace_functions_once(interpreter)
    _keep_types(interpreter)
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    # Without `debug` it computes whether integers overflow, and does nothing with what it finds.
    builder.options = type(builder.options)(sanitize_overflow=False)


def _replace_functions_once(interpreter: Any) -> None:
    """It replaces the functions of Triton's language at each launch, and at each call of one kernel by another."""
    replace = interpreter._patch_lang
    scope = interpreter._LangPatchScope()  # what a launch takes back when it ends: nothing
    replaced: list[dict[str, Any]] = []

    def replace_once(function: Any) -> Any:
        if not any(known is function.__globals__ for known in replaced):
            replace(function)
            replaced.append(function.__globals__)
        return scope

    interpreter._patch_lang = replace_once


def _keep_types(interpreter: Any) -> None:
    """Make each type once, with the fields of a tensor that follow from it."""
    core = interpreter.tl.core
    find_dtype, init_block, init_tensor = interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__
    dtypes: dict[str, Any] = {}
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}

    def np_dtype(type_: Any) -> Any:
        found = dtypes.get(type_.name)
        if found is None:
            found = dtypes[type_.name] = find_dtype(type_)
        return found

    def of_tensor(type_: Any) -> tuple[Any, Any]:
        like = object.__new__(core.tensor)
        init_tensor(like, None, type_)
        return like.shape, like.numel

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.values if isinstance(shape, core.tuple) else shape
        key = (element_ty.name, *[size.value if isinstance(size, core.constexpr) else size for size in sizes])
        fields = blocks.get(key)
        if fields is None:
            init_block(self, element_ty, shape)
            self.of_tensor = of_tensor(self)
            fields = blocks[key] = vars(self)
        self.__dict__ = fields

    of_scalar = of_tensor(core.int8)

    def tensor(self: Any, handle: Any, type_: Any) -> None:
        is_block = type_.is_block()
        self.handle, self.type, self.dtype = handle, type_, type_.element_ty if is_block else type_.scalar
        self.shape, self.numel = type_.of_tensor if is_block else of_scalar

    interpreter._get_np_dtype = np_dtype
    core.block_type.__init__, core.tensor.__init__ = block_type, tensor

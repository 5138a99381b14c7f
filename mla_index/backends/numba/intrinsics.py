"""What the card has and Numba's language has no word for: 16-byte accesses, and warp scans."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import cuda, types
from numba.cuda.extending import intrinsic

ALL_LANES = 0xFFFFFFFF
_VECTOR_BYTES = 16
_SHARED = 3  # LLVM's address space


def _vectors(builder: Any, pointer: Any, index: Any, bits: int) -> list[Any]:
    """Addresses of the 16-byte vectors that four elements of `bits` from `index` make up."""
    per_vector = 8 * _VECTOR_BYTES // bits
    vector = ir.VectorType(ir.IntType(bits), per_vector)
    first = builder.gep(pointer, [index])
    return [
        builder.bitcast(builder.gep(first, [ir.Constant(ir.IntType(64), i)]), vector.as_pointer())
        for i in range(0, 4, per_vector)
    ]


def _load(builder: Any, pointer: Any, index: Any, bits: int) -> list[Any]:
    values = []
    for address in _vectors(builder, pointer, index, bits):
        loaded = builder.load(address)
        loaded.align = _VECTOR_BYTES
        values += [
            builder.extract_element(loaded, ir.Constant(ir.IntType(32), i))
            for i in range(loaded.type.count)
        ]
    return values


@intrinsic  # type: ignore[untyped-decorator]
def address(typing_context: Any, pointer: Any) -> Any:
    """The address as an int64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], ir.IntType(64))

    return types.int64(pointer), generate


@intrinsic  # type: ignore[untyped-decorator]
def moved(typing_context: Any, pointer: Any, elements: Any) -> Any:
    """The address so many elements on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return pointer(pointer, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def load_at(typing_context: Any, pointer: Any, index: Any, step: Any) -> Any:
    """The element `index * step` bytes on: one multiply-add and no scaling."""
    element = pointer.dtype

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer_value, index_value, step_value = args
        start = builder.bitcast(pointer_value, ir.IntType(8).as_pointer())
        address = builder.gep(start, [builder.mul(index_value, step_value)])
        return builder.load(builder.bitcast(address, pointer_value.type))

    return element(pointer, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def multiply_wide(typing_context: Any, a: Any, b: Any) -> Any:
    """The int64 product of two int32, in one instruction wherever either came from."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.IntType(64), [ir.IntType(32), ir.IntType(32)])
        assembly = ir.InlineAsm(function, "mul.wide.s32 $0, $1, $2;", "=l,r,r")
        return builder.call(assembly, args)

    return types.int64(types.int32, types.int32), generate


@intrinsic  # type: ignore[untyped-decorator]
def load4(typing_context: Any, pointer: Any, index: Any) -> Any:
    """Four elements from `index` on, by 16-byte loads; the first must be so aligned."""
    element = pointer.dtype

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = _load(builder, args[0], args[1], element.bitwidth)
        return context.make_tuple(builder, signature.return_type, values)

    return types.UniTuple(element, 4)(pointer, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def shared_pointer(typing_context: Any, array: Any) -> Any:
    """The address of a shared array, worked out once.

    It passes through assembly that does nothing, or ptxas works it out again before every access,
    which takes four instructions of which one is slow.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(array)(context, builder, args[0]).data
        word, inside = ir.IntType(32), data.type.pointee.as_pointer(_SHARED)
        number = builder.ptrtoint(builder.addrspacecast(data, inside), word)
        nothing = ir.InlineAsm(ir.FunctionType(word, [word]), "", "=r,0", side_effect=True)
        settled = builder.inttoptr(builder.call(nothing, [number]), inside)
        return builder.addrspacecast(settled, data.type)

    return types.CPointer(array.dtype)(array), generate


@intrinsic  # type: ignore[untyped-decorator]
def store4(typing_context: Any, pointer: Any, index: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Store four elements from `index` on, by 16-byte stores; the first must be so aligned."""
    element = pointer.dtype

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer_value, index_value, *values = args
        for address in _vectors(builder, pointer_value, index_value, element.bitwidth):
            vector = ir.Constant(address.type.pointee, ir.Undefined)
            for i in range(vector.type.count):
                place = ir.Constant(ir.IntType(32), i)
                vector = builder.insert_element(vector, values.pop(0), place)
            builder.store(vector, address, align=_VECTOR_BYTES)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, element, element, element, element), generate


@cuda.jit(device=True, inline="always")  # type: ignore[untyped-decorator]
def warp_scan(value: int, lane: int) -> Any:
    """Sum of an int32 over the lanes up to and including this one."""
    other = cuda.shfl_up_sync(ALL_LANES, value, 1)
    total = types.int32(value + other if lane >= 1 else value)
    other = cuda.shfl_up_sync(ALL_LANES, total, 2)
    total = types.int32(total + other if lane >= 2 else total)
    other = cuda.shfl_up_sync(ALL_LANES, total, 4)
    total = types.int32(total + other if lane >= 4 else total)
    other = cuda.shfl_up_sync(ALL_LANES, total, 8)
    total = types.int32(total + other if lane >= 8 else total)
    other = cuda.shfl_up_sync(ALL_LANES, total, 16)
    return types.int32(total + other if lane >= 16 else total)


@cuda.jit(device=True, inline="always")  # type: ignore[untyped-decorator]
def warp_last(value: int) -> Any:
    """The last lane's int32."""
    return cuda.shfl_sync(ALL_LANES, value, 31)


@cuda.jit(device=True, inline="always")  # type: ignore[untyped-decorator]
def over_warps(shared: Any, warp: int, warps: int, lane: int) -> Any:
    """Of one int32 for each warp: the sum over the warps before this one, and over all."""
    own = types.int32(shared[types.uint32(lane)]) if lane < warps else types.int32(0)
    upto = warp_scan(own, lane)
    return cuda.shfl_sync(ALL_LANES, types.int32(upto - own), warp), warp_last(upto)

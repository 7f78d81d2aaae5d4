"""Parses optimized HLO text: computations, instructions, shapes and loop counts."""

import dataclasses
import functools
import math
import re

_BYTES = {"pred": 1, "bf16": 2, "f8e4m3fn": 1, "f8e5m2": 1, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"\b(pred|token|opaque|bf16|[sufc]\d+|f8e\w+)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_CALL = re.compile(r"(.*?) ([a-z][\w\-]*)\((.*)$")  # type, opcode, operands and attributes
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")


@dataclasses.dataclass(frozen=True)
class Shape:
    """The type of an array."""

    dtype: str
    dims: tuple[int, ...]
    in_hbm: bool  # otherwise in on-chip memory

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        """Size without padding."""
        width = _BYTES.get(self.dtype)
        return self.elements * (int(re.sub(r"\D", "", self.dtype)) / 8 if width is None else width)


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation. For example, the fields of the last line of

        %x = f32[4,8]{1,0} parameter(0)
        %w = f32[8,8]{1,0} parameter(1)
        ROOT %y = f32[4,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}

    are "y", "f32[4,8]{1,0}", "dot", the instructions x and w, no literal, the text from the comma on, and True.
    """

    name: str
    type: str  # of its result, as printed
    opcode: str
    operands: tuple["Instruction", ...] = dataclasses.field(repr=False)
    literal: str  # of a constant or a parameter, the text in the parentheses
    attributes: str  # everything after the operands
    is_root: bool

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays of its result, those of a tuple in sequence."""
        return shapes(self.type)

    @property
    def operand_shapes(self) -> list[Shape]:
        return [shape for operand in self.operands for shape in operand.shapes]

    def attribute(self, key: str) -> str | None:
        """The name in an attribute such as body=%name."""
        found = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        return found and found[1]

    @property
    def called(self) -> list[str]:
        """Computations that it runs, except the body and condition of a loop and the branches of a conditional."""
        names = [self.attribute("calls")] if self.attribute("calls") else []
        return names + _names(self.attributes, "called_computations")

    @property
    def branches(self) -> list[str]:
        sides = [self.attribute(key) for key in ("true_computation", "false_computation")]
        return _names(self.attributes, "branch_computations") + [side for side in sides if side]


def _names(attributes: str, key: str) -> list[str]:
    found = re.search(rf"\b{key}=\{{([^}}]*)\}}", attributes)
    return re.findall(r"%?([\w.\-]+)", found[1]) if found else []


@dataclasses.dataclass(frozen=True)
class Computation:
    """A computation: its instructions by name, in order."""

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        """The instruction whose result it returns; ValueError if there is none."""
        (root,) = [i for i in self.instructions.values() if i.is_root]
        return root

    @property
    def parameters(self) -> dict[int, Instruction]:
        return {int(i.literal): i for i in self.instructions.values() if i.opcode == "parameter"}


@dataclasses.dataclass(frozen=True)
class Module:
    """A whole program."""

    computations: dict[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """Parses a program as printed by XLA; ValueError if the text has none."""
    computations, entry, name, found = {}, None, None, {}
    text = re.sub(r"(kernel_metadata=\{)\n(.*)\n\}", r"\1\2}", text)  # the only attribute with line breaks
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name, found = header[2], {}
            entry = name if header[1] else entry
        elif line.startswith("}") and name:
            computations[name] = Computation(name, found)
            name = None
        elif name and (match := _INSTRUCTION.match(line)):
            found[match[2]] = _instruction(match[2], match[3], bool(match[1]), found)
    if entry is None:
        raise ValueError("the text holds no HLO program")
    return Module(computations, entry)


def _instruction(name: str, text: str, is_root: bool, found: dict[str, Instruction]) -> Instruction:
    """The instruction in a line, after those that were found in the lines before it."""
    if not (call := _CALL.match(text)):
        raise ValueError(f"no operation in {text[:80]!r}")
    kind, opcode, rest = call.groups()
    closing = _closing(rest)
    inside = rest[:closing]
    has_literal = opcode in ("parameter", "constant")
    named = [] if has_literal else re.findall(r"%([\w.\-#]+)", inside)
    operands = tuple(operand for name in named if (operand := _operand(name, found)))
    return Instruction(name, kind, opcode, operands, inside * has_literal, rest[closing + 1 :], is_root)


def _operand(name: str, found: dict[str, Instruction]) -> Instruction | None:
    """The instruction of this name; of %tuple#index, as jax 0.12 writes it, the get-tuple-element, which is added."""
    name, *indices = name.split("#")
    for index in indices:
        whole, name = found[name], f"{name}#{index}"
        element = _split(whole.type)[int(index)]
        found[name] = Instruction(name, element, "get-tuple-element", (whole,), "", f", index={index}", is_root=False)
    return found.get(name)


def _split(tuple_type: str) -> list[str]:
    """The types of the elements of a tuple."""
    parts, depth = [""], 0
    for character in re.sub(r"/\*.*?\*/", "", tuple_type)[1:-1]:  # without /*index=5*/
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _closing(text: str) -> int:
    """Index of the parenthesis that closes one right before the text."""
    depth = 1
    for index, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return index
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")


def shapes(text: str) -> tuple[Shape, ...]:
    """All arrays in a printed type, in order."""
    return tuple(
        Shape(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d), not re.search(r"S\([1-9]", layout))
        for dtype, dims, layout in _SHAPE.findall(text)
    )


def trip_count(module: Module, loop: Instruction) -> int | None:
    """How often the body of a while loop runs, or None if that depends on the data.

    Loops over arrays compile to a counter that is compared with a constant; its first value and its step are read. This
    one runs for the counters 3, 5, 7, 9 and 11:

        of its input      %three = s32[] constant(3)             %begin = (s32[], ...) tuple(%three, ...)
        of its condition  %limit = s32[] constant(13)            ROOT %less = pred[] compare(%i, %limit), direction=LT
        of its body       %next = s32[] add(%i, %two)            ROOT %out = (s32[], ...) tuple(%next, ...)
    """
    compare = module.computations[loop.attribute("condition")].root
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    counter, limit = compare.operands
    if counter.opcode != "get-tuple-element" or limit.opcode != "constant":
        return None
    index = int(re.search(r"index=(\d+)", counter.attributes)[1])
    first = _constant(loop.operands[0], index)
    step = _step(module.computations[loop.attribute("body")].root, index)
    return math.ceil((int(limit.literal) - first) / step)


def _constant(values: Instruction, index: int) -> int:
    """The first value of a loop counter; if it is not a literal constant 0, as in most loops."""
    if values.opcode != "tuple":
        return 0
    value = values.operands[index]
    while value.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        value = value.operands[0]
    return int(value.literal) if value.opcode == "constant" and value.literal.isdigit() else 0


def _step(root: Instruction, index: int) -> int:
    """The increment of a loop counter; 1 if it is not written as an addition of a constant."""
    value = root.operands[index] if root.opcode == "tuple" else root
    steps = [int(operand.literal) for operand in value.operands if operand.opcode == "constant"]
    return steps[0] if value.opcode == "add" and steps else 1

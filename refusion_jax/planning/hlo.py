"""Parses optimized HLO text: computations, instructions, shapes and loop counts."""

import dataclasses
import math
import re

_BYTES = {"pred": 1, "bf16": 2, "f8e4m3fn": 1, "f8e5m2": 1, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"\b(pred|token|opaque|bf16|[sufc]\d+|f8e\w+)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
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


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # of its result, flattened
    operands: tuple[str, ...]  # names; for constants and parameters, the text in the parentheses
    attributes: str  # everything after the operands
    is_root: bool

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
        root = next((i for i in self.instructions.values() if i.is_root), None)
        if root is None:
            raise ValueError(f"the computation {self.name!r} has no ROOT")
        return root

    @property
    def parameters(self) -> dict[int, Instruction]:
        return {int(i.operands[0]): i for i in self.instructions.values() if i.opcode == "parameter"}


@dataclasses.dataclass(frozen=True)
class Module:
    """A whole program."""

    computations: dict[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """Parses a program as printed by XLA; ValueError if the text has none."""
    computations, entry, name, found, types = {}, None, None, {}, {}
    text = re.sub(r"(kernel_metadata=\{)\n(.*)\n\}", r"\1\2}", text)  # the only attribute with line breaks
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name, found, types = header[2], {}, {}
            entry = name if header[1] else entry
        elif line.startswith("}") and name:
            computations[name] = Computation(name, found)
            name = None
        elif name and (match := _INSTRUCTION.match(line)):
            types[match[2]], instruction = _instruction(match[2], match[3], is_root=bool(match[1]))
            found |= _elements(instruction, types)
            found[match[2]] = instruction
    if entry is None:
        raise ValueError("the text holds no HLO program")
    return Module(computations, entry)


def _instruction(name: str, text: str, is_root: bool) -> tuple[str, Instruction]:
    """(type of the result, instruction)."""
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    result, rest = text[:end], text[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    inside = rest[opening + 1 : closing]
    opcode = rest[:opening]
    operands = (inside,) if opcode in ("parameter", "constant") else tuple(re.findall(r"%([\w.\-#]+)", inside))
    return result, Instruction(name, opcode, shapes(result), operands, rest[closing + 1 :], is_root)


def _elements(instruction: Instruction, types: dict[str, str]) -> dict[str, Instruction]:
    """The get-tuple-element instructions for operands that jax 0.12 writes as %tuple#index."""
    made = {}
    for operand in instruction.operands if instruction.opcode not in ("parameter", "constant") else ():
        parent, *indices = operand.split("#")
        for index in indices:
            name = f"{parent}#{index}"
            types[name] = _split(types[parent])[int(index)]
            made[name] = Instruction(
                name, "get-tuple-element", shapes(types[name]), (parent,), f", index={index}", is_root=False
            )
            parent = name
    return made


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


def _closing(text: str, opening: int) -> int:
    """Index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")


def shapes(text: str) -> tuple[Shape, ...]:
    """All arrays in a printed type, in order."""
    return tuple(
        Shape(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d), not re.search(r"S\([1-9]", layout))
        for dtype, dims, layout in _SHAPE.findall(text)
    )


def trip_count(module: Module, caller: Computation, loop: Instruction) -> int | None:
    """How often the body of a while loop runs, or None if that depends on the data.

    Loops over arrays compile to a counter that is compared with a constant; its first value and its step are read.
    """
    condition = module.computations[loop.attribute("condition")]
    compare = condition.root
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    counter, limit = (condition.instructions[name] for name in compare.operands)
    if counter.opcode != "get-tuple-element" or limit.opcode != "constant":
        return None
    index = int(re.search(r"index=(\d+)", counter.attributes)[1])
    first = _constant(caller, caller.instructions[loop.operands[0]], index)
    body = module.computations[loop.attribute("body")]
    step = _step(body, index)
    return math.ceil((int(limit.operands[0]) - first) / step)


def _constant(computation: Computation, values: Instruction, index: int) -> int:
    """The first value of a loop counter; if it is not a literal constant 0, as in most loops."""
    if values.opcode != "tuple":
        return 0
    value = computation.instructions[values.operands[index]]
    while value.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        value = computation.instructions[value.operands[0]]
    return int(value.operands[0]) if value.opcode == "constant" and value.operands[0].isdigit() else 0


def _step(body: Computation, index: int) -> int:
    """The increment of a loop counter; 1 if it is not written as an addition of a constant."""
    root = body.root
    value = body.instructions[root.operands[index]] if root.opcode == "tuple" else root
    if value.opcode != "add":
        return 1
    steps = [body.instructions[name] for name in value.operands if body.instructions[name].opcode == "constant"]
    return int(steps[0].operands[0]) if steps else 1

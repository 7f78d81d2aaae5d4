"""Counts what one chip does in one step of a compiled program: FLOPs, memory traffic and collectives.

The body of a loop counts as often as it runs, unlike in XLA's own cost analysis, and once if that depends on the data;
of a conditional the more expensive branch counts. Matrix products are counted from their shapes: for [M, K] x [K, N]
the sizes of both operands and the result multiply to (M K N)^2, whatever order and grouping of axes the compiler has
chosen. Attention kernels are opaque to XLA. They are counted as if every row were one document, on the busiest chip:
the names of ours say how many tiles that is, those of other programs are assumed to work on all tiles on or below the
diagonal. Other kernels count with the costs that they declare. Ragged products of experts are counted as if all experts
were equally loaded.

Of a fusion only what it reads and writes goes through memory. The one below adds a row to a row of a table, in place,
and moves 32 + 4 + 32 + 32 bytes: the old row, which is all that it takes of the table, the index, the row to add, and
the new row.

    %fused (table: f32[100,8], at: s32[], new: f32[1,8]) -> f32[100,8] {
      %table = f32[100,8]{1,0} parameter(0)
      %at = s32[] parameter(1)
      %new = f32[1,8]{1,0} parameter(2)
      %zero = s32[] constant(0)
      %old = f32[1,8]{1,0} dynamic-slice(%table, %at, %zero), dynamic_slice_sizes={1,8}
      %sum = f32[1,8]{1,0} add(%old, %new)
      ROOT %put = f32[100,8]{1,0} dynamic-update-slice(%table, %sum, %at, %zero)
    }

    ENTRY %main (t: f32[100,8], i: s32[], n: f32[1,8]) -> f32[100,8] {
      %t = f32[100,8]{1,0} parameter(0)
      %i = s32[] parameter(1)
      %n = f32[1,8]{1,0} parameter(2)
      ROOT %f = f32[100,8]{1,0} fusion(%t, %i, %n), kind=kLoop, calls=%fused
    }
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from refusion_jax.planning.hlo import Computation, Instruction, Module, trip_count

GATHER_BY_SUM = "all-reduce for a gather"  # a sum of arrays that are zero outside each chip's part: twice the traffic
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("copy-done", "async-done", "async-update", "opt-barrier", "slice-done", "iota"),
    *("send", "send-done", "recv-done"),
)
_NARROW = ("s8", "f8e4m3fn")
_RAGGED = "ragged-dot-none"  # XLA's kernel
_KERNEL_PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}  # matrix products per tile


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of collective, summed over the step."""

    kind: str  # all-gather ..., or GATHER_BY_SUM
    over: str  # "ici", within a slice, or "dcn", between slices
    count: float  # per step
    overlapped: bool  # with arithmetic, so that the chip need not wait for it
    bytes: float  # received by one chip, with the ring algorithm
    fused: bool = False  # interleaved with the steps of one arithmetic operation

    @property
    def is_large(self) -> bool:
        """Whether transfer outweighs latency: 1 MB takes 5 us on the slowest network, that of v5e."""
        return self.bytes >= 1e6 * self.count


class Operation(NamedTuple):
    """An operation; a chip runs them one after the other."""

    times: float
    flops: float
    bytes: float
    width: float = math.inf  # size of the smallest axis of a product that may not fill the matrix unit
    narrow: str = ""  # dtype of both factors of a product, if it is one of _NARROW


@dataclasses.dataclass(frozen=True)
class Costs:
    """What one chip does in one step."""

    operations: tuple[Operation, ...] = ()
    collectives: tuple[Collective, ...] = ()

    @property
    def flops(self) -> float:
        return sum(o.times * o.flops for o in self.operations)

    @property
    def bytes(self) -> float:
        """Read from and written to HBM."""
        return sum(o.times * o.bytes for o in self.operations)

    def times(self, n: float) -> "Costs":
        return Costs(
            tuple(operation._replace(times=operation.times * n) for operation in self.operations),
            tuple(dataclasses.replace(c, count=c.count * n, bytes=c.bytes * n) for c in self.collectives),
        )

    def overlapped(self, fused: bool = False) -> "Costs":
        """The same with all collectives overlapped with other work, or fused with it."""
        changed = (dataclasses.replace(c, overlapped=True, fused=fused) for c in self.collectives)
        return dataclasses.replace(self, collectives=tuple(changed))


def add(parts: list[Costs]) -> Costs:
    """The sum. Collectives are summed by kind, large and small ones separately."""
    totals: dict[tuple, Collective] = {}
    for c in (c for part in parts for c in part.collectives):
        key = c.kind, c.over, c.overlapped, c.fused, c.is_large
        old = totals.get(key, dataclasses.replace(c, count=0, bytes=0))
        totals[key] = dataclasses.replace(old, count=old.count + c.count, bytes=old.bytes + c.bytes)
    return Costs(tuple(o for part in parts for o in part.operations), tuple(totals.values()))


def count(module: Module, chips_per_slice: int, unused: str = "") -> Costs:
    """Counts the optimized program of one chip.

    Chips are numbered slice by slice; traffic between slices goes over the data-center network. Conditionals directly
    in a `jax.named_scope` called `unused` take their cheapest branch.
    """
    return _Counter(module, chips_per_slice, unused).of(module.entry)


class _Counter:
    def __init__(self, module: Module, chips_per_slice: int, unused: str):
        self._module, self._chips_per_slice, self._unused, self._known = module, chips_per_slice, unused, {}

    def of(self, name: str) -> Costs:
        if name not in self._known:
            computation = self._module.computations[name]
            self._known[name] = add([self._instruction(i) for i in computation.instructions.values()])
        return self._known[name]

    def _instruction(self, i: Instruction) -> Costs:
        if i.opcode in _FREE:
            return Costs()
        if i.opcode == "while":
            trips = trip_count(self._module, i)
            return self.of(i.attribute("body")).times(1 if trips is None else trips)
        if i.opcode == "conditional":
            choose = min if self._unused and f"/{self._unused}/cond" in i.attributes else max
            return choose((self.of(branch) for branch in i.branches), key=lambda cost: (cost.flops, cost.bytes))
        if i.opcode == "recv" and "megascale" in i.attributes:  # the receiving end of a collective between slices
            return Costs(collectives=(Collective("receive", "dcn", 1, True, i.shapes[0].bytes),))
        if i.opcode == "call" or (i.opcode == "custom-call" and i.called):  # the latter runs on the SparseCores
            return add([self.of(name) for name in i.called])
        if i.opcode == "async-start":
            return add([self.of(name).overlapped() for name in i.called])
        if kind := collective_kind(i):
            return Costs(collectives=(self._collective(kind, i),))
        if i.opcode == "fusion":
            return self._fusion(i)
        size = sum(s.bytes for s in (*i.shapes, *i.operand_shapes) if s.in_hbm)
        if kernel := _kernel(i, size):
            return Costs((kernel._replace(flops=_flops(i)),))
        if i.opcode in ("dynamic-slice", "slice", "gather", "slice-start"):
            ends = (*i.operand_shapes[:1], *i.shapes[:1])  # where it reads and writes as much as its result has
            size = sum(i.shapes[0].bytes for end in ends if end.in_hbm)
        elif i.opcode == "dynamic-update-slice":
            size = 2 * sum(s.bytes for s in i.operands[1].shapes)
        elif i.opcode == "copy-start":
            size = sum(s.bytes for s in i.shapes[:2] if s.in_hbm)
        elif i.opcode == "custom-call" and "tpu_custom_call" not in i.attributes:
            size = 0.0  # AllocateBuffer and the like
        return Costs((Operation(1, _flops(i), size, narrow=_narrow(i)),))

    def _inside(self, fusion: Instruction) -> Computation:
        return self._module.computations[fusion.attribute("calls")]

    def _fusion(self, i: Instruction) -> Costs:
        """A fusion is one operation: only what it reads and writes goes through memory."""
        inside, parts = self._inside(i), [*self._parts(i)]
        if "all-reduce-scatter" in i.name or "all-reduce-scatter" in inside.name:
            reduce = next(j for j in inside.instructions.values() if j.opcode.startswith("all-reduce"))
            return Costs(collectives=(self._collective("reduce-scatter", reduce),))
        size = sum(self._read(inside, n, operand) for n, operand in enumerate(i.operands)) + self._written(inside, i)
        narrow = next(filter(None, map(_narrow, parts)), "")
        costs = Costs((Operation(1, sum(map(_flops, parts)), size, narrow=narrow),))
        # Steps of a collective that overlaps with arithmetic are counted where it starts.
        if not (inside.name.startswith("async_collective_fusion") or i.name.startswith("async-collective-done")):
            collectives = [self._collective(kind, part) for part in parts if (kind := collective_kind(part))]
            costs = add([costs, *(Costs(collectives=(each,)) for each in collectives)])
        return costs.overlapped(fused=True) if i.name.startswith("async-collective-start") else costs

    def _parts(self, fusion: Instruction) -> Iterator[Instruction]:
        """The instructions of a fusion, and those of the fusions inside it."""
        for part in self._inside(fusion).instructions.values():
            yield from self._parts(part) if part.opcode == "fusion" else (part,)

    def _read(self, inside: Computation, number: int, operand: Instruction) -> float:
        """Bytes of an operand that a fusion reads from HBM; only the slices if it takes slices."""
        if number not in inside.parameters:
            return 0.0
        full = sum(s.bytes for s in operand.shapes if s.in_hbm)
        return min(full, self._taken(inside, inside.parameters[number]))

    def _taken(self, inside: Computation, value: Instruction) -> float:
        """Bytes of a value that its users in a fusion need; infinite if one of them needs all of it."""
        users = (i for i in inside.instructions.values() if value in i.operands)
        return sum((self._needed(inside, value, user) for user in users), 0.0)

    def _needed(self, inside: Computation, value: Instruction, user: Instruction) -> float:
        """Bytes of a value that one of its users in a fusion needs."""
        if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] is value:
            return user.shapes[0].bytes
        if user.opcode == "dynamic-update-slice" and user.operands[0] is value:
            return 0.0  # updated in place
        if collective_kind(user) or (user.is_root and user.opcode == "tuple"):
            return 0.0  # passed on
        if self._is_copy(user) and not user.is_root:
            return self._taken(inside, user)
        if user.opcode == "fusion":
            deeper = self._inside(user)
            own = (deeper.parameters.get(n) for n, operand in enumerate(user.operands) if operand is value)
            return sum(self._taken(deeper, parameter) for parameter in own if parameter)
        return math.inf

    def _is_copy(self, i: Instruction) -> bool:
        """Whether an instruction inside a fusion only changes the layout of its operand, as far as that is needed."""
        if i.opcode == "fusion":
            return all(self._is_copy(j) for j in self._inside(i).instructions.values())
        return i.opcode in ("parameter", "copy", "bitcast")

    def _written(self, inside: Computation, i: Instruction) -> float:
        """Bytes that a fusion writes to HBM."""
        total, is_tuple = 0.0, inside.root.opcode == "tuple"
        for value, shape in zip(inside.root.operands if is_tuple else [inside.root], i.shapes, strict=False):
            passed_on = is_tuple and (value.opcode == "parameter" or collective_kind(value))
            total += self._stored(value) if shape.in_hbm and not passed_on else 0.0
        return total

    def _stored(self, value: Instruction) -> float:
        """Bytes written for a value; for an update in place, those of the update."""
        if value.opcode == "dynamic-update-slice":
            return value.operands[1].shapes[0].bytes
        if value.opcode == "bitcast":
            return self._stored(value.operands[0])
        if value.opcode == "fusion":
            return self._stored(self._inside(value).root)
        return sum(s.bytes for s in value.shapes)

    def _collective(self, kind: str, i: Instruction) -> Collective:
        size = sum(s.bytes for s in i.operand_shapes)  # the input of a chip
        if kind == "all-reduce" and any(map(self._is_part_among_zeros, i.operands)):
            kind = GATHER_BY_SUM
        group = first_group(i.attributes)
        n = len(group) if group else 2
        others = (n - 1) / n
        shares = {"all-gather": n - 1, "all-reduce": 2 * others, GATHER_BY_SUM: 2 * others}
        received = size * (shares | {"reduce-scatter": others, "all-to-all": others}).get(kind, 1)
        crosses = len({device // self._chips_per_slice for device in group}) > 1
        return Collective(kind, "dcn" if crosses else "ici", 1, i.opcode.endswith("-start"), received if n > 1 else 0.0)

    def _is_part_among_zeros(self, value: Instruction) -> bool:
        """Whether a value is one slice written into an array that is otherwise the same on all chips."""
        while value.opcode in ("bitcast", "copy"):
            value = value.operands[0]
        if value.opcode == "fusion":
            return self._is_part_among_zeros(self._inside(value).root)
        return value.opcode == "dynamic-update-slice"


def collective_kind(i: Instruction) -> str | None:
    """The kind of a collective (all-gather, ...), or None; only the start of an asynchronous pair has one."""
    kind = i.opcode.removesuffix("-start")
    return kind if kind in _COLLECTIVES else None


def first_group(attributes: str) -> list[int]:
    """The first group, or the first pair, of chips that a collective connects; empty if it names none.

    source_target_pairs={{1,0},{0,1}}                         1 0
    replica_groups={{0,2},{1,3}}                              0 2
    replica_groups=[2,2]<=[4]                                 0 1        range(4) as [2, 2], whose rows are groups
    replica_groups=[2,2]<=[2,2]T(1,0)                         0 2        the same of its transpose
    replica_groups=mesh['x'=2,'y'=2] {'y'}                    0 1        along an axis of a mesh
    """
    if found := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", attributes):
        return [int(found[1]), int(found[2])]
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return [int(x) for x in found[1].split(",")]
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        groups, dims, order = (tuple(int(x) for x in part.split(",")) if part else () for part in found.groups())
        devices = np.arange(math.prod(dims)).reshape(dims)
        return (devices.transpose(order) if order else devices).reshape(groups)[0].tolist()
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\](?:[^{]*)\{([^}]*)\}", attributes):
        axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        named = re.findall(r"'([^']+)'", found[2])
        devices = np.arange(math.prod(axes.values())).reshape(tuple(axes.values()))
        return devices[tuple(slice(None) if name in named else 0 for name in axes)].ravel().tolist()
    return []


def _flops(i: Instruction) -> float:
    if i.opcode in ("convolution", "dot"):
        sizes = [operand.shapes[0].elements for operand in i.operands[:2]]
        batch = _batch(i.attributes)
        return 2 * math.sqrt(math.prod(sizes) * i.shapes[0].elements / batch)
    if i.name.startswith(_RAGGED):  # [M, K] x [E, K, N]; shapes of its gradients multiply to the same
        arrays = [*(s for s in i.operand_shapes if s.dtype in ("bf16", "f32")), i.shapes[0]]
        experts = max(s.dims[0] for s in arrays if len(s.dims) == 3)
        named = re.search(r"\bpairs_(\d+)_of_(\d+)\b", i.attributes)  # as model/experts.py calls it
        share = int(named[1]) / int(named[2]) if named else 1
        return share * 2 * math.sqrt(math.prod(s.elements for s in arrays) / experts)
    kernel = _kernel(i, 0.0)
    return kernel.flops if kernel else 0.0


def _narrow(i: Instruction) -> str:
    dtypes = [shape.dtype for shape in i.operand_shapes[:2]]
    is_narrow = i.opcode in ("convolution", "dot") and dtypes in ([dtype] * 2 for dtype in _NARROW)
    return dtypes[0] if is_narrow else ""


def _kernel(i: Instruction, size: float) -> Operation | None:
    """An attention kernel, which moves `size` bytes, or another kernel that declares its costs; otherwise None."""
    if i.opcode != "custom-call":
        return None
    head = i.attributes.split("custom_call_config")[0]
    name = next((name for name in _KERNEL_PRODUCTS if name in i.name or name in head), None)
    if name is None:
        declared = dict(re.findall(r'"(flops|bytes_accessed)":"(\d+)"', i.attributes))
        return Operation(1, float(declared["flops"]), float(declared["bytes_accessed"])) if declared else None
    query, key = [s.dims for s in i.operand_shapes if s.dtype in ("bf16", "f32")][:2]  # [..., T, H]
    tiles = {key: int(size) for key, size in re.findall(r'\\"(block_\w+)\\": (\d+)', head)}
    suffix = name.removeprefix("splash_mha").removesuffix("_fwd")
    sides = tiles.get(f"block_q{suffix}", 1), tiles.get(f"block_kv{suffix}", 1)
    ours = re.search(r"\brows_(\d+)_tiles_(\d+)\b", head)  # the name that model/splash.py gives to its kernels
    if ours:
        rows, worked_on = int(ours[1]), int(ours[2])
        keys = worked_on * math.prod(sides) / (query[-2] // rows)
    else:
        keys = keys_seen(key[-2], *sides)
    products = _KERNEL_PRODUCTS[name]
    if name == "splash_mha_dkv" and 'use_fused_bwd_kernel\\": true' in head:
        products += 1  # it also computes the gradient of the queries, from the same scores
    return Operation(1, products * 2 * math.prod(query) * keys, size, width=query[-1])


def keys_seen(length: int, queries: int, keys: int) -> float:
    """Mean number of keys that a causal kernel processes for a query, with tiles of `queries` x `keys`."""
    rows = range(queries, length + 1, queries)
    return sum(min(-(-end // keys) * keys, length) for end in rows) / len(rows)


def _batch(attributes: str) -> int:
    """Size of the batch axes of a matrix product, which the compiler writes as dilated windows."""
    found = re.search(r"window=\{size=([\dx]+)[^}]*lhs_dilate=([\dx]+)", attributes)
    if not found:
        return 1
    size, dilate = ([int(x) for x in part.split("x")] for part in found.groups())
    return math.prod(s for s, d in zip(size, dilate, strict=True) if s == d and d > 1)

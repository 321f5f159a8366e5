"""What an optimised XLA program moves, read from its text.

Loops count as often as they run, a conditional counts as its dearest branch,
and only arrays in a device's main memory count: on-chip memory is marked S(n)
in the layout. So a weight that is fetched ahead of its use counts once, where
`cost_analysis` adds up every copy of it.
"""

from collections.abc import Iterator
import dataclasses
import functools
import math
import re

_ITEM_BYTES = {
    "s4": 0.5, "u4": 0.5, "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2,
    "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8,
    "f64": 8}
# They move nothing, or what they run is counted in their stead.
_FREE = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant",
         "iota", "custom-call", "while", "conditional", "call",
         "partition-id", "after-all", "opt-barrier")
# They touch a part of their first operand.
_SPARSE = ("dynamic-slice", "dynamic-update-slice", "gather", "scatter",
           "slice")
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # operand that is new
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_LINE = re.compile(
    r"^ +(ROOT )?(%\S+) = (.*?) ([a-z][a-z-]*)\((.*?)\)(.*)$", re.M)
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Op:
  """One operation of a computation.

  Attributes:
    name: with its percent sign.
    shape: of its result, with layout.
    kind: the operation.
    operands: names.
    value: what stands in their place, of a constant or a parameter.
    rest: the text after the operands.
    root: whether it is the computation's result.
  """

  name: str
  shape: str
  kind: str
  operands: tuple[str, ...]
  value: str
  rest: str
  root: bool

  def called(self, attribute: str) -> str:
    """The computation that an attribute names."""
    return re.search(attribute + r"=(%[\w.-]+)", self.rest)[1]


def sizes(shape: str, memory: bool = True) -> list[int]:
  """Bytes of the arrays of a shape; of those on the chip 0 if `memory`."""
  return [0 if memory and "S(" in layout else
          math.ceil(_ITEM_BYTES.get(kind, 0) * math.prod(
              map(int, re.findall(r"\d+", dims))))
          for kind, dims, layout in _ARRAY.findall(shape)]


def shapes(shape: str) -> list[tuple[int, ...]]:
  """The sizes of the axes of each array of a shape."""
  return [tuple(map(int, re.findall(r"\d+", dims)))
          for _, dims, _ in _ARRAY.findall(shape)]


class Program:
  """An optimised program.

  Attributes:
    computations: the operations of each, in order.
    entry: the name of the first.
  """

  def __init__(self, text: str):
    self.computations, self.entry = {}, None
    for head, body in re.findall(
        r"^((?:ENTRY )?%[\w.-]+) \(.*?\{\n(.*?)^\}", text, re.M | re.S):
      name = head.removeprefix("ENTRY ")
      self.entry = name if head != name else self.entry
      self.computations[name] = [
          Op(op, shape, kind, tuple(re.findall(r"%[\w.-]+", operands)),
             operands, rest, bool(root))
          for root, op, shape, kind, operands, rest in _LINE.findall(body)]

  @functools.cached_property
  def _by_name(self):
    return {where: {op.name: op for op in ops}
            for where, ops in self.computations.items()}

  @functools.cached_property
  def executed(self) -> list[tuple[int, str, Op]]:
    """`(how often, computation, operation)` of all that runs."""
    return list(self._run(self.entry, 1))

  @property
  def loops(self) -> int:
    """How many loops are entered."""
    return sum(times for times, _, op in self.executed if op.kind == "while")

  @property
  def cycles(self) -> int:
    """The compiler's own estimate, where it made one."""
    return sum(times * int(found[1]) for times, _, op in self.executed
               if (found := _CYCLES.search(op.rest)))

  def traffic(self, times: int, where: str, op: Op) -> int:
    """Bytes that an operation of `executed` moves to and from main memory."""
    return times * sum(self.read(where, op) + self.written(where, op))

  @functools.cached_property
  def total(self) -> int:
    """Bytes that the program moves to and from main memory.

    Custom calls, such as kernels, are not looked into.
    """
    return sum(self.traffic(*one) for one in self.executed)

  def _run(self, name: str, times: int) -> Iterator[tuple[int, str, Op]]:
    for op in self.computations[name]:
      yield times, name, op
      if op.kind == "while":
        yield from self._run(op.called("body"), times * self._trips(op))
      elif op.kind in ("call", "async-start"):
        yield from self._run(
            op.called("to_apply" if op.kind == "call" else "calls"), times)
      elif op.kind == "conditional":
        listed = re.search(r"branch_computations=\{(.*?)\}", op.rest)
        branches = (re.findall(r"%[\w.-]+", listed[1]) if listed else
                    [op.called("true_computation"),
                     op.called("false_computation")])
        yield from max((list(self._run(b, times)) for b in branches),
                       key=lambda ops: sum(self.traffic(*one) for one in ops))

  def _trips(self, loop: Op) -> int:
    """How often a counted loop runs; others count once."""
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest)
    if known:
      return int(known[1])
    ops = self.computations[loop.called("condition")]
    ends = [int(op.value) for op in ops
            if op.kind == "constant" and op.value.isdigit()]
    counted = any(op.root and "direction=LT" in op.rest for op in ops)
    return ends[0] if counted and len(ends) == 1 else 1

  def read(self, where: str, op: Op) -> list[int]:
    """Bytes of what an operation reads from main memory."""
    operands = self.operands(where, op)
    if op.kind in _FREE or op.kind.endswith("-done"):
      return []
    if op.kind == "slice-start":  # (operand, slice, flag)
      return [sizes(op.shape, memory=False)[-2]]
    if op.kind == "fusion":
      return self._fusion_reads(op, operands)
    if op.kind in _SPARSE:
      part = 0 if op.kind in _IN_PLACE else sum(
          sizes(op.shape, memory=False)) * any(sizes(operands[0]))
      return sum(map(sizes, operands[1:]), [part])
    return sum(map(sizes, operands), [])

  def written(self, where: str, op: Op) -> list[int]:
    """Bytes of each array that an operation writes to main memory.

    An update in place writes what is new.
    """
    if op.kind in _FREE or op.kind.endswith("-done"):
      return []
    if op.kind == "copy-start":  # (result, operand, flag)
      return sizes(op.shape)[:1]
    if op.kind.endswith("-start"):  # its end is where it is written
      return []
    root, named = op, self._by_name[where]
    if op.kind == "fusion":
      named = self._by_name[op.called("calls")]
      [root] = [one for one in named.values() if one.root]
    results = ([named[name] for name in root.operands]
               if root.kind == "tuple" else [root])
    found = []
    for result, size in zip(results, sizes(op.shape)):
      while result.kind == "bitcast":
        result = named[result.operands[0]]
      if size and result.kind in _IN_PLACE:
        new = result.operands[_IN_PLACE[result.kind]]
        size = sum(sizes(named[new].shape, memory=False))
      found.append(size)
    return found

  def operands(self, where: str, op: Op) -> list[str]:
    """The shapes of an operation's operands."""
    named = self._by_name[where]
    return [named[name].shape for name in op.operands if name in named]

  def _fusion_reads(self, op: Op, operands: list[str]):
    """What a fusion reads; of a table of which it takes a part, the part."""
    inner = self.computations[op.called("calls")]
    users = {}
    for one in inner:
      for i, name in enumerate(one.operands):
        users.setdefault(name, []).append((i, one))

    def through(name):
      """The operations that use a value, bitcasts left out."""
      for i, one in users.get(name, []):
        if one.kind == "bitcast" and not one.root:
          yield from through(one.name)
        else:
          yield i, one

    read = []
    for one in inner:
      if one.kind != "parameter":
        continue
      whole = sizes(operands[int(one.value)])
      found = list(through(one.name))
      if sum(whole) and found and all(
          i == 0 and user.kind in _SPARSE for i, user in found):
        whole = [0 if user.kind in _IN_PLACE else
                 sum(sizes(user.shape, memory=False)) for _, user in found]
      read += whole
    return read

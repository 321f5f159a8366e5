"""Memory traffic of an optimised XLA program, computed from its HLO text.

The body of a loop is counted once per iteration. A conditional is counted as
its most expensive branch. Only arrays in the main memory of a device are
counted. The layout marks arrays in on-chip memory with S(n). So a prefetched
weight is counted once, whereas XLA's `cost_analysis` counts every copy of it.
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
# Operations that move no bytes themselves. The computations that some of these
# operations call are counted separately.
FREE = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant",
         "iota", "custom-call", "while", "conditional", "call",
         "partition-id", "after-all", "opt-barrier")
# Operations that read or write only a part of their first operand.
_SPARSE = ("dynamic-slice", "dynamic-update-slice", "gather", "scatter",
           "slice")
# Operations that update an array in place: index of the operand with new data.
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_LINE = re.compile(
    r"^ +(ROOT )?(%\S+) = (.*?) ([a-z][a-z-]*)\((.*?)\)(.*)$", re.M)
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Op:
  """Operation of a computation.

  Attributes:
    name: name of the operation, with its percent sign.
    shape: shape of the result, with layout.
    kind: opcode, such as "fusion".
    operands: names of the operands.
    value: text between the parentheses, such as the value of a constant or the
      number of a parameter.
    rest: text after the operands.
    root: True if the computation returns the result of this operation.
  """

  name: str
  shape: str
  kind: str
  operands: tuple[str, ...]
  value: str
  rest: str
  root: bool

  def called(self, attribute: str) -> str:
    """Returns the name of the computation that an attribute contains."""
    return re.search(attribute + r"=(%[\w.-]+)", self.rest)[1]


def sizes(shape: str, memory: bool = True) -> list[int]:
  """Returns the size in bytes of each array of a shape.

  If `memory` is True, the size of arrays in on-chip memory is 0.
  """
  return [0 if memory and "S(" in layout else
          math.ceil(_ITEM_BYTES.get(kind, 0) * math.prod(
              map(int, re.findall(r"\d+", dims))))
          for kind, dims, layout in _ARRAY.findall(shape)]


def shapes(shape: str) -> list[tuple[int, ...]]:
  """Returns the dimensions of each array of a shape."""
  return [tuple(map(int, re.findall(r"\d+", dims)))
          for _, dims, _ in _ARRAY.findall(shape)]


class Program:
  """Optimised XLA program.

  Attributes:
    computations: operations in program order, by the name of the computation.
    entry: name of the entry computation.
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
    """List of `(executions, computation, operation)` of the whole program."""
    return list(self._run(self.entry, 1))

  @property
  def loops(self) -> int:
    """Number of times that the program enters a loop."""
    return sum(times for times, _, op in self.executed if op.kind == "while")

  @property
  def cycles(self) -> int:
    """Sum of the compiler's cycle estimates over operations that have one."""
    return sum(times * int(found[1]) for times, _, op in self.executed
               if (found := _CYCLES.search(op.rest)))

  def traffic(self, times: int, where: str, op: Op) -> int:
    """Returns the number of bytes that an entry of `executed` moves."""
    return times * sum(self.read(where, op) + self.written(where, op))

  @functools.cached_property
  def total(self) -> int:
    """Number of bytes that the program moves to and from main memory.

    Custom calls, such as kernels, are not counted.
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
    """Returns the trip count of a loop, or 1 if it is unknown."""
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest)
    if known:
      return int(known[1])
    ops = self.computations[loop.called("condition")]
    ends = [int(op.value) for op in ops
            if op.kind == "constant" and op.value.isdigit()]
    counted = any(op.root and "direction=LT" in op.rest for op in ops)
    return ends[0] if counted and len(ends) == 1 else 1

  def read(self, where: str, op: Op) -> list[int]:
    """Returns the numbers of bytes read from main memory, by array."""
    operands = self.operands(where, op)
    if op.kind in FREE or op.kind.endswith("-done"):
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
    """Returns the numbers of bytes written to main memory, by array.

    For an update in place, only the new part is counted.
    """
    if op.kind == "copy-start":  # (result, operand, flag)
      return sizes(op.shape)[:1]
    # The results of other asynchronous operations are not counted here. For
    # async-start, `executed` contains the operations that it calls.
    if op.kind in FREE or op.kind.endswith(("-done", "-start")):
      return []
    root, named = op, self._by_name[where]
    if op.kind == "fusion":
      named = self._by_name[op.called("calls")]
      [root] = [one for one in named.values() if one.root]
    results = ([named[name] for name in root.operands]
               if root.kind == "tuple" else [root])
    return [_written_size(result, size, named)
            for result, size in zip(results, sizes(op.shape))]

  def operands(self, where: str, op: Op) -> list[str]:
    """Returns the shapes of the operands of an operation."""
    named = self._by_name[where]
    return [named[name].shape for name in op.operands if name in named]

  def _fusion_reads(self, op: Op, operands: list[str]):
    """Returns the numbers of bytes that a fusion reads.

    If the fusion uses only slices of a parameter, only these are counted.
    """
    inner = self.computations[op.called("calls")]
    users = _users(inner)
    read = []
    for parameter in (one for one in inner if one.kind == "parameter"):
      size = sizes(operands[int(parameter.value)])
      slices = _slices(list(_through(users, parameter.name)))
      read += slices if slices and sum(size) else size
    return read


def _slices(uses: list[tuple[int, Op]]) -> list[int]:
  """Returns the numbers of bytes that the uses of an array read.

  Returns [] if one of them reads the entire array.
  """
  if any(i > 0 or user.kind not in _SPARSE for i, user in uses):
    return []
  return [0 if user.kind in _IN_PLACE else sum(sizes(user.shape, memory=False))
          for _, user in uses]


def _written_size(result: Op, size: int, named: dict[str, Op]) -> int:
  """Returns the number of bytes written for a result.

  For an update in place, only the new part is counted.
  """
  while result.kind == "bitcast":
    result = named[result.operands[0]]
  if not size or result.kind not in _IN_PLACE:
    return size
  new = result.operands[_IN_PLACE[result.kind]]
  return sum(sizes(named[new].shape, memory=False))


def _users(ops: list[Op]) -> dict[str, list[tuple[int, Op]]]:
  """Returns the uses of every value, as pairs (operand number, operation)."""
  users = {}
  for op in ops:
    for i, name in enumerate(op.operands):
      users.setdefault(name, []).append((i, op))
  return users


def _through(users: dict[str, list[tuple[int, Op]]], name: str
             ) -> Iterator[tuple[int, Op]]:
  """Yields the uses of a value, and the uses of its bitcasts."""
  for i, op in users.get(name, []):
    if op.kind == "bitcast" and not op.root:
      yield from _through(users, op.name)
    else:
      yield i, op

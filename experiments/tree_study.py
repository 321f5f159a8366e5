"""Compares draft trees with draft chains of the same number of nodes.

A draft tree contains several continuations, which the target verifies in one
pass. Its root is the last generated token. This script measures the gain of
trees over chains, in tokens per target pass and in speed. It prints one row per
method, number of nodes N (including the root) and temperature. A row contains
tokens per pass, tokens per second and the speed-up over autoregressive
decoding.

  python experiments/tree_study.py
  python experiments/tree_study.py --nodes=8,64 --temperature=1
  python experiments/tree_study.py --prompts=gsm8k=test.jsonl,humaneval

Methods (--methods selects some of them):

  chain_token          chain of N - 1 tokens, token verification
  chain_block          the same chain, block verification
  specinfer            tree with independently sampled children, recursive
                       rejection sampling (SpecInfer)
  k_seq                the same trees, K-SEQ verification (SpecTr)
  without_replacement  tree with children sampled without replacement, recursive
                       rejection sampling (Sequoia)
  traversal            the same trees, traversal verification
  hybrid               tree with K children per node: the K - 1 most likely
                       tokens, and one token sampled from the others; recursive
                       rejection sampling
  top_k                tree of the most likely children; the target samples a
                       token and accepts the child with this token

--verifier adds your own rules. A rule is evaluated on every kind of draft that
provides the properties it requires, under names such as chain_mine.py:Rule and
iid_mine.py:Rule. --drafter may be your own function that returns a chain
drafter, for the methods with chains, or a `specjax.drafters.NetworkDrafter`,
whose network then drafts chains and trees of all methods.

Tree shapes: Sequoia's dynamic program computes the best shape for N nodes from
the acceptance rates of a node's first, second, ... child. These rates are
measured on separate prompts, at a root with 8 children. Two methods with the
same kind of drafts share the shapes computed for the first method. For hybrid,
the rates are measured at roots with 1 to 8 children, because its first child is
accepted more often if it has fewer siblings.

Tokens per pass: the expected number of accepted tokens is computed exactly for
every draft, without sampling noise. In the column "same drafts", methods with
the same kind of drafts are evaluated on the drafts of the first method, so they
are compared on identical drafts. The last row of a temperature (dynamic
program's choice) is the method and number of nodes with the highest predicted
speed on this machine. It can be a tree, a chain or autoregressive decoding. The
prediction uses the measured times of target passes, drafter passes and rounds.

A second table contains the rounds per sequence: the number of target passes
until --max_new_tokens or an end-of-text token, as mean and 90 % quantile over
sequences. Here each method generates its own text. The table also compares the
tokens per pass with the best possible rule of one round on the same drafts. For
chains this optimum has a closed form (see replay.py; --methods must include
chain_block). For i.i.d. trees and trees without replacement, only an upper
bound of the optimum is known (see `analysis.accepted_bound`). "at least -15 %"
means that the rule is at most 15 % below the optimum. The bounds use separate
drafts of one prompt at a time, which takes long with a large target; --nobounds
leaves them out.

--batch=B decodes B prompts together, on several devices with --mesh. In
float32, B changes the results only by rounding. Speed is not measured then,
so tokens per second, the speed-up, autoregressive decoding and the dynamic
program's choice are omitted:

  python experiments/tree_study.py --batch=16

Results of each prompt are appended to runs.jsonl in --output_dir. If the script
is killed, the same command resumes it. Output: trees.csv, trees.json (the last
line of stdout names it), and the plots trees_tokens.png and trees_speed.png.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
import pathlib
import statistics
from typing import Any
from typing import NamedTuple

from lib import common  # before jax, which takes long to import

# isort: split
from absl import flags
import jax
from lib import drafters as drafters_lib
from lib import extensions
from lib import flags as shared
from lib import models
from lib import progress
from lib.configurations import decoders
from lib.prompts import reading as prompts_lib
from lib.reports import tree_bounds
from lib.reports import tree_report as report
from lib.rollouts import batches
from lib.rollouts import resumable
from lib.rollouts import timing
import numpy as np

import specjax as sj
from specjax import interfaces
from specjax import strategies
from specjax.drafters import NetworkDrafter
from specjax.models import Pretrained
from specjax.strategies import Strategy
from specjax.utils import files

_BUDGETS = flags.DEFINE_list(
    "nodes", "4,8,16,32,64", "Sizes of the drafts (chains and trees) in nodes, "
    "at least 2, comma-separated. A size includes the root (the last generated "
    "token)")
_METHODS_WANTED = flags.DEFINE_list(
    "methods", None, "Methods to compare (kinds of drafts with their "
    "verification rules), comma-separated, such as "
    "chain_block,specinfer,traversal. The description of the script lists all "
    "methods. Default: all")
_VERIFIERS = shared.verifiers(
    [], f"Your own verification rules, as {extensions.FORM}, comma-separated. "
    "Each one is evaluated on all kinds of drafts that it can verify. Default: "
    "none")
_TEMPERATURE = shared.temperatures("0,0.6,1")
_PROMPTS = shared.prompts()
_FIELD = shared.prompt_field()
_CHAT = shared.chat()
_NUM_PROMPTS = shared.num_prompts(16)
_PROMPT_TOKENS = shared.prompt_tokens()
_NEW_TOKENS = shared.new_tokens(96)
_DRAFTER = shared.drafter(
    "Drafter: small or tiny (bundled, for the bundled target), smol (bundled, "
    f"for smollm2), {shared.PUBLISHED}, or {extensions.FORM} (your own "
    "function (target, gamma) that returns (strategy, params))")
_TARGET = shared.target()
_DTYPE = shared.dtype()
_SEED = shared.seed()
_BATCH = batches.flags()
_BOUNDS = flags.DEFINE_bool(
    "bounds", True, "Also compute upper bounds for all valid rules on the same "
    "trees. This decodes every prompt again for every kind and size of tree")
_OUTPUT_DIR = shared.output_dir("results/trees")
shared.figure_style()

_CHILDREN = 8  # children of the root when acceptance rates are measured
_DEPTH = 12  # maximum depth of a tree in tokens
_CALIBRATION_PROMPTS = 6
_CALIBRATION_ROUNDS = 32
_TRACED_BYTES = 2**28  # maximum size of the distributions of one traced call
_BASELINE, _FASTEST = report.BASELINE, report.FASTEST


def _chain(strategy: Callable[..., Strategy]):
  """Returns a function `(model, parents) -> Strategy` that drafts chains.

  A chain has as many nodes as the tree `parents`.
  """
  return lambda model, parents: strategy(model, len(parents) - 1)


# Functions `(model, parents) -> Strategy` by method name. Methods of one group
# have the same drafts. All of them are also evaluated on the rollouts of the
# first method of the group.
_CHAINS = {"chain_token": _chain(strategies.speculative_sampling),
           "chain_block": _chain(strategies.block_verification)}
_GROUPS = (
    _CHAINS,
    {"specinfer": strategies.specinfer, "k_seq": strategies.spectr},
    {"without_replacement": strategies.sequoia,
     "traversal": strategies.traversal},
    {"hybrid": strategies.hybrid_tree},
    {"top_k": strategies.top_k_tree},
)
_CHAIN, _HYBRID = "chain", "hybrid"
_KINDS = (_CHAIN, "iid", "without_replacement", _HYBRID, "top_k")  # of _GROUPS
# Kinds of trees with a known bound of the best rule. The bound requires that
# the first child of every node is a sample of the drafter's distribution.
_BOUNDED = _KINDS[1:3]
_METHODS = {name: make for group in _GROUPS for name, make in group.items()}


class _Group(NamedTuple):
  """Methods with the same drafts.

  Attributes:
    kind: kind of drafts, an entry of `_KINDS`.
    methods: functions `parents -> Strategy` by method name.
  """

  kind: str
  methods: dict[str, Callable[[tuple[int, ...]], Strategy]]

  @property
  def first(self) -> str:
    """Name of the method that generates the shared drafts."""
    return next(iter(self.methods))

  @property
  def provided(self) -> frozenset[str]:
    """Properties of the drafts. Those of trees have siblings."""
    parents = (-1, 0) if self.kind == _CHAIN else (-1, 0, 0)
    return interfaces.capabilities(self.methods[self.first](parents).drafter)

  def rule(self, name: str) -> sj.Verifier:
    return self.methods[name]((-1, 0)).verifier

  def is_valid(self, name: str) -> bool:
    """Returns True if bounds for all valid rules apply to the method's rule."""
    return self.rule(name).lossless and not self.rule(name).remembers


def _wanted() -> list[str]:
  """Returns the names of --methods, or of all methods."""
  wanted = _METHODS_WANTED.value
  if wanted == []:
    raise ValueError("--methods is empty; set at least one method, or leave "
                     "--methods out")
  for name in wanted or ():
    if name not in _METHODS:
      raise ValueError(f"--methods contains {name!r}; choose among "
                       f"{', '.join(_METHODS)}")
  return wanted or list(_METHODS)


def _groups(drafter: drafters_lib.Loaded, rules: dict[str, sj.Verifier]
            ) -> list[_Group]:
  """Returns the groups of --methods, with the rules of --verifier.

  Args:
    drafter: drafter of all methods.
    rules: further rules by name.

  Raises:
    ValueError: the drafter cannot draft for a method, or no method drafts for a
      rule.
  """
  wanted, adapt = _wanted(), _adapted(drafter)
  is_chain = not isinstance(drafter.strategy.drafter, NetworkDrafter)
  unfit = [name for name in wanted if is_chain and name not in _CHAINS]
  if unfit and _METHODS_WANTED.value:
    raise ValueError(
        f"--methods contains {unfit[0]}, whose trees need a network (a "
        f"specjax.drafters.NetworkDrafter), and --drafter={drafter.name} is "
        f"{interfaces.kind_of(drafter.strategy.drafter)}, which drafts chains; "
        f"set --methods={','.join(_CHAINS)}")
  groups = [_Group(kind, {name: adapt(make) for name, make in group.items()
                          if name in wanted and name not in unfit})
            for kind, group in zip(_KINDS, _GROUPS)]
  groups = [group for group in groups if group.methods]
  for label, rule in rules.items():
    fitting = [group for group in groups
               if group.provided.issuperset(rule.requires)]
    if not fitting:
      raise ValueError(
          f"--verifier contains {label}, which requires a drafter that is "
          f"{', '.join(rule.requires)}, and no method of --methods with "
          f"--drafter={drafter.name} provides it; leave one of them out")
    for group in fitting:
      first = group.methods[group.first]
      group.methods[f"{group.kind}_{label}"] = (
          lambda parents, first=first, rule=rule: first(parents)._replace(
              verifier=rule))
  return groups


def _adapted(drafter: drafters_lib.Loaded):
  """Returns a function that makes a method draft with a drafter.

  It maps a function `(model, parents) -> Strategy` to `parents -> Strategy`.
  """
  part, target = drafter.strategy.drafter, drafter.target.model
  if drafter.member is not None:
    return lambda make: functools.partial(make, drafter.member.model)
  if isinstance(part, NetworkDrafter):
    def with_network(strategy):
      return strategy._replace(drafter=dataclasses.replace(
          part, shape=strategy.drafter.shape))
    return lambda make: lambda parents: with_network(make(target, parents))
  if not drafter.is_chain or part.with_gamma(1) is None:
    raise ValueError(
        f"--drafter={drafter.name} drafts trees of its own shape, and this "
        "study chooses the shapes; give a specjax.drafters.NetworkDrafter, a "
        "drafter of chains with a field gamma, or use arena.py")
  return lambda make: lambda parents: make(target, parents)._replace(
      drafter=part.with_gamma(len(parents) - 1))


class _Setting:
  """Target and drafter, with measurements of acceptance rates and costs."""

  def __init__(self, target: Pretrained, drafter: drafters_lib.Loaded,
               groups: list[_Group], calibration: list[list[int]],
               budgets: list[int], longest: int, eos: tuple[int, ...] | None,
               batch: decoders.Batch | None):
    self.target, self.drafter, self.eos = target, drafter, eos
    self.groups, self.batch = groups, batch
    self._methods = {name: make for group in groups
                     for name, make in group.methods.items()}
    self._kinds = {name: group.kind for group in groups
                   for name in group.methods}
    self._calibration = calibration
    self._limit = longest + _NEW_TOKENS.value
    self.capacity = self._limit + max(budgets)
    self.params = batches.placed(
        batch, self.decoder(1.0, groups[0].first, (-1, 0)), drafter.params)
    self.pass_seconds = self.level_seconds = None
    if batch is None:
      self._measure(budgets)

  def _measure(self, budgets: list[int]):
    """Measures the seconds of passes of the target and of the drafter."""
    progress.say(f"timing passes over {', '.join(map(str, budgets))} nodes")
    used = self._limit - _NEW_TOKENS.value // 2
    seconds = lambda member, nodes: timing.median(timing.passes(
        member.model, member.params, self.capacity, used, nodes))
    self.pass_seconds = {n: seconds(self.target, n) for n in (1, *budgets)}
    if self.drafter.member is not None:
      self.level_seconds = seconds(self.drafter.member, 4)
    else:
      chain = tuple(range(-1, min(budgets) - 1))
      self.level_seconds = timing.median(timing.drafts(
          self.decoder(1.0, self.groups[0].first, chain), self.params,
          self._calibration[0], self.capacity))

  def decoder(self, temperature: float, name: str | None,
              parents: tuple[int, ...], observers: Sequence[str] = ()):
    """Returns the decoder of a method, or an autoregressive decoder.

    Args:
      temperature: sampling temperature of both models.
      name: method name. None: autoregressive decoding.
      parents: parent of every node of the draft tree.
      observers: names of methods whose rules are evaluated on the same drafts.
    """
    strategy = (self._methods[name](parents) if name
                else strategies.autoregressive())
    return strategy.decoder(
        self.drafter.model, eos=self.eos,
        observers=tuple(self._methods[other](parents).verifier
                        for other in observers),
        transform=sj.LogitsTransform(temperature=temperature))

  def acceptance(self, temperature: float, name: str):
    """Returns the acceptance rates of a method, for `trees.sequoia_tree`.

    The result is `[K]`, one rate per child of a node. If the rates depend on
    the number of siblings, it is `[K, K]`, with one row per number of children.
    """
    progress.say(f"measuring {name} at temperature {temperature:g}")
    if self._kinds[name] != _HYBRID:
      return self._below_root(temperature, name, 1 if (
          self._kinds[name] == _CHAIN) else _CHILDREN)
    rows = [self._below_root(temperature, name, children)
            for children in range(1, _CHILDREN + 1)]
    return np.stack([np.pad(row, (0, _CHILDREN - len(row))) for row in rows])

  def _below_root(self, temperature: float, name: str, children: int):
    """Returns `[K]`, the acceptance rate of each of K children of the root.

    The rate of a child is the mean probability, over the calibration prompts,
    that verification of a root with K children ends at this child.
    """
    star = sj.trees.full_tree((children,))
    decoder = self.decoder(temperature, name, star)
    state = decoder.prefill(self.params, self._calibration, jax.random.key(1),
                            limits=self._limit)
    law = jax.vmap(jax.vmap(decoder.verifier.law))
    stops_of = jax.jit(lambda *args: law(*args).stop)
    rounds, stops = self._traced_rounds(decoder), []
    for _ in range(_CALIBRATION_ROUNDS // rounds):
      state, stats, trace = decoder.decode(
          self.params, state, rounds, traced=True)
      stop = np.asarray(stops_of(trace.draft, trace.target_probs), np.float64)
      stops.append(stop[np.asarray(stats.active)])
    return np.concatenate(stops).mean(0)[1:]

  def _traced_rounds(self, decoder: sj.Decoder):
    """Returns the number of rounds per traced call, which limits its memory."""
    laws = 3 * decoder.num_nodes * len(self._calibration)  # p, q and residual
    size = 4 * laws * self.target.model.vocab_size
    rounds = _CALIBRATION_ROUNDS
    while rounds > 1 and rounds * size > _TRACED_BYTES:
      rounds //= 2
    return rounds

  def round_seconds(self, temperature: float, name: str,
                    parents: tuple[int, ...]):
    """Returns the seconds of a round minus the seconds of its model passes.

    The result is the median over calibration prompts, and at least 0.
    """
    rollout = decoders.DecoderRows(
        self.decoder(temperature, name, parents), self.params,
        _NEW_TOKENS.value, self.capacity)
    first, *others = self._calibration
    rollout.decode(first, 0, 0)
    runs = [rollout.decode(prompt, 0, 0) for prompt in others or [first]]
    depth = max(sj.trees.depths(parents))
    rest = [run["seconds"] / run["rounds"] - self.pass_seconds[len(parents)]
            - depth * self.level_seconds for run in runs]
    return max(0.0, statistics.median(rest))


def _plan(setting: _Setting, temperature: float, budgets: list[int]):
  """Returns the trees of a temperature, `{configuration: (parents, method)}`.
  """
  plan, choices = {}, []
  if setting.batch is None:
    plan[_BASELINE] = (-1,), None
    choices.append((plan[_BASELINE], 1 / setting.pass_seconds[1]))
  for group in setting.groups:
    trees, predicted = _plan_group(setting, temperature, group, budgets)
    choices += predicted
    plan |= {f"{name} {n}": (parents, name)
             for name in group.methods for n, parents in trees.items()}
  if choices:
    plan[_FASTEST], _ = max(choices, key=lambda choice: choice[1])
  return plan


def _plan_group(setting: _Setting, temperature: float, group: _Group,
                budgets: list[int]):
  """Returns `{budget: parents}` of a group, and the results of `_fastest`.

  The first method of a group determines the trees. If latency is not measured,
  `_fastest` is not called, so the acceptance of the other methods is not
  needed.
  """
  timed = setting.batch is None
  depth = None if group.kind == _CHAIN else _DEPTH
  rates = {name: setting.acceptance(temperature, name)
           for name in (group.methods if timed else [group.first])}
  trees = {n: sj.trees.sequoia_tree(rates[group.first], n, depth)
           for n in budgets}
  return trees, [
      _fastest(setting, temperature, name, acceptance, trees[min(budgets)],
               depth) for name, acceptance in rates.items() if timed]


def _fastest(setting: _Setting, temperature: float, name: str,
             acceptance: np.ndarray, smallest: tuple[int, ...],
             depth: int | None):
  """Returns ((parents, method), predicted tokens per second) of a method.

  Args:
    setting: measured costs.
    temperature: sampling temperature of both models.
    name: method name.
    acceptance: acceptance rates of the method.
    smallest: parents of the tree with which the overhead is measured.
    depth: maximum depth of the tree, or None.
  """
  overhead = setting.round_seconds(temperature, name, smallest)
  parents = sj.trees.best_tree(
      acceptance, setting.pass_seconds, setting.level_seconds,
      round_seconds=overhead, depth=depth)
  if len(parents) == 1:
    return (parents, name), 0.0
  seconds = (setting.pass_seconds[len(parents)] + overhead
             + max(sj.trees.depths(parents)) * setting.level_seconds)
  return (parents, name), sj.trees.expected_tokens(parents,
                                                   acceptance) / seconds


def _plans(setting: _Setting, temperatures: list[float], budgets: list[int],
           path: pathlib.Path):
  """Returns the plan of every temperature.

  The plans are stored in the JSON file `path`, from which a killed study
  resumes.
  """
  plans = files.read_json(path, "delete it") if path.exists() else {}
  for temperature in temperatures:
    if f"{temperature:g}" not in plans:
      plans[f"{temperature:g}"] = _plan(setting, temperature, budgets)
      files.write_json(path, plans)
  return plans


def _variants(setting: _Setting, plans: dict[str, Any], temperature: float,
          budget: int):
  """Returns `{configuration: DecoderRows}` of a node budget.

  The baseline and the dynamic program's choice are part of every budget.
  """
  observers = {group.first: list(group.methods)[1:]
               for group in setting.groups}
  variants, readers = {}, {}
  for variant, (parents, name) in plans[f"{temperature:g}"].items():
    if variant in (_BASELINE, _FASTEST) or variant.split()[1] == str(budget):
      decoder = setting.decoder(temperature, name, tuple(parents),
                                observers.get(name, ()))
      # The prefill depends neither on the tree nor on the rule.
      kind = sj.interfaces.kind_of(decoder.drafter)
      reader = readers.setdefault(kind, decoders.Reader(
          decoder, setting.params, setting.capacity,
          memory=batches.window(setting.batch) or 1))
      variants[variant] = decoders.DecoderRows(
          decoder, setting.params, _NEW_TOKENS.value, setting.capacity,
          reader=reader, batch=setting.batch)
  return variants


def _bounds(setting: _Setting, plans: dict[str, Any], temperatures: list[float],
            budgets: list[int], read: prompts_lib.Prompts, path: pathlib.Path):
  """Returns `{"METHOD NODES at TEMPERATURE": bounds}`.

  The bounds are stored in the JSON file `path`, from which a killed study
  resumes.
  """
  found = files.read_json(path, "delete it") if path.exists() else {}
  for temperature in temperatures:
    for group in setting.groups:
      valid = [name for name in group.methods if group.is_valid(name)]
      for n in budgets if group.kind in _BOUNDED else ():
        keys = [f"{name} {n} at {temperature:g}" for name in valid]
        if keys[0] in found:
          continue
        progress.say(f"bounding {', '.join(valid)} with {n} nodes")
        parents = tuple(plans[f"{temperature:g}"][f"{group.first} {n}"][0])
        larger, nodes = tree_bounds.extended(parents)
        judged = tree_bounds.judge(
            setting.decoder(temperature, group.first, larger), parents, nodes,
            [group.rule(name) for name in valid], setting.params, read.all,
            _NEW_TOKENS.value, _SEED.value)
        found |= zip(keys, tree_bounds.columns(judged, read.clusters))
        files.write_json(path, found)
  return found


def _cells(groups: list[_Group], plan: dict[str, Any], budgets: list[int]):
  """Returns the configurations of a plan, in the order of the table.

  Returns:
    A list of tuples: method, configuration, configuration that generates the
    shared drafts, index of the method's rule among the rules evaluated on these
    drafts, and index of the best possible rule or None.
  """
  best = lambda group, name: (
      list(group.methods).index("chain_block")
      if "chain_block" in group.methods and group.is_valid(name) else None)
  cells = [(name, f"{name} {n}", f"{group.first} {n}", law, best(group, name))
           for group in groups for n in budgets
           for law, name in enumerate(group.methods)]
  return cells + [(name, name, name, 0, None)
                  for name in (_BASELINE, _FASTEST) if name in plan]


def _rows(groups: list[_Group], runs: dict[tuple, dict[str, dict[str, Any]]],
          plans: dict[str, Any], bounds: dict[str, Any],
          temperatures: list[float], budgets: list[int],
          clusters: Sequence[str]):
  rows = []
  for temperature in temperatures:
    plan = plans[f"{temperature:g}"]
    for name, variant, *places in _cells(groups, plan, budgets):
      mine = [variants for unit, variants in runs.items()
              if unit[1] == temperature and variant in variants]
      parents = plan[variant][0]
      rows.append({"method": name, "nodes": len(parents),
                   "temperature": temperature,
                   **report.figures(mine, variant, *places, clusters),
                   **bounds.get(f"{variant} at {temperature:g}",
                                tree_bounds.UNKNOWN),
                   "parents": list(parents)})
  return rows


def _load(budgets: list[int], temperatures: list[float],
          batch: decoders.Batch | None):
  """Loads the models, and returns the `_Setting` and the prompts."""
  _wanted()  # rejects invalid names early
  rules = common.verifiers("--verifier", _VERIFIERS.value) if (
      _VERIFIERS.value) else {}
  target, loaded, tokenizer = drafters_lib.load(
      _TARGET.value, [_DRAFTER.value], dtype=_DTYPE.value, same_tokens=True)
  [drafter] = loaded.values()
  groups = _groups(drafter, rules)
  read = prompts_lib.read(
      tokenizer, _PROMPTS.value, field=_FIELD.value, count=_NUM_PROMPTS.value,
      tokens=_PROMPT_TOKENS.value, seed=_SEED.value, chat=_CHAT.value,
      extra=_CALIBRATION_PROMPTS)
  eos = models.ends(target, tokenizer) if _CHAT.value else None
  prompts_lib.check_room(read.longest, _NEW_TOKENS.value, *min(
      (target.model.context_length, "target"),
      (drafter.strategy.drafter.context_length, "drafter"),
      key=lambda pair: pair[0]))
  setting = _Setting(
      target, drafter, groups, read.extra, budgets, read.longest, eos, batch)
  for temperature in temperatures:  # rejects invalid values early
    setting.decoder(temperature, groups[0].first, (-1, 0))
  return setting, read


def _fingerprint(setting: _Setting, read: prompts_lib.Prompts,
                 budgets: list[int]) -> str:
  """Returns a hash of the parameters and settings of the rollouts."""
  drafter = setting.drafter
  names = [name for group in setting.groups for name in group.methods]
  own = [group.rule(name) for group in setting.groups
         for name in group.methods if name not in _METHODS]
  return resumable.fingerprint(
      setting.params, setting.target.model, drafter.member.model
      if drafter.member else drafter.strategy.drafter, budgets, sorted(names),
      _NEW_TOKENS.value, _SEED.value, setting.eos, read.extra, read.longest,
      *(["no times"] if setting.batch else ()), *([own] if own else ()))


def main():
  budgets = common.draft_lengths("--nodes", _BUDGETS.value, least=2)
  temperatures = common.numbers("--temperature", _TEMPERATURE.value)
  setting, read = _load(budgets, temperatures, batches.settings(_BATCH))
  prompts = read.all
  output_dir = common.output_directory(_OUTPUT_DIR.value, "study")
  common.claim(output_dir, "trees")
  fingerprint = _fingerprint(setting, read, budgets)
  units = [(fingerprint, t, n, i, resumable.digest(row)) for t in temperatures
           for n in budgets for i, row in enumerate(prompts)]
  plans = _plans(setting, temperatures, budgets,
                 output_dir / f"plan-{fingerprint}.json")
  runs = resumable.run(
      units, lambda unit: (prompts[unit[3]], _SEED.value, unit[3]),
      lambda group: _variants(setting, plans, *group),
      output_dir / "runs.jsonl", group_of=lambda unit: unit[1:3],
      window=batches.window(setting.batch), new_tokens=_NEW_TOKENS.value)
  bounds = {} if not _BOUNDS.value else _bounds(
      setting, plans, temperatures, budgets, read, output_dir /
      f"bounds-{resumable.fingerprint(fingerprint, prompts)}.json")
  rows = _rows(setting.groups, runs, plans, bounds, temperatures, budgets,
               read.clusters)
  report.print_table(rows)
  report.write(output_dir, rows)
  print(f"wrote trees.csv and figures to {output_dir}")
  common.finish(output_dir, "trees", {
      "rows": rows, "source": read.source, "pass_seconds": setting.pass_seconds,
      "level_seconds": setting.level_seconds})


if __name__ == "__main__":
  common.run(main)

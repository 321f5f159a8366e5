"""Flags and decoder of generate.py and chat.py.

  _SPECULATION = speculation.Speculation()  # defines the flags
  ...
  session = _SPECULATION.load()
"""

import dataclasses
import sys
from typing import Any
from typing import NamedTuple

from absl import flags

from lib import common
from lib import drafters
from lib import extensions
from lib import flags as shared
from lib import meshes
from lib import models
from lib import progress
from lib.configurations import compositions
from lib.configurations import constrained
from lib.configurations import copies
from lib.configurations import stops
from lib.prompts import reading as prompts
from lib.prompts import streaming
import specjax as sj
from specjax.data import Tokenizer
from specjax.decoding.placement import Placement
from specjax.models import Pretrained
from specjax.utils import files

# `--help` lists a flag under the script that defines it, not under this file.
flags.disclaim_key_flags()

_PUBLISHED = ("Default: the setting in the target's generation_config.json or "
              "GGUF file, otherwise ")


class Session(NamedTuple):
  """Decoder of one sequence, with all that its use requires.

  Attributes:
    target: target model.
    tokenizer: tokenizer of the target.
    decoder: decoder with the drafter.
    params: parameters of the decoder.
    placement: distribution over a mesh, or None for one device.
    writer: writer that generates text with the decoder.
    room: largest number of tokens of a prompt.
    context: name of the context that limits the prompt, for error messages.
  """

  target: Pretrained
  tokenizer: Tokenizer
  decoder: sj.Decoder
  params: Any
  placement: Placement | None
  writer: streaming.Writer
  room: int
  context: str


class Speculation:
  """Flags of target, drafter, sampling and output. The attributes are flags."""

  def __init__(self) -> None:
    """Defines the flags."""
    self.keep_last = flags.DEFINE_bool(
        "keep_last", False, "Truncate input that exceeds the context length: "
        "of a prompt, keep the last tokens; of a conversation, keep the last "
        "exchanges. Default: such input is an error")
    self.system = flags.DEFINE_string(
        "system", None, "System message at the start of the conversation. "
        "Default: the system message of the chat template")
    self.target = shared.target()
    self.drafter = shared.drafter(
        "Source of the draft tokens. Bundled with specjax: small, tiny (draft "
        f"models), {', '.join(sj.zoo.HEADS)} for the bundled target; "
        f"{', '.join((*sj.zoo.FOR_SMOLLM2, *sj.zoo.HEADS_FOR_SMOLLM2))} for "
        f"smollm2. Other draft models: {shared.PUBLISHED}, or itself (a copy "
        "of the target, changed by --quantize or --draft_cache). Trained "
        "heads: an --output_dir of train_drafter.py, or a directory of a "
        "published drafter (Medusa, Hydra, EAGLE, MTP, DFlash, DSpark). "
        f"Drafters without training, and compositions: {compositions.HELP}. "
        "Decoding without drafts: none. Default: small for the bundled "
        "target, smol for smollm2, none for other targets",
        default=None)
    self.tail = flags.DEFINE_bool(
        "tail", False, "For a cascade --drafter=a+b, in which a drafts for b: "
        "append tokens that a drafts directly for the target to the tokens of "
        "b")
    self.vocabulary = flags.DEFINE_enum(
        "vocabulary", "auto", ["auto", "intersection", "strings"],
        "Method for a draft model whose vocabulary differs from the target's. "
        "intersection: the draft model proposes only tokens that both "
        "vocabularies contain. strings: the draft is decoded to text, and the "
        "text is encoded with the target's tokenizer. auto: intersection if "
        "the vocabularies differ, no method if they are equal")
    self.draft_vocabulary = shared.draft_vocabulary()
    self.vocabulary_data = shared.vocabulary_data(self.draft_vocabulary)
    self.dtype = shared.dtype()
    self.quantize = flags.DEFINE_enum(
        "quantize", None, list(copies.BITS), "Precision to which the weights "
        "of the draft model are quantised (8 or 4 bits). Default: not "
        "quantised")
    self.quantize_target = flags.DEFINE_enum(
        "quantize_target", None, list(copies.BITS), "Precision to which the "
        "target's weights are quantised (8 or 4 bits). The output then "
        "follows the distribution of the quantised target. Default: not "
        "quantised")
    self.quantize_group = shared.requires(flags.DEFINE_integer(
        "quantize_group", None, "Number of consecutive input channels of a "
        "weight matrix that share a quantisation scale, such as 64; requires "
        "--quantize or --quantize_target. Default: one scale per output "
        "channel", 1), self.quantize, self.quantize_target)
    self.draft_cache = flags.DEFINE_string(
        "draft_cache", None, "Kind of smaller KV cache for the draft model: "
        f"{copies.CACHES}. int8 and int4 quantise keys and values; streaming "
        "stores only the first tokens (sinks) and a window of the last tokens. "
        "Default: a full cache")
    self.verifier = flags.DEFINE_string(
        "verifier", None, "Verification rule, which decides how many draft "
        "tokens are accepted. For chains: token, block, greedy_block, top_2. "
        "For trees: recursive, k_seq, traversal, target_walk, typical. For "
        "both: coupled, in which target and drafter draw with the same noise, "
        "so that the output depends on --seed and not on the drafter or its "
        "flags. typical and top_2 are lossy: they change the output "
        "distribution. Your own: "
        f"{extensions.FORM}. Default: the usual rule of the drafter, such as "
        "block for a draft model and target_walk for a tree of the most "
        "likely tokens")
    self.gamma = shared.gamma(6, "Draft length gamma: number of tokens "
        "drafted as a chain before each target call. Drafters with fewer "
        "heads or look-ahead tokens draft fewer tokens")
    self.nodes = shared.nodes(16)
    self.stop = stops.flag()
    self.datastore = shared.datastore()
    self.controller = flags.DEFINE_bool(
        "controller", False, "Choose the size of the draft before every "
        "target call, from 0 to --gamma (chains) or --nodes (trees). The "
        "choice depends on the acceptance so far and on the times of drafting "
        "and verification, which are measured once per machine in some "
        "seconds. Default: a constant size")
    self.measure = shared.requires(flags.DEFINE_bool(
        "measure", False, "Measure the times for --controller again. Default: "
        "use the stored times of this machine, if there are any"),
                                   self.controller)
    self.temperature = shared.temperature(
        None, f"Sampling temperature of target and drafter. {_PUBLISHED}0.8")
    self.top_k = flags.DEFINE_integer(
        "top_k", None, "Top-k sampling: keep the k most likely tokens; 0 keeps "
        f"all. {_PUBLISHED}0", 0)
    self.top_p = flags.DEFINE_float(
        "top_p", None, "Nucleus sampling: keep the most likely tokens until "
        "their total probability reaches top_p, in (0, 1]; 1 keeps all. "
        f"{_PUBLISHED}1")
    self.min_p = flags.DEFINE_float(
        "min_p", None, "Min-p sampling: keep the tokens that are at least "
        "min_p times as likely as the most likely token, in [0, 1]; 0 keeps "
        f"all. {_PUBLISHED}0")
    self.regex = flags.DEFINE_string(
        "regex", None, "Regular expression that the whole output must match, "
        "such as '(Yes|No)[.]'")
    self.json_schema = flags.DEFINE_string(
        "json_schema", None, "File with a JSON schema that the output must "
        "match; excludes --regex")
    self.repetition_penalty = flags.DEFINE_float(
        "repetition_penalty", None, "Repetition penalty (CTRL), above 0: "
        "positive logits of tokens already in the prompt or output are "
        "divided by it, negative ones multiplied. 1 disables it. "
        f"{_PUBLISHED}1")
    self.frequency_penalty = flags.DEFINE_float(
        "frequency_penalty", 0.0, "Amount subtracted from a token's logit for "
        "each occurrence in the output; 0 disables it")
    self.presence_penalty = flags.DEFINE_float(
        "presence_penalty", 0.0, "Amount subtracted once from the logit of "
        "every token already in the output; 0 disables it")
    self.max_new_tokens = flags.DEFINE_integer(
        "max_new_tokens", 256, "Maximum number of generated tokens; in a "
        "chat, per answer", 1)
    self.seed = shared.seed("Random seed for sampling")
    self.color = flags.DEFINE_enum(
        "color", "auto", ["auto", "always", "never"], "Whether accepted draft "
        "tokens are printed in green and the target's own tokens in red. auto: "
        "only on a terminal, unless NO_COLOR is set or TERM is dumb")
    self.output = shared.output_file(
        "output", "File to which the printed text is also written: at "
        "the end or after Ctrl-C, in a chat after every answer. Default: no "
        "file")
    self.mesh = shared.mesh()
    self.split_drafter = shared.requires(flags.DEFINE_bool(
        "split_drafter", False, "With --mesh: also split the drafter's weights "
        "over the devices. Default: a full copy of the drafter on each device"),
                                         self.mesh.mesh)

  @property
  def rule(self) -> sj.Verifier | None:
    """Rule of --verifier. None means the default of the drafter."""
    if self.verifier.value is None:
      return None
    [rule] = common.verifiers("--verifier", [self.verifier.value],
                              common.ALL_VERIFIERS).values()
    return rule

  @property
  def drafter_name(self) -> str:
    """Value of --drafter, or the default drafter of the target."""
    if self.drafter.value is None:
      return {"bundled": "small", "smollm2": "smol"}.get(
          self.target.value, drafters.NONE)
    return self.drafter.value

  @property
  def _is_coupled(self) -> bool:
    return self.verifier.value == "coupled"

  def check(self) -> None:
    """Rejects incompatible flags before any model is loaded."""
    constrained.check_flags(self.regex.value, self.json_schema.value)
    stops.check_temperature(self.stop.value, self.temperature.value)
    if self.drafter_name == drafters.NONE:
      shared.reject_unread(["controller", "compare"], "--drafter=none")
    if self.mesh.mesh.value is not None:
      if self.quantize_target.value or (
          self.quantize.value and self.split_drafter.value):
        raise ValueError("--mesh cannot split quantised weights; leave out "
                         "--mesh, --quantize_target, or --quantize with "
                         "--split_drafter")
      if self.controller.value:
        raise ValueError("--controller supports one device only, and --mesh is "
                         f"{self.mesh.mesh.value}; leave one of the two out")

  def loaded(self) -> drafters.Loaded:
    """Loads the target and the drafter."""
    # With shared noise, the text does not depend on the rule. So the drafter
    # keeps its usual one, and --drafter=none has the same text.
    rule = {} if self._is_coupled else {"verifier": self.rule}
    _, found, _ = drafters.load(
        self.target.value, [self.drafter_name], drafters.Options(
            **rule, **{flag.name: flag.value for flag in (
                self.gamma, self.nodes, self.stop, self.tail, self.datastore,
                self.vocabulary, self.draft_vocabulary, self.vocabulary_data,
                self.quantize, self.quantize_target, self.quantize_group,
                self.draft_cache)}),
        dtype=self.dtype.value, own_target=True, optional=True)
    [drafter] = found.values()
    return drafter

  def load(self, chat: str | None) -> Session:
    """Checks the flags, loads the models, and returns the decoder.

    Args:
      chat: flag or script that requires a chat template, or None.

    Raises:
      ValueError: flags contradict each other, or the models do not fit.
    """
    self.check()
    mesh = meshes.join(self.mesh, rows=1, trains=False)
    drafter = self.loaded()
    target, tokenizer = drafter.target, drafter.tokenizer
    prompts.check_chat(tokenizer, chat is not None, chat)
    ends = models.ends(target, tokenizer)
    decoder = drafter.strategy.decoder(
        drafter.model, eos=ends, transform=self.transform(
            target, constrained.constraints(
                tokenizer, drafter.model.vocab_size, ends,
                regex=self.regex.value, schema=self.json_schema.value,
                frequency=self.frequency_penalty.value,
                presence=self.presence_penalty.value)))
    room = decoder.context_length - self.max_new_tokens.value
    if room < 1:
      raise ValueError(f"--max_new_tokens is {self.max_new_tokens.value}, and "
                       f"the {decoder.context_owner}'s context length is "
                       f"{decoder.context_length}; set a smaller value")
    if self.controller.value:
      progress.say("measuring the cost of rounds")
      decoder = dataclasses.replace(
          decoder, controller=sj.decoding.costs.measured(
              decoder, drafter.params, again=self.measure.value))
    placement = mesh and Placement(
        mesh=mesh,
        drafter="split" if self.split_drafter.value else "replicate")
    return Session(
        target, tokenizer, decoder, drafter.params, placement,
        streaming.Writer(decoder, drafter.params, self.seed.value, placement),
        room, f"the {decoder.context_owner}'s context of "
        f"{decoder.context_length} tokens")

  def transform(self, target: Pretrained, constraints: tuple
                ) -> sj.LogitsTransform:
    """Returns the sampling settings: flags, then those published.

    Published settings that are used are printed.

    Args:
      target: target model with its published settings.
      constraints: constraints on the output.
    """
    published = target.generation or sj.models.GenerationDefaults()
    given = {flag.name: flag.value for flag in (
        self.temperature, self.top_k, self.top_p, self.min_p,
        self.repetition_penalty) if flag.value is not None}
    used = [f"{name}={value}" for name, value in (
        *((name, getattr(published, name)) for name in (
            "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
          if name not in given),
        ("suppress_tokens", published.suppress_tokens or None))
            if value is not None]
    if used:
      print(f"published settings of {self.target.value}: {', '.join(used)}",
            file=sys.stderr)
    if "repetition_penalty" in given:
      published = dataclasses.replace(
          published, repetition_penalty=given.pop("repetition_penalty"))
    if published.temperature is None:
      given.setdefault("temperature", 0.8)
    return dataclasses.replace(
        published.transform(**given, constraints=constraints),
        coupled=self._is_coupled)

  def printer(self, tokenizer: Tokenizer) -> streaming.Printer:
    """Returns a printer of one text."""
    return streaming.Printer(
        tokenizer, streaming.is_colored(self.color.value))

  def keep(self, text: str) -> None:
    """Writes the generated text to --output, if the flag is set."""
    if self.output.value is not None:
      with files.atomically(
          common.output_file("--output", self.output.value)) as f:
        f.write(text.encode())

"""Generates text by speculative decoding: continues a prompt, or chats.

A drafter proposes several tokens, and the target model verifies them in one
pass. The script prints the text as it is generated. On a terminal, accepted
draft tokens are green. The target's own tokens (corrections and bonus tokens)
are red. The last line reports the numbers of tokens and rounds, the tokens per
round, and the tokens per second.

This example uses the bundled models, whose target continues Python code:

  python experiments/generate.py --prompt='def fibonacci(n):'

Add --compare to measure the speed with and without the drafter. Some values of
--drafter:

  --drafter=tiny             smaller draft model (default: small)
  --drafter=medusa           Medusa heads of the bundled target
  --drafter=eagle3           EAGLE-3 layer of the bundled target
  --drafter=parallel         block-parallel network of the bundled target
  --drafter=pass             look-ahead tokens of the bundled target (PaSS)
  --drafter=ngram            copies from the text so far (prompt lookup)
  --drafter=ngram+small      cascade: ngram drafts for small, and small drafts
                             for the target
  '--drafter=ngram|small'    small drafts if ngram finds no match
  --drafter=none             no drafter: autoregressive decoding

Without --prompt, the prompt is read from standard input:

  cat part.py | python experiments/generate.py --drafter=tiny --gamma=3

Published chat models answer a question, or chat on the terminal. In a chat,
Ctrl-C stops an answer, /reset starts a new conversation, and /quit or Ctrl-D
ends the program:

  python experiments/generate.py --target=smollm2 --chat --prompt='Why me?'
  python experiments/generate.py --target=smollm2 --interactive

The output follows exactly the target's distribution, for every drafter and
every verifier except typical and top_2, which are lossy. The sampling flags,
--regex, --json_schema and the penalties change this distribution. They apply to
target and drafter in the same way:

  python experiments/generate.py --target=smollm2 --chat \\
    --prompt='Yes or no?' --regex='(Yes|No)[.]'
"""

import dataclasses
import sys

from absl import flags
from lib import common
from lib import flags as shared
from lib import meshes
from lib import models
from lib import progress
from lib.configurations import compositions
from lib.configurations import constrained
from lib.configurations import copies
from lib.configurations import stops
from lib.prompts import conversation
from lib.prompts import reading as prompts
from lib.prompts import streaming

import specjax as sj
from specjax import interfaces
from specjax import strategies
from specjax.data import Tokenizer
from specjax.decoding import placement as sharding
from specjax.utils import files

_PROMPT = flags.DEFINE_string(
    "prompt", None, "Text to continue. Default: standard input, or a few lines "
    "of Python if standard input is a terminal or empty")
_SPECIAL = flags.DEFINE_bool(
    "special", False, "Parse special tokens such as <|endoftext|> in the "
    "prompt. Default: treat them as ordinary text")
_KEEP_LAST = flags.DEFINE_bool(
    "keep_last", False, "Truncate input that exceeds the context length: of a "
    "prompt, keep the last tokens; of a chat, keep the last exchanges. "
    "Default: such input is an error")
_CHAT = shared.chat("Format the prompt as a user message in the target's chat "
                    "template, and print only the answer")
_SYSTEM = flags.DEFINE_string(
    "system", None, "System message at the start of a chat; requires --chat or "
    "--interactive. Default: the system message of the chat template")
_INTERACTIVE = flags.DEFINE_bool(
    "interactive", False, "Chat with the target: each line of the terminal or "
    "of standard input is a user message. The first message is --prompt, if it "
    "is set")
_TARGET = shared.target()
_DRAFTER = shared.drafter(
    "Source of the draft tokens. Bundled with specjax: small, tiny (draft "
    f"models), {', '.join(sj.zoo.HEADS)} for the bundled target; "
    f"{', '.join((*sj.zoo.FOR_SMOLLM2, *sj.zoo.HEADS_FOR_SMOLLM2))} for "
    f"smollm2. Other draft models: {shared.PUBLISHED}, or itself (a copy of "
    "the target, changed by --quantize or --draft_cache). Trained heads: an "
    "--output_dir of "
    "train_drafter.py, or a directory of a published drafter (Medusa, Hydra, "
    "EAGLE, MTP, DFlash, DSpark). Drafters without training, and compositions: "
    f"{compositions.HELP}. Decoding without drafts: none. Default: small for "
    "the bundled target, smol for smollm2, none for other targets",
    None)
_TAIL = flags.DEFINE_bool(
    "tail", False, "For a cascade --drafter=a+b, in which a drafts for b: "
    "append tokens that a drafts directly for the target to the tokens of b")
_VOCABULARY = flags.DEFINE_enum(
    "vocabulary", "auto", ["auto", "intersection", "strings"],
    "Method for a draft model whose vocabulary differs from the target's. "
    "intersection: the draft model proposes only tokens that both vocabularies "
    "contain. strings: the draft is decoded to text, and the text is encoded "
    "with the target's tokenizer. auto: intersection if the vocabularies "
    "differ, no method if they are equal")
_DRAFT_VOCABULARY = shared.draft_vocabulary()
_VOCABULARY_DATA = shared.vocabulary_data()
_DTYPE = shared.dtype()
_QUANTIZE = flags.DEFINE_enum(
    "quantize", None, list(copies.BITS), "Precision to which the weights of "
    "the draft model are quantised (8 or 4 bits). Default: not quantised")
_QUANTIZE_TARGET = flags.DEFINE_enum(
    "quantize_target", None, list(copies.BITS), "Precision to which the "
    "target's weights are quantised (8 or 4 bits). The output then follows the "
    "distribution of the quantised target. Default: not quantised")
_QUANTIZE_GROUP = flags.DEFINE_integer(
    "quantize_group", None, "Number of consecutive input channels of a weight "
    "matrix that share a quantisation scale, such as 64; requires --quantize "
    "or --quantize_target. Default: one scale per output channel", 1)
_DRAFT_CACHE = flags.DEFINE_string(
    "draft_cache", None, "Kind of smaller KV cache for the draft model: "
    f"{copies.CACHES}. int8 and int4 quantise keys and values; streaming "
    "stores only the first tokens (sinks) and a window of the last tokens. "
    "Default: a full cache")
_VERIFIER = flags.DEFINE_enum(
    "verifier", None, sorted(common.ALL_VERIFIERS), "Verification rule, which "
    "decides how many draft tokens are accepted. For "
    "chains: token, block, greedy_block, top_2. For trees: recursive, k_seq, "
    "traversal, target_walk, typical. typical and top_2 are lossy: they change "
    "the output distribution. Default: the usual rule of the drafter, such as "
    "block for a draft model and target_walk for a tree of the most likely "
    "tokens")
_GAMMA = shared.gamma(6, "Draft length gamma: number of tokens drafted as a "
                      "chain before each target call. Drafters with fewer "
                      "heads or look-ahead tokens draft fewer tokens")
_NODES = shared.nodes(16)
_STOP = stops.flag()
_DATASTORE = shared.datastore()
_CONTROLLER = flags.DEFINE_bool(
    "controller", False, "Choose the size of the draft before every target "
    "call, from 0 to --gamma (chains) or --nodes (trees). The choice depends "
    "on the acceptance so far and on the times of drafting and verification, "
    "which are measured once per machine in some seconds. Default: a constant "
    "size")
_MEASURE = flags.DEFINE_bool(
    "measure", False, "Measure the times for --controller again. Default: use "
    "the stored times of this machine, if there are any")
_PUBLISHED = ("Default: the setting in the target's generation_config.json or "
              "GGUF file, otherwise ")
_TEMPERATURE = shared.temperature(
    None, f"Sampling temperature of target and drafter. {_PUBLISHED}0.8")
_TOP_K = flags.DEFINE_integer(
    "top_k", None, "Top-k sampling: keep the k most likely tokens; 0 keeps "
    f"all. {_PUBLISHED}0", 0)
_TOP_P = flags.DEFINE_float(
    "top_p", None, "Nucleus sampling: keep the most likely tokens until their "
    "total probability reaches top_p, in (0, 1]; 1 keeps all. "
    f"{_PUBLISHED}1")
_MIN_P = flags.DEFINE_float(
    "min_p", None, "Min-p sampling: keep the tokens that are at least min_p "
    "times as likely as the most likely token, in [0, 1]; 0 keeps all. "
    f"{_PUBLISHED}0")
_REGEX = flags.DEFINE_string(
    "regex", None, "Regular expression that the whole output must match, such "
    "as '(Yes|No)[.]'")
_JSON_SCHEMA = flags.DEFINE_string(
    "json_schema", None, "File with a JSON schema that the output must match; "
    "excludes --regex")
_REPETITION_PENALTY = flags.DEFINE_float(
    "repetition_penalty", None, "Repetition penalty (CTRL), above 0: positive "
    "logits of tokens already in the prompt or output are divided by it, "
    f"negative ones multiplied. 1 disables it. {_PUBLISHED}1")
_FREQUENCY_PENALTY = flags.DEFINE_float(
    "frequency_penalty", 0.0, "Amount subtracted from a token's logit for each "
    "occurrence in the output; 0 disables it")
_PRESENCE_PENALTY = flags.DEFINE_float(
    "presence_penalty", 0.0, "Amount subtracted once from the logit of every "
    "token already in the output; 0 disables it")
_MAX_NEW_TOKENS = flags.DEFINE_integer(
    "max_new_tokens", 256, "Maximum number of generated tokens; in a chat, per "
    "answer", 1)
_SEED = shared.seed("Random seed for sampling")
_COLOR = flags.DEFINE_enum(
    "color", "auto", ["auto", "always", "never"], "Whether accepted draft "
    "tokens are printed in green and the target's own tokens in red. auto: "
    "only on a terminal, unless NO_COLOR is set or TERM is dumb")
_COMPARE = flags.DEFINE_bool(
    "compare", False, "After the output, decode the prompt several times, "
    "alternately with and without the drafter, and print the tokens per second "
    "of both")
_OUTPUT = flags.DEFINE_string(
    "output", None, "File to which the printed text is also written: at the "
    "end or after Ctrl-C, in a chat after every answer. Default: no file")

_MESH = shared.mesh()
_SPLIT_DRAFTER = flags.DEFINE_bool(
    "split_drafter", False, "With --mesh: also split the drafter's weights "
    "over the devices. Default: a full copy of the drafter on each device")

_DEFAULT_PROMPT = (
    '"""Reads files."""\n\nimport os\nimport sys\n\n\nclass Reader:')


def _read_prompt():
  if _PROMPT.value is not None:
    return _PROMPT.value
  piped = "" if sys.stdin.isatty() else sys.stdin.read()
  # A text file ends with a newline. In training text, the tokenizer merges a
  # newline with the start of the next line. So a token for a newline alone
  # makes the model predict the end of the text, and the final newline is
  # removed. A byte-order mark is also removed.
  return piped.removeprefix("\ufeff").removesuffix("\n") or _DEFAULT_PROMPT


def _drafter():
  """Returns --drafter, or the default drafter of the target."""
  if _DRAFTER.value is None:
    return {"bundled": "small", "smollm2": "smol"}.get(_TARGET.value, "none")
  return _DRAFTER.value


def _speculation():
  """Returns `(target, target model, params, strategy, tokenizer)`."""
  name = _drafter()
  itself = models.drafts_for_itself(name, _TARGET.value)
  composed = compositions.composes(name)
  names = compositions.members(name) if composed else [name]
  target, members, tokenizer = models.load_models(
      _TARGET.value, [] if itself or name == "none" else names,
      ", ".join((*compositions.NAMES, *models.HEADS, models.ITSELF, "none")),
      dtype=_DTYPE.value)
  rule = _VERIFIER.value and common.ALL_VERIFIERS[_VERIFIER.value]
  if itself:
    own = models.load_self_drafter(name, target, tokenizer, _DTYPE.value)
    target = copies.quantized(
        own.target, _QUANTIZE_TARGET.value, _QUANTIZE_GROUP.value)
    return target, *own._replace(target=target).speculation(
        rule, _GAMMA.value, _NODES.value), own.tokenizer
  target = copies.quantized(
      target, _QUANTIZE_TARGET.value, _QUANTIZE_GROUP.value)
  params, strategy = {"target": target.params}, strategies.autoregressive()
  for label, member in members.items():
    member = copies.drafting(copies.quantized(
        member, _QUANTIZE.value, _QUANTIZE_GROUP.value), _DRAFT_CACHE.value)
    members[label] = member = models.narrowed(
        member, tokenizer, label, _DRAFT_VOCABULARY.value,
        _VOCABULARY_DATA.value)
    if not composed:
      chain, params["drafter"] = models.chain(
          target, member, label, _VOCABULARY.value)
      strategy = chain(_GAMMA.value)
  if composed:
    strategy, params["drafter"] = compositions.strategy(
        name, _GAMMA.value, target, members, _TAIL.value, _DATASTORE.value)
  if rule:
    strategy = strategy._replace(verifier=rule)
  return target, target.model, params, strategy, tokenizer


def _check_flags():
  """Rejects incompatible flags before any model is loaded."""
  _check_prompt()
  if _COMPARE.value:
    _check_compare()
  constrained.check_flags(_REGEX.value, _JSON_SCHEMA.value)
  stops.check_flags(_STOP.value, _drafter(), _TEMPERATURE.value)
  _check_controller(_drafter())
  _check_drafter(_drafter())
  _check_mesh()
  if _OUTPUT.value is not None:
    common.output_file("--output", _OUTPUT.value)


def _check_prompt():
  chats = _CHAT.value or _INTERACTIVE.value
  if _SYSTEM.value is not None and not chats:
    raise ValueError("--system requires --chat or --interactive; add one of "
                     "them, or leave --system out")
  if _SPECIAL.value and chats:
    raise ValueError("--special is incompatible with --chat and --interactive, "
                     "because a chat template adds the special tokens; leave "
                     "--special out")


def _check_controller(name: str):
  if _CONTROLLER.value and name == "none":
    raise ValueError("--controller requires a drafter, and --drafter is none; "
                     "set --drafter, or leave --controller out")
  if _MEASURE.value and not _CONTROLLER.value:
    raise ValueError("--measure requires --controller; add it, or leave "
                     "--measure out")


def _check_drafter(name: str):
  composed, has_model = compositions.composes(name), _has_model(name)
  if _TAIL.value and not (composed and "+" in name):
    raise ValueError(f"--tail requires a cascade, and --drafter is {name}; "
                     "set a cascade, such as --drafter=ngram+small, or leave "
                     "--tail out")
  if _VOCABULARY.value != "auto" and (composed or not has_model):
    raise ValueError(f"--vocabulary={_VOCABULARY.value} requires a draft "
                     f"model as the only drafter, and --drafter is {name}; "
                     "leave --vocabulary out")
  _check_tables(name, has_model)
  _check_copies(name, has_model)


def _has_model(name: str) -> bool:
  """Returns whether the drafter contains a separate language model."""
  if compositions.composes(name):
    return bool(compositions.members(name))
  return name != "none" and not models.drafts_for_itself(name, _TARGET.value)


def _check_tables(name: str, has_model: bool) -> None:
  """Rejects a datastore or a draft vocabulary that the drafter cannot use."""
  shared.check_vocabulary_data(_DRAFT_VOCABULARY, _VOCABULARY_DATA)
  if _DATASTORE.value is not None and not compositions.reads_datastore(name):
    raise ValueError(f"--datastore={_DATASTORE.value} requires a retrieval "
                     f"drafter, and --drafter is {name}; set rest, suffix, "
                     "sampled_suffix or suffix_tree, or leave --datastore out")
  if _DRAFT_VOCABULARY.value and not has_model:
    raise ValueError(f"--draft_vocabulary={_DRAFT_VOCABULARY.value} requires "
                     f"a draft model, and --drafter is {name}; set one, such "
                     "as --drafter=small, or leave --draft_vocabulary out")


def _check_copies(name: str, has_model: bool) -> None:
  """Rejects flags of a quantised drafter without a language model."""
  copies.check({"quantize": _QUANTIZE.value, "draft_cache": _DRAFT_CACHE.value},
               name, has_model)
  if _DRAFT_CACHE.value is not None:
    copies.cache("--draft_cache", _DRAFT_CACHE.value)
  if _QUANTIZE_GROUP.value and not (_QUANTIZE.value or _QUANTIZE_TARGET.value):
    raise ValueError(f"--quantize_group={_QUANTIZE_GROUP.value} requires "
                     "--quantize or --quantize_target; add one of them, or "
                     "leave --quantize_group out")


def _check_form(name: str, drafter: sj.interfaces.Drafter):
  """Rejects chain flags for a tree drafter, and tree flags for a chain."""
  for flag in (_GAMMA, _NODES, _VERIFIER) if name == "none" else ():
    if flag.present:
      raise ValueError(f"--{flag.name}={flag.value} requires a drafter, and "
                       "--drafter is none; set --drafter, or leave "
                       f"--{flag.name} out")
  if "chain" in interfaces.capabilities(drafter):
    if _NODES.present:
      raise ValueError(f"--nodes={_NODES.value} is the size of a tree, and "
                       f"--drafter={name} drafts a chain; leave --nodes out, "
                       "or set a --drafter or --verifier for trees")
  else:
    _check_tree(name, drafter)


def _check_tree(name: str, drafter: sj.interfaces.Drafter):
  """Rejects flags that do not change the tree of a drafter."""
  if _NODES.present and compositions.composes(name):
    raise ValueError(f"--nodes is {_NODES.value}, and --drafter={name} always "
                     f"drafts trees of {drafter.num_nodes} nodes; leave "
                     "--nodes out")
  if _GAMMA.present and (
      name in compositions.OWN_DEPTH
      or models.drafts_for_itself(name, _TARGET.value)):
    raise ValueError(f"--gamma={_GAMMA.value} is the length of a chain, and "
                     f"--drafter={name} drafts a tree; set --nodes instead, or "
                     "a --verifier for chains")


def _check_mesh():
  """Rejects flags that several devices or processes do not support."""
  if _MESH.mesh.value is None:
    if _SPLIT_DRAFTER.value:
      raise ValueError("--split_drafter requires --mesh; add it, or leave "
                       "--split_drafter out")
  elif _QUANTIZE_TARGET.value or _QUANTIZE.value and _SPLIT_DRAFTER.value:
    raise ValueError("--mesh cannot split quantised weights; leave out --mesh, "
                     "--quantize_target, or --quantize with --split_drafter")
  elif _CONTROLLER.value:
    raise ValueError("--controller supports one device only, and --mesh is "
                     f"{_MESH.mesh.value}; leave one of the two out")
  if _MESH.coordinator.value is not None and (
      _INTERACTIVE.value or _PROMPT.value is None):
    raise ValueError("--coordinator requires --prompt and excludes "
                     "--interactive, because every process needs the prompt; "
                     "set --prompt")


def _check_compare():
  if _INTERACTIVE.value:
    raise ValueError("--compare is incompatible with --interactive, because it "
                     "decodes one prompt repeatedly; leave one of the two out")
  if _drafter() == "none":
    raise ValueError("--compare requires a drafter, and --drafter is none; set "
                     "--drafter, or leave --compare out")
  rule = _VERIFIER.value and common.ALL_VERIFIERS[_VERIFIER.value]
  if rule and not rule.lossless and _TEMPERATURE.value == 0:
    raise ValueError("--compare at --temperature=0 requires a lossless "
                     f"verifier, and --verifier={_VERIFIER.value} is lossy; "
                     "choose another verifier, or a temperature above 0")


def _transform(target: sj.models.Pretrained, constraints: tuple
               ) -> sj.LogitsTransform:
  """Returns the sampling settings: flags, then those published with the target.

  Published settings that are used are printed.
  """
  published = target.generation or sj.models.GenerationDefaults()
  given = {flag.name: flag.value for flag in (
      _TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _REPETITION_PENALTY)
           if flag.value is not None}
  used = [f"{name}={value}" for name, value in (
      *((name, getattr(published, name)) for name in (
          "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        if name not in given),
      ("suppress_tokens", published.suppress_tokens or None))
          if value is not None]
  if used:
    print(f"published settings of {_TARGET.value}: {', '.join(used)}",
          file=sys.stderr)
  if "repetition_penalty" in given:
    published = dataclasses.replace(
        published, repetition_penalty=given.pop("repetition_penalty"))
  if published.temperature is None:
    given.setdefault("temperature", 0.8)
  return published.transform(**given, constraints=constraints)


def _keep(text: str):
  """Writes the generated text to --output, if the flag is set."""
  if _OUTPUT.value is not None:
    with files.atomically(
        common.output_file("--output", _OUTPUT.value)) as f:
      f.write(text.encode())


def _ids(tokenizer: Tokenizer, room: int, context: str):
  """Returns the token ids of the prompt.

  A prompt with more than `room` tokens is truncated if --keep_last is set, and
  an error otherwise.
  """
  text = _read_prompt()
  if not text:
    raise ValueError("--prompt is empty; set --prompt, or pipe the prompt to "
                     "standard input")
  if not _CHAT.value:
    return conversation.cut(
        tokenizer, tokenizer.encode(text, special=_SPECIAL.value), room,
        _KEEP_LAST.value, context)
  system = [{"role": "system", "content": _SYSTEM.value}]
  ids, _ = conversation.fitting(
      tokenizer, system * (_SYSTEM.value is not None)
      + [{"role": "user", "content": text}], room, _KEEP_LAST.value, context)
  return ids


def _continue(writer: streaming.Writer, ids: list[int],
              printer: streaming.Printer):
  """Continues a prompt, then prints statistics (also after Ctrl-C)."""
  answer, state = streaming.Answer(), writer.start(ids, _MAX_NEW_TOKENS.value)
  try:
    if not _CHAT.value:
      printer.prompt(ids)
    writer.write(state, printer, answer)
  except (KeyboardInterrupt, BrokenPipeError):  # Ctrl-C, or `| head`
    print(f"\n{answer}", file=sys.stderr)
    if answer.tokens:
      _keep(printer.text)
    raise
  _keep(printer.text)
  print(f"\n\n{answer}")


def main():
  _check_flags()
  mesh = meshes.join(_MESH, rows=1, trains=False)
  target, model, params, strategy, tokenizer = _speculation()
  strategy = stops.stopped(strategy, _STOP.value, _drafter())
  _check_form(_drafter(), strategy.drafter)
  prompts.check_chat(tokenizer, _CHAT.value or _INTERACTIVE.value,
                     "--chat" if _CHAT.value else "--interactive")
  decoder = strategy.decoder(
      model, transform=_transform(target, constrained.constraints(
          tokenizer, model.vocab_size, models.ends(target, tokenizer),
          regex=_REGEX.value, schema=_JSON_SCHEMA.value,
          frequency=_FREQUENCY_PENALTY.value,
          presence=_PRESENCE_PENALTY.value)),
      eos=models.ends(target, tokenizer))
  context = (f"the {decoder.context_owner}'s context of "
             f"{decoder.context_length} tokens")
  room = decoder.context_length - _MAX_NEW_TOKENS.value
  if room < 1:
    raise ValueError(f"--max_new_tokens is {_MAX_NEW_TOKENS.value}, and the "
                     f"{decoder.context_owner}'s context length is "
                     f"{decoder.context_length}; set a smaller value")
  if _CONTROLLER.value:
    progress.say("measuring the cost of rounds")
    decoder = dataclasses.replace(
        decoder, controller=sj.decoding.costs.measured(
            decoder, params, again=_MEASURE.value))
  placement = mesh and sharding.Placement(
      mesh=mesh, drafter="split" if _SPLIT_DRAFTER.value else "replicate")
  writer = streaming.Writer(decoder, params, _SEED.value, placement)
  colored = streaming.is_colored(_COLOR.value)
  printer_of = lambda: streaming.Printer(tokenizer, colored)
  if _INTERACTIVE.value:
    conversation.chat(
        writer, tokenizer, printer_of, room=room,
        new_tokens=_MAX_NEW_TOKENS.value, keep_last=_KEEP_LAST.value,
        context=context, first=_PROMPT.value, system=_SYSTEM.value, keep=_keep)
  else:
    ids = _ids(tokenizer, room, context)
    _continue(writer, ids, printer_of())
  if _COMPARE.value:
    alone = strategies.autoregressive().decoder(
        target.model, transform=decoder.transform, eos=decoder.eos)
    print(streaming.compare(
        (writer, streaming.Writer(
            alone, {"target": target.params}, _SEED.value, placement)),
        ids, _MAX_NEW_TOKENS.value, tokenizer))


if __name__ == "__main__":
  common.run(main)

"""Text in, text streamed out, by speculative decoding.

Tokens that the drafter proposed and the target accepted are green, the
target's own (corrections and bonus tokens) red; a line of statistics follows.

  python experiments/generate.py --prompt='def fibonacci(n):'
  cat part.py | python experiments/generate.py --drafter=tiny --gamma=3
  python experiments/generate.py --drafter=medusa        # the target's heads
  python experiments/generate.py --drafter=eagle3        # a layer that reads it
  python experiments/generate.py --drafter=pass          # look-ahead tokens
  python experiments/generate.py --draft_vocabulary=1024 # a smaller head
  python experiments/generate.py --drafter=ngram         # copies of the text
  python experiments/generate.py --drafter=ngram+small   # which small judges
  python experiments/generate.py '--drafter=ngram|small' # small where none fit
  python experiments/generate.py --drafter=none          # autoregressive

A published model answers, or chats on the terminal until /quit or Ctrl-D
(Ctrl-C stops an answer, /reset forgets what was said):

  python experiments/generate.py --target=smollm2 --chat --prompt='Why me?'
  python experiments/generate.py --target=smollm2 --interactive

--compare then decodes again, in turn with the target alone, and prints the
speed of both. The output has exactly the target's law, whatever the drafter and
the verifier, unless that is one of the lossy rules. --regex, --json_schema and
the penalties change that law for target and drafter alike:

  python experiments/generate.py --target=smollm2 --chat --prompt='Yes or no?' \
      --regex='(Yes|No)[.]'
"""

import dataclasses
import sys

from absl import flags
from lib import common
from lib import compositions
from lib import constrained
from lib import conversation
from lib import copies
from lib import flags as shared
from lib import meshes
from lib import models
from lib import prompts
from lib import stops
from lib import streaming

import specjax as sj
from specjax import contract
from specjax import files
from specjax import strategies
from specjax.models import sharding

_PROMPT = flags.DEFINE_string(
    "prompt", None, "the text to continue; default: standard input, or a few "
    "lines of code where that is a terminal or empty")
_SPECIAL = flags.DEFINE_bool(
    "special", False, "read special tokens such as <|endoftext|> in the prompt "
    "as tokens, and not as text")
_KEEP_LAST = flags.DEFINE_bool(
    "keep_last", False, "a prompt that is too long keeps its last tokens, and "
    "a chat its last exchanges")
_CHAT = shared.chat("the prompt is a user's message, in the target's chat "
                    "template; the answer alone is printed")
_SYSTEM = flags.DEFINE_string(
    "system", None, "message of the system that a chat begins with")
_INTERACTIVE = flags.DEFINE_bool(
    "interactive", False, "chat on the terminal, or with the lines of standard "
    "input, --prompt the first of them")
_TARGET = shared.target()
_DRAFTER = shared.drafter(
    f"small, tiny, smol, {', '.join(models.HEADS)}, none, "
    f"{shared.PUBLISHED}, itself (the target, with --quantize or "
    "--draft_cache), heads of "
    "train_drafter.py, a directory of a published drafter (Medusa, Hydra, "
    "EAGLE, MTP, DFlash, DSpark), "
    f"{compositions.HELP}; default: small for the bundled "
    "target, smol for smollm2, none for others",
    None)
_TAIL = flags.DEFINE_bool(
    "tail", False, "the inner drafter of a cascade drafts on after the tokens "
    "of the model that it drafts for, as many as it can")
_VOCABULARY = flags.DEFINE_enum(
    "vocabulary", "auto", ["auto", "intersection", "strings"],
    "how a language model with another vocabulary drafts: intersection, by "
    "its law of the tokens that both have; strings, by its text, which is "
    "tokenised again; auto: intersection where the vocabularies differ")
_DRAFT_VOCABULARY = shared.draft_vocabulary()
_VOCABULARY_DATA = shared.vocabulary_data()
_DTYPE = shared.dtype()
_QUANTIZE = flags.DEFINE_enum(
    "quantize", None, list(copies.BITS), "bits of the weights of the language "
    "model that drafts")
_QUANTIZE_TARGET = flags.DEFINE_enum(
    "quantize_target", None, list(copies.BITS), "bits of the target's weights; "
    "the output follows the law of that copy")
_QUANTIZE_GROUP = flags.DEFINE_integer(
    "quantize_group", None, "inputs of a matrix that share a scale, such as "
    "64; default: all of an output", 1)
_DRAFT_CACHE = flags.DEFINE_string(
    "draft_cache", None, "what the language model that drafts keeps of the "
    f"text: {copies.CACHES}; default: all of it")
_VERIFIER = flags.DEFINE_enum(
    "verifier", None, sorted(common.ALL_VERIFIERS), "the verification rule; "
    "default: that of the drafter's strategy, such as block for a language "
    "model and target_walk for a tree of the likeliest tokens")
_GAMMA = shared.gamma(6, "drafted tokens of a chain, as far as there are heads "
                      "or look-ahead tokens for it")
_NODES = shared.nodes(16)
_STOP = stops.flag()
_DATASTORE = shared.datastore()
_CONTROLLER = flags.DEFINE_bool(
    "controller", False, "choose the length of the drafts before every round, "
    "up to --gamma or --nodes and down to none, by what rounds cost here; the "
    "first time this is measured")
_MEASURE = flags.DEFINE_bool(
    "measure", False, "with --controller, measure again what rounds cost here")
_TEMPERATURE = shared.temperature(0.8)
_TOP_K = flags.DEFINE_integer("top_k", 0, "likeliest tokens kept; 0: all")
_TOP_P = shared.top_p()
_MIN_P = flags.DEFINE_float("min_p", 0.0, "least share of the likeliest")
_REGEX = flags.DEFINE_string(
    "regex", None, "a regular expression that the whole output matches")
_JSON_SCHEMA = flags.DEFINE_string(
    "json_schema", None, "a file with a JSON schema that the output follows")
_REPETITION_PENALTY = flags.DEFINE_float(
    "repetition_penalty", 1.0, "by which the logits of tokens of the text are "
    "divided, or multiplied where they are negative; 1: none")
_FREQUENCY_PENALTY = flags.DEFINE_float(
    "frequency_penalty", 0.0, "subtracted from a token's logit for each time "
    "that the output has it")
_PRESENCE_PENALTY = flags.DEFINE_float(
    "presence_penalty", 0.0, "subtracted from a token's logit once, if the "
    "output has it")
_MAX_NEW_TOKENS = flags.DEFINE_integer(
    "max_new_tokens", 256, "tokens of the text, at most", 1)
_SEED = shared.seed("of the sampling")
_COLOR = flags.DEFINE_enum(
    "color", "auto", ["auto", "always", "never"], "colour the tokens")
_COMPARE = flags.DEFINE_bool(
    "compare", False, "also decode without the drafter, in turn, and print the "
    "tokens per second of both")
_OUTPUT = flags.DEFINE_string(
    "output", None, "a file for the text as well, written when it is complete "
    "or Ctrl-C ends it, and of a chat after every answer")

_MESH = shared.mesh()
_SPLIT_DRAFTER = flags.DEFINE_bool(
    "split_drafter", False, "with --mesh, split the drafter over the devices "
    "too; default: each has the whole of it")

_DEFAULT_PROMPT = (
    '"""Reads files."""\n\nimport os\nimport sys\n\n\nclass Reader:')


def _read_prompt():
  if _PROMPT.value is not None:
    return _PROMPT.value
  piped = "" if sys.stdin.isatty() else sys.stdin.read()
  # The newline at a file's end would be half of the token that begins the
  # next line, after which the model expects the end of the text.
  return piped.removesuffix("\n") or _DEFAULT_PROMPT


def _drafter():
  """What --drafter names."""
  if _DRAFTER.value is None:
    return {"bundled": "small", "smollm2": "smol"}.get(_TARGET.value, "none")
  return _DRAFTER.value


def _speculation():
  """`(target, its model, params, strategy, tokenizer)` of the flags."""
  name = _drafter()
  itself = models.drafts_for_itself(name, _TARGET.value)
  composed = compositions.composes(name)
  names = compositions.members(name) if composed else [name]
  target, members, tokenizer = models.load_models(
      _TARGET.value, [] if itself or name == "none" else names,
      ", ".join((*models.DRAFTERS, *models.HEADS, "none")), dtype=_DTYPE.value)
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
  """Refuses what does not go together, before a model is read."""
  _check_prompt()
  if _COMPARE.value:
    _check_compare()
  constrained.check_flags(_REGEX.value, _JSON_SCHEMA.value)
  stops.check_flags(_STOP.value, _drafter(), _TEMPERATURE.value)
  _check_drafter(_drafter())
  _check_mesh()
  if _OUTPUT.value is not None:
    common.output_file("--output", _OUTPUT.value)


def _check_prompt():
  chats = _CHAT.value or _INTERACTIVE.value
  if _SYSTEM.value is not None and not chats:
    raise ValueError("--system is the beginning of a chat; add --chat or "
                     "--interactive, or leave it out")
  if _SPECIAL.value and chats:
    raise ValueError("--special is about a plain prompt, and a chat template "
                     "has special tokens of its own; leave one of the two out")


def _check_drafter(name):
  if _CONTROLLER.value and name == "none":
    raise ValueError("--controller chooses the length of drafts, and --drafter "
                     "is none; name one, or leave --controller out")
  if _MEASURE.value and not _CONTROLLER.value:
    raise ValueError("--measure is of what --controller reads, which is not "
                     "given; give it, or leave --measure out")
  composed = compositions.composes(name)
  has_model = bool(compositions.members(name)) if composed else (
      name != "none" and not models.drafts_for_itself(name, _TARGET.value))
  if _TAIL.value and not (composed and "+" in name):
    raise ValueError("--tail is of a cascade, and --drafter is "
                     f"{name}; name one, such as ngram+small, or leave it out")
  if _VOCABULARY.value != "auto" and (composed or not has_model):
    raise ValueError(f"--vocabulary={_VOCABULARY.value} is how another "
                     f"language model drafts, and --drafter is {name}, which "
                     "has the target's tokens; leave --vocabulary out")
  shared.check_vocabulary_data(_DRAFT_VOCABULARY, _VOCABULARY_DATA)
  if _DATASTORE.value is not None and not compositions.reads_datastore(name):
    raise ValueError(f"--datastore={_DATASTORE.value} is for rest and suffix, "
                     f"and --drafter is {name}; leave it out, or name one")
  if _DRAFT_VOCABULARY.value and not has_model:
    raise ValueError(f"--draft_vocabulary={_DRAFT_VOCABULARY.value} is of a "
                     f"language model that drafts, and --drafter is {name}; "
                     "leave it out, or name a language model")
  copies.check({"quantize": _QUANTIZE.value, "draft_cache": _DRAFT_CACHE.value},
               name, has_model)
  if _DRAFT_CACHE.value is not None:
    copies.cache("--draft_cache", _DRAFT_CACHE.value)
  if _QUANTIZE_GROUP.value and not (_QUANTIZE.value or _QUANTIZE_TARGET.value):
    raise ValueError(f"--quantize_group={_QUANTIZE_GROUP.value} is of "
                     "--quantize and --quantize_target; give one of them, or "
                     "leave it out")


def _check_form(name, drafter):
  """Refuses what is said of a draft of another form than the one here."""
  for flag in (_GAMMA, _NODES, _VERIFIER):
    if flag.present and name == "none":
      raise ValueError(f"--{flag.name} is {flag.value}, and nothing drafts; "
                       "name a --drafter, or leave it out")
  chain = "chain" in contract.capabilities(drafter)
  if chain and _NODES.present:
    raise ValueError(f"--nodes is {_NODES.value}, of a tree, and {name} drafts "
                     "a chain here; leave it out, or give a drafter or a "
                     "--verifier of trees")
  if not chain and _NODES.present and compositions.composes(name):
    raise ValueError(f"--nodes is {_NODES.value}, and the trees of {name} have "
                     f"{drafter.num_nodes} here; leave it out")
  if not chain and _GAMMA.present and (
      name in compositions.OWN_DEPTH
      or models.drafts_for_itself(name, _TARGET.value)):
    raise ValueError(f"--gamma is {_GAMMA.value}, of a chain, and {name} "
                     "drafts a tree here; give --nodes, or a --verifier of "
                     "chains")


def _check_mesh():
  if _SPLIT_DRAFTER.value and _MESH.mesh.value is None:
    raise ValueError("--split_drafter is about the devices of --mesh, which is "
                     "not given; give it, or leave --split_drafter out")
  if _MESH.mesh.value is not None and (
      _QUANTIZE_TARGET.value or _QUANTIZE.value and _SPLIT_DRAFTER.value):
    raise ValueError("weights of few bits are not split over the devices of "
                     "--mesh; leave one of the two out")
  if _CONTROLLER.value and _MESH.mesh.value is not None:
    raise ValueError("--controller goes by what rounds cost on one device, and "
                     f"--mesh is {_MESH.mesh.value}; leave one of the two out")
  if _MESH.coordinator.value is not None and (
      _INTERACTIVE.value or _PROMPT.value is None):
    raise ValueError("each process of --coordinator needs the whole prompt; "
                     "give it by --prompt, without --interactive")


def _check_compare():
  if _INTERACTIVE.value:
    raise ValueError("--compare decodes one prompt several times and "
                     "--interactive many once; leave one of the two out")
  if _drafter() == "none":
    raise ValueError("--compare sets a drafter against the target alone, and "
                     "--drafter is none; name one")
  rule = _VERIFIER.value and common.ALL_VERIFIERS[_VERIFIER.value]
  if rule and not rule.lossless and _TEMPERATURE.value == 0:
    raise ValueError("--compare needs the same text twice at temperature 0, "
                     f"and --verifier={_VERIFIER.value} is lossy; choose "
                     "another, or a temperature above 0")


def _keep(text):
  """Writes what was said so far to --output, if it is given."""
  if _OUTPUT.value is not None:
    with files.atomically(
        common.output_file("--output", _OUTPUT.value)) as f:
      f.write(text.encode())


def _ids(tokenizer, room):
  """The prompt's tokens, at most `room`."""
  text = _read_prompt()
  if not text:
    raise ValueError("the prompt is empty; give a text with --prompt or on "
                     "standard input")
  if not _CHAT.value:
    return conversation.cut(
        tokenizer, tokenizer.encode(text, special=_SPECIAL.value), room,
        _KEEP_LAST.value)
  system = [{"role": "system", "content": _SYSTEM.value}]
  ids, _ = conversation.fitting(
      tokenizer, system * (_SYSTEM.value is not None)
      + [{"role": "user", "content": text}], room, _KEEP_LAST.value)
  return ids


def _continue(writer, ids, printer):
  """Prints the text after a prompt, and statistics, also on Ctrl-C."""
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
  prompts.check_chat(tokenizer, _CHAT.value or _INTERACTIVE.value)
  decoder = sj.Decoder(
      target=model, **strategy._asdict(),
      transform=sj.LogitsTransform(
          temperature=_TEMPERATURE.value, top_k=_TOP_K.value,
          top_p=_TOP_P.value, min_p=_MIN_P.value,
          constraints=constrained.constraints(
              tokenizer, model.vocab_size, models.ends(target, tokenizer),
              regex=_REGEX.value, schema=_JSON_SCHEMA.value,
              repetition=_REPETITION_PENALTY.value,
              frequency=_FREQUENCY_PENALTY.value,
              presence=_PRESENCE_PENALTY.value)),
      eos=models.ends(target, tokenizer))
  room = decoder.context_length - _MAX_NEW_TOKENS.value
  if room < 1:
    raise ValueError(f"--max_new_tokens is {_MAX_NEW_TOKENS.value} and the "
                     f"context length {decoder.context_length}; ask for fewer")
  if _CONTROLLER.value:
    decoder = dataclasses.replace(
        decoder, controller=sj.costs.measured(
            decoder, params, again=_MEASURE.value))
  placement = mesh and sharding.Placement(
      mesh=mesh, drafter="split" if _SPLIT_DRAFTER.value else "replicate")
  writer = streaming.Writer(decoder, params, _SEED.value, placement)
  colored = _COLOR.value == "always" or (
      _COLOR.value == "auto" and sys.stdout.isatty())
  printer_of = lambda: streaming.Printer(tokenizer, colored)
  if _INTERACTIVE.value:
    conversation.chat(
        writer, tokenizer, printer_of, room=room,
        new_tokens=_MAX_NEW_TOKENS.value, keep_last=_KEEP_LAST.value,
        first=_PROMPT.value, system=_SYSTEM.value, keep=_keep)
  else:
    ids = _ids(tokenizer, room)
    _continue(writer, ids, printer_of())
  if _COMPARE.value:
    alone = dataclasses.replace(
        decoder, target=target.model, controller=None,
        **strategies.autoregressive()._asdict())
    print(streaming.compare(
        (writer, streaming.Writer(
            alone, {"target": target.params}, _SEED.value, placement)),
        ids, _MAX_NEW_TOKENS.value, tokenizer))


if __name__ == "__main__":
  common.run(main)

"""Configurations that compare specjax with `generate` of transformers.

The measured time is that of the entire call, from the ids of the prompt to the
last token. Only functions that need torch or transformers import them.
"""

from collections.abc import Sequence
import functools
import os
import tempfile
import time
from typing import Any

import jax
import numpy as np

from lib import models
from lib.configurations import base
import specjax as sj
from specjax.decoding import prefill
from specjax.models import export_pretrained
from specjax.models import model_files
from specjax.models import Pretrained
from specjax.utils import files

_WARM_TOKENS = 8  # tokens of the warm-up call, which is not timed


class Ours(base.Configuration):
  """Configuration with a decoder of specjax."""

  def __init__(self, decoder: sj.Decoder, params: Any, new_tokens: int,
               capacity: int, prompts: Sequence[Sequence[int]]):
    """Creates a configuration.

    Args:
      decoder: decoder to measure.
      params: parameters of the decoder's models.
      new_tokens: maximum number of generated tokens.
      capacity: number of cache slots per row.
      prompts: all prompts of the study. `compile` compiles a program for each
        of their padded lengths.
    """
    self.program = decoder
    self._params, self._new_tokens = params, new_tokens
    self._capacity = capacity
    self._lengths = {prefill.padded_length(len(row)): row for row in prompts}

  def compile(self, prompt: Sequence[int]):
    """Compiles the programs of all prompt lengths, and decodes one prompt.

    The first rollout is slow, especially with a controller, because it uses one
    program per draft length.
    """
    for one in self._lengths.values():
      self._decode(self._read(one, 0, 0, 0))
    self._decode(self._read(prompt, 0, 0, self._new_tokens))

  def decode(self, prompt: Sequence[int], seed: int, request_id: int):
    """Continues a prompt and measures the time.

    Returns:
      Dict of "tokens" (the generated ids), "seconds" (time of the call),
      "rounds", "reading" (seconds of the prefill) and "accepted" (expected
      number of accepted tokens, summed over rounds; the last round counts in
      full, even if its tokens exceed the maximum number of new tokens).
    """
    start = time.perf_counter()
    state = self._read(prompt, seed, request_id, self._new_tokens)
    reading = time.perf_counter() - start
    state, stats = self._decode(state)
    seconds = time.perf_counter() - start
    sj.decoding.raise_if_not_finite(stats)
    text = np.asarray(state.tokens)[0, len(prompt):int(state.lengths[0])]
    return {"seconds": seconds, "reading": reading,
            "rounds": int(stats.active[0]), "tokens": text.tolist(),
            "accepted": float(stats.expected[0, 0])}

  def _read(self, prompt: Sequence[int], seed: int, request_id: int,
            new_tokens: int):
    return jax.block_until_ready(self.program.prefill(
        self._params, [prompt], jax.random.key(seed),
        limits=len(prompt) + new_tokens, request_ids=[request_id],
        capacity=self._capacity))

  def _decode(self, state: sj.types.DecodeState):
    return jax.block_until_ready(
        self.program.decode_until(self._params, state))


class Theirs(base.Configuration):
  """Configuration with `generate` of transformers, optionally speculative."""

  def __init__(self, name: str, model: Any, new_tokens: int, temperature: float,
               eos: tuple[int, ...] | None, assistant: Any = None,
               drafting: dict[str, Any] | None = None,
               lookup: int | None = None):
    """Creates a configuration.

    Args:
      name: name of the configuration.
      model: target model of transformers.
      new_tokens: maximum number of generated tokens.
      temperature: sampling temperature. 0 is greedy decoding.
      eos: end-of-text ids, or None.
      assistant: draft model of transformers, or None.
      drafting: keyword arguments of the assistant's `GenerationConfig`.
      lookup: draft length of prompt lookup. None disables prompt lookup.
    """
    self.program = name
    self._model, self._new_tokens = model, new_tokens
    self._assistant, self._drafting = assistant, drafting
    self._options = dict(do_sample=False) if temperature == 0 else dict(
        do_sample=True, temperature=temperature, top_k=0, top_p=1.0)
    if lookup:
      self._options |= dict(prompt_lookup_num_tokens=lookup)
    if eos:
      self._options |= dict(eos_token_id=list(eos), pad_token_id=eos[0])
    self._passes = 0
    model.register_forward_pre_hook(self._count)

  def _count(self, *_: Any):
    self._passes += 1

  def compile(self, prompt: Sequence[int]):
    """Makes a short warm-up call, which is not timed."""
    self._generate(prompt, 0, _WARM_TOKENS)

  def decode(self, prompt: Sequence[int], seed: int, request_id: int):
    """Continues a prompt and measures the time.

    Returns:
      Dict of "tokens" (the generated ids), "seconds" (time of the call) and
      "rounds" (number of target calls).
    """
    self._passes = 0
    start = time.perf_counter()
    text = self._generate(prompt, seed + request_id, self._new_tokens)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "rounds": self._passes, "tokens": text}

  def _generate(self, prompt: Sequence[int], seed: int, new_tokens: int):
    import torch
    import transformers
    config = transformers.GenerationConfig(
        max_new_tokens=new_tokens, **self._options)
    # A published model has default sampling settings, such as penalties. They
    # are removed here, because specjax does not apply them.
    self._model.generation_config = transformers.GenerationConfig()
    if self._assistant is not None:
      self._assistant.generation_config = transformers.GenerationConfig(
          **self._drafting)
    torch.manual_seed(seed)
    ids = torch.tensor([prompt])
    out = self._model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=config,
        assistant_model=self._assistant)
    return out[0, len(prompt):].tolist()


def accepted(run: dict[str, Any]) -> float:
  """Returns the number of accepted draft tokens of one run.

  For `Ours` and `DecoderRows`, this is the expected number. For `Theirs`, it is
  the number of generated tokens minus the number of rounds. The latter is a
  lower bound, because the length limit cuts the last round.
  """
  if "expected" in run:
    return run["expected"][0]
  return run.get("accepted", len(run["tokens"]) - run["rounds"])


def speed_ratio(runs: list[dict[str, dict[str, Any]]], variant: str, other: str,
                decoding: bool = False) -> tuple[float, float, float]:
  """Returns the ratio of tokens per second of two variants, over prompts.

  Args:
    runs: for every prompt, a dict from the name of a variant to the result of
      `decode`.
    variant: name of the variant in the numerator.
    other: name of the variant in the denominator.
    decoding: if True, the time of the prefill is excluded.

  Returns:
    Median, first quartile and third quartile over prompts.
  """
  speed = lambda run: len(run["tokens"]) / (
      run["seconds"] - run.get("reading", 0) * decoding)
  found = np.percentile([
      speed(run[variant]) / speed(run[other]) for run in runs], (50, 25, 75))
  return tuple(map(float, found))


def total_ratio(runs: list[dict[str, dict[str, Any]]], variant: str, other: str,
                decoding: bool = False) -> float:
  """Returns the ratio of tokens per second of two variants, over all prompts.

  The speed of a variant is the total number of tokens over the total time. So
  long outputs weigh more than in `speed_ratio`. The arguments are the same.
  """
  def speed(name):
    seconds = sum(run[name]["seconds"] - run[name].get("reading", 0) * decoding
                  for run in runs)
    return sum(len(run[name]["tokens"]) for run in runs) / seconds

  return float(speed(variant) / speed(other))


def prepare_torch() -> dict[str, str | int]:
  """Configures torch and transformers to use as many threads as jax.

  Returns:
    Versions of jax, torch and transformers, and the number of threads.

  Raises:
    ValueError: a package is missing, or jax does not compute on the CPU.
  """
  try:
    import torch
    import transformers
  except ImportError as e:
    raise ValueError(f"the package {e.name} is missing; pip install "
                     "'specjax[transformers]'") from None
  if jax.default_backend() != "cpu":
    raise ValueError(f"jax computes on the {jax.default_backend()} and torch "
                     "on the CPU, so their speeds cannot be compared; set "
                     "JAX_PLATFORMS=cpu")
  transformers.utils.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(
      os, "sched_getaffinity") else os.cpu_count())
  return {"jax": jax.__version__, "torch": torch.__version__,
          "transformers": transformers.__version__,
          "threads": torch.get_num_threads()}


def load_torch(name: str, member: Pretrained):
  """Loads a model into transformers, in float32.

  transformers reads a published model from the published files. So the
  comparison also tests the loader of specjax. A specjax model is exported
  first.

  Args:
    name: value of the flag --target or --drafter.
    member: the same model, loaded by specjax.

  Raises:
    ValueError: transformers cannot read the model, or lacks its architecture.
  """
  import torch
  import transformers
  read = functools.partial(
      transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
  own = name == "bundled" or name in models.DRAFTERS
  place = None if own else model_files.find(name)
  try:
    if place is not None and place.is_file():
      return read(str(place.parent), gguf_file=place.name).eval()
    if place is not None and "model_type" in files.read_json(
        place / "config.json", "download it again"):
      return read(str(place)).eval()
    with tempfile.TemporaryDirectory() as directory:
      try:
        export_pretrained(directory, member.model, member.params)
      except ValueError as e:
        raise ValueError(f"{name} cannot be exported to transformers: {e}"
                         ) from None
      return read(directory).eval()
  except ImportError as e:
    raise ValueError(f"transformers cannot read {name}: {e}") from None


def logits_after(model: Any, ids: list[int]):
  """Returns a list of V logits of the next token, from a transformers model."""
  import torch
  with torch.no_grad():
    return model(torch.tensor([ids])).logits[0, -1].tolist()

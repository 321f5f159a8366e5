"""One record for each layout that drafters are published in."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
import re
from typing import Any

from specjax.methods.networks import Heads
from specjax.methods.published import readings
from specjax.methods.published import tables
from specjax.methods.published import writings
from specjax.methods.published.found import Found

WEIGHTS = "model.safetensors"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """How files hold a drafter.

  Attributes:
    read: from what a directory holds to the heads.
    names: of the tensors.
    write: from the heads to the keys of a configuration; None: specjax reads
      this layout and does not write it.
    counts_target_layers: configurations must have `num_target_layers`.
    kind: of the heads.
    file: of the weights.
    algorithm: `speculators_model_type` of its configurations.
    architectures: one of those that its configurations name first.
    sign: a pattern that begins the name of a tensor of none but such files.
    prefix: what begins the names of its tensors, and is no part of them in
      `names`; what has another beginning belongs to the target.
    within: a pattern that begins the names of its tensors, and is part of
      them; what does not belongs to the target.
  """

  read: Callable[[Found], Heads]
  kind: str
  names: tables.Table
  write: Callable[[Any], dict[str, Any]] | None = None
  counts_target_layers: bool = False
  file: str = WEIGHTS
  algorithm: str = ""
  architectures: tuple[str, ...] = ()
  sign: str = ""
  prefix: str = ""
  within: str = ""

  @property
  def in_target(self) -> bool:
    """Whether it lies in the files of its target."""
    return bool(self.prefix or self.within)

  def known_by(self, config: Mapping[str, Any], tensors: Mapping[str, Any]
               ) -> bool:
    """Whether a configuration or the names of tensors are of this layout."""
    algorithm = config.get("speculators_model_type")
    if algorithm or self.algorithm:
      return algorithm == self.algorithm
    names = config.get("architectures") or [""]
    if isinstance(names, list) and names[0] in self.architectures:
      return True
    return bool(self.sign) and any(re.match(self.sign, x) for x in tensors)


_dspark = functools.partial(readings.parallel, from_anchor=True)

# By the names that `load_drafter` may be told. Of two that look alike the first
# is taken. Those with `write` are read by servers: Medusa's by Text Generation
# Inference and vLLM, EAGLE-1 and speculators by vLLM, SpecForge by SGLang,
# DFlash by both.
LAYOUTS = {
    "medusa": Layout(
        kind="medusa",
        read=readings.medusa, names=tables.MEDUSA, write=writings.medusa,
        file="medusa_lm_head.safetensors", sign=r"0\.0\.linear\."),
    "medusa of vllm": Layout(
        kind="medusa",
        read=readings.medusa_vllm, names=tables.MEDUSA_VLLM,
        write=writings.medusa_vllm, architectures=("MedusaModel",),
        sign=r"blocks\.0\.layers\.0\."),
    "medusa in its target": Layout(
        kind="medusa",
        read=readings.medusa, names=tables.MEDUSA,
        sign=r"medusa_head\.", prefix="medusa_head."),
    "hydra": Layout(
        kind="hydra",
        read=readings.hydra, names=tables.HYDRA,
        file="hydra_lm_head.safetensors", sign=r"hydra_mlp\."),
    "eagle3 of speculators": Layout(
        kind="eagle3",
        read=readings.eagle3_speculators, names=tables.EAGLE_3_LAYERS,
        write=writings.eagle3_speculators, algorithm="eagle3"),
    "eagle3 of specforge": Layout(
        kind="eagle3",
        read=readings.specforge, names=tables.EAGLE_3,
        write=writings.specforge, architectures=("LlamaForCausalLMEagle3",)),
    "eagle3 of deepspec": Layout(
        kind="eagle3",
        read=readings.eagle3, names=tables.EAGLE_3_LAYERS,
        architectures=("Qwen3Eagle3Model",)),
    "eagle3": Layout(
        kind="eagle3",
        read=readings.eagle3, names=tables.EAGLE_3, sign=r"midlayer\."),
    "dspark of deepspec": Layout(
        kind="parallel",
        read=_dspark, names=tables.PARALLEL,
        architectures=("Qwen3DSparkModel",)),
    "dspark of specforge": Layout(
        kind="parallel",
        read=_dspark, names=tables.PARALLEL,
        architectures=("DSparkDraftModel",)),
    "dflash of speculators": Layout(
        kind="parallel",
        read=functools.partial(
            readings.parallel_speculators, from_anchor=False),
        names=tables.PARALLEL_SPECULATORS, write=writings.dflash_speculators,
        algorithm="dflash"),
    "dspark of speculators": Layout(
        kind="parallel",
        read=functools.partial(
            readings.parallel_speculators, from_anchor=True),
        names=tables.PARALLEL_SPECULATORS, write=writings.dspark_speculators,
        algorithm="dspark"),
    "dflash": Layout(
        kind="parallel",
        read=functools.partial(readings.parallel, from_anchor=False),
        names=tables.PARALLEL, write=writings.dflash,
        counts_target_layers=True, architectures=("DFlashDraftModel",)),
    "mtp of speculators": Layout(
        kind="mtp",
        read=readings.mtp_speculators, names=tables.MTP_SPECULATORS,
        write=writings.mtp_speculators, algorithm="mtp"),
    "mtp of qwen": Layout(
        kind="mtp",
        read=readings.mtp_qwen, names=tables.MTP_QWEN,
        sign=r"mtp\.fc\.", within=r"mtp\."),
    "mtp of deepseek": Layout(
        kind="mtp",
        read=readings.mtp_deepseek, names=tables.MTP_DEEPSEEK,
        sign=r"model\.layers\.\d+\.eh_proj\.",
        within=r"model\.layers\.{modules}\."),
    "eagle1": Layout(
        kind="eagle1",
        read=readings.eagle1, names=tables.EAGLE_1, write=writings.eagle1,
        sign=r"fc\.weight"),
}

"""What the tensors of published drafters are called, and how they are stored.

A table goes from the path of a parameter, with `{i}` and `{j}` for the numbers
in it, to a `Stored`, whose names are those of tensors without `.weight` and
`.bias`. Numbers in braces are indices of a stacked parameter; `{first}` and
other words are sizes that a file is read with.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import re

import numpy as np

from specjax.methods.blocks.parallel_network import ParallelHeads
from specjax.models.published.layouts import apart
from specjax.models.published.layouts import gate_apart
from specjax.models.published.layouts import Stored
from specjax.models.published.layouts import turned
from specjax.models.safetensors_files import StoredTensor

Table = Mapping[str, Stored]


@dataclasses.dataclass(frozen=True)
class Each(Stored):
  """One tensor for each index of a parameter's first axes."""

  axes: int = 1

  def shapes(self, config, shape):
    return [shape[self.axes:][::-1]] * int(np.prod(shape[:self.axes]))

  def join(self, config, shape, tensors: Iterable[StoredTensor], dtype):
    out = np.empty(shape, dtype)
    for index, tensor in zip(np.ndindex(shape[:self.axes]), tensors):
      out[index] = tensor.read(dtype).T
    return out

  def split(self, config, x):
    return [np.ascontiguousarray(x[index].T)
            for index in np.ndindex(x.shape[:self.axes])]


class Row(Stored):
  """A parameter that a file holds as the only row of a matrix."""

  def shapes(self, config, shape):
    return [(1, *shape)]

  def join(self, config, shape, tensors: Iterable[StoredTensor], dtype):
    [tensor] = tensors
    return tensor.read(dtype).astype(dtype, copy=False).reshape(shape)

  def split(self, config, x):
    return [np.asarray(x)[None]]


def input_size(heads: ParallelHeads) -> int:
  """Returns how many tokens heads read: the vocabulary and a learned mask."""
  return heads.vocab_size + (heads.mask_token is None)


class MaskRow(Stored):
  """A learned mask, which a file holds as the row after an embedding.

  `split` takes the embedding with this row.
  """

  def shapes(self, config, shape):
    return [(input_size(config), *shape)]

  def join(self, config, shape, tensors: Iterable[StoredTensor], dtype):
    [tensor] = tensors
    return tensor.read(dtype)[-1].astype(dtype)

  def split(self, config, x):
    return [x]


class InputRows(Stored):
  """Rows of tokens, and in a file one of zeros for a learned mask.

  No token comes after a mask, so that nothing reads this row.
  """

  def shapes(self, config, shape):
    return [(input_size(config), *shape[1:])]

  def join(self, config, shape, tensors: Iterable[StoredTensor], dtype):
    [tensor] = tensors
    return tensor.read(dtype)[:shape[0]].astype(dtype)

  def split(self, config, x):
    return [np.pad(x, ((0, input_size(config) - len(x)), (0, 0)))]


def locate(table: Table, path: str, shape: tuple[int, ...],
           sizes: Mapping[str, int]) -> tuple[Stored, list[str]]:
  """Where a parameter is stored, and the names of the tensors.

  Args:
    table: of a layout.
    path: of the parameter, such as `module_0/attention_0/qkv/kernel`.
    shape: of the parameter.
    sizes: words that names may have in braces; `first` is added to `{i}`.

  Raises:
    KeyError: the layout has no such parameter.
  """
  module, _, leaf = path.rpartition("/")
  if leaf not in ("kernel", "bias", "scale"):
    module = path
  numbers = dict(zip("ij", map(int, re.findall(r"_(\d+)", module))))
  for letter in numbers:
    module = re.sub(r"_\d+", f"_{{{letter}}}", module, count=1)
  stored = table[module]
  suffix = "bias" if path.endswith("bias") else "weight"
  if "i" in numbers:
    numbers["i"] += sizes.get("first", 0)
  axes = stored.axes if isinstance(stored, Each) else 0
  return stored, [
      f"{name.format(*index, **sizes, **numbers)}.{suffix}"
      for name in stored.names for index in np.ndindex(shape[:axes])]


def _table(names):
  """Plain names are stored as they are, or turned where they are products."""
  return {path: name if isinstance(name, Stored) else Stored(
      (name,), *([turned] if path.split("/")[-1] in _PRODUCTS else []))
          for path, name in names.items()}


_PRODUCTS = ("entry", "fc", "fusion", "gate", "head", "joint", "out", "down",
             "w2", "skip", "inner", "block_{j}", "output")


def _layer(theirs, before="", number="{i}"):
  """A decoder layer, whose parameters' names begin with `before`."""
  attention, mlp = f"{before}attention_{number}", f"{before}mlp_{number}"
  part = lambda *names: tuple(f"{theirs}.{name}" for name in names)
  return _table({
      f"{before}attention_norm_{number}": f"{theirs}.input_layernorm",
      f"{before}mlp_norm_{number}": f"{theirs}.post_attention_layernorm",
      f"{attention}/qkv": Stored(part(
          "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), apart),
      f"{attention}/out": f"{theirs}.self_attn.o_proj",
      f"{attention}/query_norm": f"{theirs}.self_attn.q_norm",
      f"{attention}/key_norm": f"{theirs}.self_attn.k_norm",
      f"{mlp}/gate_up": Stored(part("mlp.gate_proj", "mlp.up_proj"),
                               gate_apart),
      f"{mlp}/down": f"{theirs}.mlp.down_proj",
  })


def _module(layer, embedding_norm, hidden_norm, fusion, final_norm):
  """A module for multi-token prediction around a decoder layer."""
  return _layer(layer, "module_{i}/", "{j}") | _table({
      "module_{i}/embedding_norm": embedding_norm,
      "module_{i}/hidden_norm": hidden_norm,
      "module_{i}/fusion": fusion, "module_{i}/final_norm": final_norm})


def _eagle_3(layer):
  names = _layer(layer, "module_{i}/", "{j}")
  del names["module_{i}/attention_norm_{j}"]
  return names | _table({
      "embedding": "embed_tokens", "head": "lm_head", "entry": "fc",
      "entry_norm": "input_norm", "entry_norm_{i}": "fc_norm.{i}",
      "module_{i}/embedding_norm": f"{layer}.input_layernorm",
      "module_{i}/hidden_norm": f"{layer}.hidden_norm",
      "module_{i}/final_norm": "norm"})


MEDUSA = {
    "blocks": Each(("{}.{}.linear",), axes=2),
    "block_bias": Each(("{}.{}.linear",), axes=2),
    "output": Each(("{}.{blocks}",)),
}
MEDUSA_VLLM = {
    "blocks": Each(("blocks.{}.layers.{}",), axes=2),
    "block_bias": Each(("blocks.{}.layers.{}",), axes=2),
    "output": Each(("lm_heads.{}",)),
}
HYDRA = _table({
    "head_{i}/skip": "hydra_mlp.{i}.0.res_connection",
    "head_{i}/inner": "hydra_mlp.{i}.0.linear",
    "head_{i}/block_{j}": "hydra_mlp.{i}.{j}.linear",
    "head_{i}/output": "hydra_lm_head.{i}",
})
EAGLE_1 = _layer("layers.{j}", "module_{i}/", "{j}") | _table({
    "embedding": "embed_tokens", "module_{i}/fusion": "fc"})
EAGLE_3 = _eagle_3("midlayer")
EAGLE_3_LAYERS = _eagle_3("layers.0")
MTP_DEEPSEEK = _module(
    "model.layers.{i}", "model.layers.{i}.enorm", "model.layers.{i}.hnorm",
    "model.layers.{i}.eh_proj", "model.layers.{i}.shared_head.norm")
MTP_QWEN = _module(
    "mtp.layers.{i}", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden",
    "mtp.fc", "mtp.norm")
MTP_SPECULATORS = _module(*(f"mtp_layers.{{i}}{rest}" for rest in (
    "", ".token_layernorm", ".hidden_layernorm", ".input_proj",
    ".final_layernorm")))
PARALLEL = _layer("layers.{i}") | _table({
    "fc": "fc", "hidden_norm": "hidden_norm", "final_norm": "norm",
    "markov/w1": "markov_head.markov_w1", "markov/w2": "markov_head.markov_w2",
    "markov/gate": "markov_head.gate_proj",
    "markov/joint": "markov_head.joint_proj",
    "confidence": Row(("confidence_head.proj",)),
})
PARALLEL_SPECULATORS = PARALLEL | {
    "mask": MaskRow(("embed_tokens",)),
    "markov/w1": InputRows(("markov_head.markov_w1",)),
}

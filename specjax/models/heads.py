"""What a target drafts for itself with: heads and look-ahead embeddings.

At position t the target's own LM head predicts token t + 1. Head k = 1..K
predicts token t + 1 + k from the same hidden state, and so does look-ahead
token k, which the target reads k positions behind t. The hidden state is the
one that the LM head sees (`TransformerConfig.features` empty), p^(k) the law
of head k.

The parameters of K heads are stacked along their first axis. A file of heads
names the target that they were trained for, and is refused by any other.
"""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import safetensors
import safetensors.numpy

from specjax.files import atomically
from specjax.models.transformer import default_dtype
from specjax.models.transformer import Transformer

_CONFIG, _WEIGHTS = "heads.json", "heads.safetensors"
_OUTPUTS = ("own", "low_rank", "shared")


def lm_head(params):
  """`[D, V]`, the output head of a `Transformer`'s parameters."""
  return params["head"] if "head" in params else params["embedding"].T


def _project(hidden, matrix):
  return jnp.einsum("...d,dv->...v", hidden, matrix,
                    preferred_element_type=jnp.float32)


def _check_sizes(config, names):
  for name in names:
    value = getattr(config, name)
    if not isinstance(value, int) or value < 1:
      raise ValueError(f"{name} is {value!r}; it must be a whole number of at "
                       "least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaHeads:
  """p^(k) = softmax(W2_k (SiLU(W1_k h) + h)): the heads of Medusa.

  Cai et al. 2024 (arXiv:2401.10774, section 2.1.1). W1 is 0 and W2 is the LM
  head at the start, so that an untrained head predicts what the LM head does.

  Attributes:
    width: D.
    vocab_size: V.
    heads: K.
    blocks: residual blocks `h + SiLU(W1 h)` of a head, one after the other.
    output: W2_k. "own" is a matrix per head; "low_rank" the LM head plus
      A_k B_k, with B_k = 0 at the start; "shared" the LM head itself. The LM
      head is an argument and no parameter of the heads.
    rank: columns of A_k, where `output` is "low_rank".
  """

  width: int
  vocab_size: int
  heads: int
  blocks: int = 1
  output: str = "own"
  rank: int = 64

  def __post_init__(self):
    _check_sizes(self, ("width", "vocab_size", "heads", "blocks", "rank"))
    if self.output not in _OUTPUTS:
      raise ValueError(f"output is {self.output!r}; it must be one of "
                       f"{', '.join(_OUTPUTS)}")

  def init(self, key, target_params):
    """Float32 parameters of heads that predict as the LM head does.

    Args:
      key: a PRNG key.
      target_params: of the `Transformer` that the heads are for.

    Returns:
      `blocks [K, blocks, D, D]`, and `output [K, D, V]` or `down [K, D, rank]`
      and `up [K, rank, V]`.
    """
    k, d, v = self.heads, self.width, self.vocab_size
    params = {"blocks": jnp.zeros((k, self.blocks, d, d), jnp.float32)}
    if self.output == "own":
      head = lm_head(target_params).astype(jnp.float32)
      params["output"] = jnp.tile(head, (k, 1, 1))
    elif self.output == "low_rank":
      params["down"] = d**-0.5 * jax.random.normal(
          key, (k, d, self.rank), jnp.float32)
      params["up"] = jnp.zeros((k, self.rank, v), jnp.float32)
    return params

  def head(self, params, hidden, lm_head):
    """Logits `[..., V]` of one head, whose parameters have no axis K.

    Args:
      params: of one head.
      hidden: `[..., D]`.
      lm_head: `[D, V]`.
    """
    for i in range(self.blocks):
      hidden = hidden + jax.nn.silu(hidden @ params["blocks"][i])
    if self.output == "own":
      return _project(hidden, params["output"])
    logits = _project(hidden, lm_head)
    if self.output == "low_rank":
      logits = logits + _project(hidden @ params["down"], params["up"])
    return logits

  def __call__(self, params, hidden, lm_head):
    """Logits `[..., K, V]` of all heads; arguments as in `head`."""
    return jax.vmap(self.head, (0, None, None), -2)(params, hidden, lm_head)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockwiseHeads:
  """Residual feed-forward layers before one output projection.

  Stern et al. 2018 (arXiv:1811.03115, section 6): z_k = h + W2_k ReLU(W1_k h +
  b1_k) + b2_k, projected by the LM head. p_1 of the paper is here the LM head
  on h itself, so that the target stays the target; heads 1..K are its
  p_2..p_{K+1}. W2 and b2 are 0 at the start, so that an untrained head predicts
  what the LM head does.

  Attributes:
    width: D.
    vocab_size: V.
    heads: K.
    hidden_width: F, of the inner layer.
  """

  width: int
  vocab_size: int
  heads: int
  hidden_width: int

  def __post_init__(self):
    _check_sizes(self, ("width", "vocab_size", "heads", "hidden_width"))

  def init(self, key, target_params):
    """Float32 parameters: `inner [K, D, F]`, `outer [K, F, D]` and biases.

    Args:
      key: a PRNG key.
      target_params: unused; the LM head is no parameter of the heads.
    """
    del target_params
    k, d, f = self.heads, self.width, self.hidden_width
    return {
        "inner": (2 / d)**0.5 * jax.random.normal(key, (k, d, f), jnp.float32),
        "inner_bias": jnp.zeros((k, f), jnp.float32),
        "outer": jnp.zeros((k, f, d), jnp.float32),
        "outer_bias": jnp.zeros((k, d), jnp.float32),
    }

  def head(self, params, hidden, lm_head):
    """Logits `[..., V]` of one head, whose parameters have no axis K.

    Args:
      params: of one head.
      hidden: `[..., D]`.
      lm_head: `[D, V]`.
    """
    inner = jax.nn.relu(hidden @ params["inner"] + params["inner_bias"])
    hidden = hidden + inner @ params["outer"] + params["outer_bias"]
    return _project(hidden, lm_head)

  def __call__(self, params, hidden, lm_head):
    """Logits `[..., K, V]` of all heads; arguments as in `head`."""
    return jax.vmap(self.head, (0, None, None), -2)(params, hidden, lm_head)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookaheadEmbeddings:
  """The embeddings of [LA]_1..[LA]_L (PaSS, Monea et al. 2023).

  arXiv:2311.13581, section 3. The only parameters: L D numbers.

  Attributes:
    count: L, look-ahead tokens; their ids are V..V + L - 1.
    width: D.
  """

  count: int
  width: int

  def __post_init__(self):
    _check_sizes(self, ("count", "width"))

  def init(self, key, target_params):
    """`{"embeddings": [L, D]}` float32, spread as the target's embeddings are.

    Args:
      key: a PRNG key.
      target_params: of the `Transformer` that the embeddings are for.
    """
    table = target_params["embedding"].astype(jnp.float32)
    noise = jax.random.normal(key, (self.count, self.width), jnp.float32)
    return {"embeddings": table.mean(0) + table.std(0) * noise}


def with_lookahead(target: Transformer, params, embeddings):
  """The same target, which can also read look-ahead tokens.

  Args:
    target: the `Transformer` that the embeddings are for.
    params: its parameters.
    embeddings: `{"embeddings": [L, D]}`, of `LookaheadEmbeddings`.

  Returns:
    `(target, params)`, with which a decoder drafts by `drafters.Lookahead`. On
    ids below V they are what they were.

  Raises:
    ValueError: the embeddings are of another width.
  """
  table = embeddings["embeddings"]
  count, width = table.shape
  if width != target.config.width:
    raise ValueError(
        f"width of the look-ahead embeddings is {width} and of the target "
        f"{target.config.width}; both must be equal: train them for this "
        "target")
  config = dataclasses.replace(target.config, lookahead=count)
  table = table.astype(params["embedding"].dtype)
  return Transformer(config), {**params, "lookahead": table}


# What a file calls them.
_KINDS = {"medusa": MedusaHeads, "blockwise": BlockwiseHeads,
          "lookahead": LookaheadEmbeddings}


def _sizes(target: Transformer):
  c = target.config
  return {"width": c.width, "vocab_size": c.vocab_size, "layers": c.layers}


def _described(sizes):
  return (f"width {sizes['width']}, {sizes['vocab_size']} tokens and "
          f"{sizes['layers']} layers")


def check_fits(heads, target: Transformer) -> None:
  """Checks that a target has the hidden states that heads read.

  Raises:
    ValueError: width or vocabulary differ, or the target returns other
      features than what its LM head sees.
  """
  config = getattr(target, "config", None)
  if config is None:
    raise ValueError(f"the target is a {type(target).__name__}, of which no "
                     "hidden states are known; heads need a models.Transformer")
  for name in ("width", "vocab_size"):
    has, wants = getattr(config, name), getattr(heads, name, None)
    if wants not in (None, has):
      raise ValueError(f"{name} of the heads is {wants} and of the target "
                       f"{has}; both must be equal: make heads for this target")
  if config.features:
    raise ValueError(f"the target returns features {config.features}; heads "
                     "read what the LM head does: set features to ()")


def save_heads(directory, heads, params, target: Transformer, dtype=None
               ) -> None:
  """Writes `heads.json` and `heads.safetensors`, each whole or not at all.

  Args:
    directory: created if needed; it may hold a target's checkpoint as well.
    heads: `MedusaHeads`, `BlockwiseHeads` or `LookaheadEmbeddings`.
    params: their parameters.
    target: the model that they were trained for.
    dtype: to store the weights in; None keeps theirs.
  """
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  tensors = {name: jax.device_get(jnp.asarray(x, dtype or x.dtype))
             for name, x in params.items()}
  kind = next(k for k, cls in _KINDS.items() if isinstance(heads, cls))
  config = json.dumps({"kind": kind, "heads": dataclasses.asdict(heads),
                       "target": _sizes(target)}, indent=2) + "\n"
  for name, data in ((_WEIGHTS, safetensors.numpy.save(tensors)),
                     (_CONFIG, config.encode())):
    with atomically(directory / name) as f:
      f.write(data)


def load_heads(directory, target: Transformer, dtype=None):
  """Reads what `save_heads` wrote.

  Args:
    directory: where it was written.
    target: the model that is to draft with it.
    dtype: of the parameters; None is `default_dtype()`.

  Returns:
    `(heads, params)`.

  Raises:
    ValueError: a file is missing or damaged, the two do not belong together,
      or they were trained for a target of another width, vocabulary or depth.
  """
  directory = pathlib.Path(directory)
  config_path, weights_path = directory / _CONFIG, directory / _WEIGHTS
  for path in (config_path, weights_path):
    if not path.is_file():
      raise ValueError(f"no heads at {directory}: {path.name} is missing")
  try:
    record = json.loads(config_path.read_text("utf-8"))
    heads = _KINDS[record["kind"]](**record["heads"])
    trained_for = _described(record["target"])
  except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as e:
    raise ValueError(f"{config_path} is not a configuration of heads: "
                     f"{type(e).__name__} {e}") from None
  if trained_for != _described(_sizes(target)):
    raise ValueError(
        f"the heads in {directory} were trained for a target of {trained_for}; "
        f"this one has {_described(_sizes(target))}: give the target that they "
        "were trained for, or train others with train_drafter.py")
  try:
    with safetensors.safe_open(weights_path, framework="flax") as f:
      tensors = {name: f.get_tensor(name) for name in f.keys()}
  except safetensors.SafetensorError as e:
    raise ValueError(f"{weights_path} is truncated or not a safetensors file: "
                     f"{e}") from None
  expected = jax.eval_shape(lambda key: heads.init(key, target.init(key)),
                            jax.random.key(0))
  shapes = lambda tree: {name: x.shape for name, x in sorted(tree.items())}
  if shapes(tensors) != shapes(expected):
    raise ValueError(
        f"{weights_path} holds {shapes(tensors)} where {config_path.name} asks "
        f"for {shapes(expected)}; the two files do not belong together")
  dtype = dtype or default_dtype()
  return heads, {name: jnp.asarray(x, dtype) for name, x in tensors.items()}

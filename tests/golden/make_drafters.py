"""Writes the recorded heads of published_drafters_test.py again.

  pip install torch transformers pydantic jax
  python tests/golden/make_drafters.py PUBLIC [case ...]

With the files of export_drafters.py, the loader of speculators reads what
specjax writes. This compares its activations with the recorded ones:

  python tests/golden/make_drafters.py --exported DIRECTORY

PUBLIC holds clones of the public implementations:

  Medusa (FasterDecoding) e2a5d20    Hydra (zankner) 3f39fbd
  EAGLE (SafeAILab) cb7e084          SpecForge (sgl-project) a6b6b02
  speculators (vllm-project) c05b95b dflash (z-lab) 44947fb
  DeepSpec (deepseek-ai) afdfa7c     SpecJAX (tails-mpt) d047ed4
  vllm (vllm-project) 01dbb08

The case "assistant" needs only transformers 5.19 and the model "gemma4" of
make.py, its target, and the case "uno" only peft 0.21 and the model "qwen3".
The cases with windows, those of P-EAGLE, and "dflash2", "domino", "lilicorr"
and "dflare" need no clones, but `pip install speculators==0.9.0 dflash==0.1.0`
and `pip install --no-deps sglang==0.5.23 angelslim==0.5.0 specforge==0.2.0`,
and for P-EAGLE and EAGLE-3 SpecForge unpacked (`pip download --no-deps
specforge==0.2.0`) as PUBLIC/SpecForge. Run them apart from the cases with the
clone of speculators.

Each case is a tiny random drafter in their layout, `config.json` and a
safetensors file, and `expected.npz`: what it was given, and what their code
computed in float32. The weights are numbers that float16 holds.

No public code here has the modules of DeepSeek-V3 and Qwen; the cases of their
names are computed by the layer of speculators, which is the same. A step is fed
what the head read at the one before, as vLLM, SGLang and Megatron-LM do
(`multi_token_prediction.py`).
"""

import ast
import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import json
import pathlib
import shutil
import sys
import tempfile
import types
import typing
import unittest.mock

import numpy as np
from safetensors.torch import load_file
from safetensors.torch import save_file
import torch
from torch import nn
import transformers
from transformers.cache_utils import DynamicCache

_HERE = pathlib.Path(__file__).parent / "drafters"
_ROWS, _STEPS, _VOCAB, _WIDTH = 9, 2, 48, 16
_LAYERS = 12  # of the target
# A window of a few tokens, and a sequence that is several times longer.
_WINDOW = dict(use_sliding_window=True, sliding_window=5)
_LONG = 23
_MIXED = ["sliding_attention", "full_attention"]
_USED = np.sort(np.random.default_rng(5).permutation(_VOCAB)[:20])
_UNUSED = ("loguru", "openai", "datasets", "hs_connectors")
_LLAMA = dict(
    vocab_size=_VOCAB, hidden_size=_WIDTH, intermediate_size=24,
    num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, rms_norm_eps=2.0**-17, hidden_act="silu",
    bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
    model_type="llama", torch_dtype="float16", use_cache=True)
_QWEN = _LLAMA | dict(
    head_dim=8, num_hidden_layers=2, attention_bias=False, model_type="qwen3",
    rope_theta=100.0, num_target_layers=_LAYERS, pad_token_id=None,
    layer_types=["full_attention"] * 2, rope_scaling=None,
    sliding_window=None, use_sliding_window=False, max_window_layers=2)


def _bare(root, package):
  """Packages of a repository, without what their `__init__` imports."""
  parts = package.split(".")
  for n in range(1, len(parts) + 1):
    name = ".".join(parts[:n])
    module = types.ModuleType(name)
    module.__path__ = [str(root.joinpath(*parts[:n]))]
    sys.modules[name] = module


def _stub(name, **attributes):
  sys.modules[name] = types.ModuleType(name)
  vars(sys.modules[name]).update(attributes)


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Stands in for packages that are imported and not used here."""

  def find_spec(self, name, path, target=None):
    if name.split(".")[0] in _UNUSED:
      return importlib.util.spec_from_loader(name, self, is_package=True)

  def create_module(self, spec):
    module = types.ModuleType(spec.name)
    module.__getattr__ = lambda name: unittest.mock.MagicMock()
    return module

  def exec_module(self, module):
    pass


def _file(path):
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def _classes(path, names, **scope):
  """Classes of a file whose imports are not to be had."""
  tree = ast.parse(path.read_text("utf-8"))
  tree.body = [node for node in tree.body if getattr(node, "name", "") in names]
  exec(compile(tree, str(path), "exec"), scope)  # pylint: disable=exec-used
  return [scope[name] for name in names]


@torch.no_grad()
def _randomise(module, seed):
  """Weights so large that every part counts."""
  generator = torch.Generator().manual_seed(seed)
  for name, x in module.state_dict().items():
    if not x.is_floating_point():
      continue
    noise = torch.randn(x.shape, generator=generator)
    if x.ndim == 1:
      noise = 0.3 * noise + ("norm" in name and name.endswith("weight")
                             or name.endswith("layer_scalar"))
    elif "embed" not in name and "markov_w1" not in name:
      noise = 1.6 * noise * x.shape[1]**-0.5
    x.copy_(noise.half().float())
  return module.eval()


def _draw(seed, *shape):
  generator = torch.Generator().manual_seed(seed)
  return torch.randn(*shape, generator=generator).half().float()


def _tokens(seed, size):
  return torch.tensor(np.random.default_rng(seed).integers(3, _VOCAB, size))


def _embedding(seed, model=None):
  """The target's: that which the drafter holds, if it does."""
  if model is not None:
    return model.embed_tokens.weight.detach()
  return _draw(seed, _VOCAB, _WIDTH)


def _offsets():
  """`d2t` and `t2d` of the reduced vocabulary."""
  t2d = torch.zeros(_VOCAB, dtype=torch.bool)
  t2d[torch.tensor(_USED)] = True
  return torch.tensor(_USED - np.arange(len(_USED))), t2d


@torch.no_grad()
def _steps(run, features, tokens, rows=_ROWS):
  """States of the rows, and then of steps that read their own."""
  states, past = run(features[None], tokens[None, :rows], None)
  found = [states[0]]
  for i in range(_STEPS):
    states, past = run(states[:, -1:], tokens[None, rows + i:][:, :1], past)
    found.append(states[0])
  return torch.cat(found)


def _medusa(public, layers, full):
  """Heads alone, and with the names that a whole model puts before them."""
  [block] = _classes(public / "Medusa/medusa/model/medusa_model.py",
                     ["ResBlock"], nn=nn, torch=torch)
  heads = _randomise(nn.ModuleList([
      nn.Sequential(*([block(_WIDTH)] * layers),
                    nn.Linear(_WIDTH, _VOCAB, bias=False))
      for _ in range(5)]), 1)
  hidden = _draw(2, _ROWS, _WIDTH)
  with torch.no_grad():
    logits = torch.stack([head(hidden) for head in heads])
  # What was uploaded says 2 heads; the repository reads 5 all the same.
  config = dict(medusa_num_heads=2, medusa_num_layers=layers,
                base_model_name_or_path="lmsys/vicuna-7b-v1.3",
                transformers_version="4.31.0")
  weights = dict(heads.state_dict())
  if full:
    config = _LLAMA | dict(
        architectures=["MedusaLlamaForCausalLM"], medusa_num_heads=5,
        medusa_num_layers=layers, num_hidden_layers=_LAYERS)
    weights = {f"medusa_head.{name}": x for name, x in weights.items()}
    weights["model.embed_tokens.weight"] = _embedding(3)
  return config, weights, dict(hidden=hidden, logits=logits), (
      "model.safetensors" if full else "medusa_lm_head.safetensors")


def _medusa_vllm(public):
  """Heads as vLLM names them, whose LM heads are its plain products."""
  lm_head = lambda rows, columns, **_: nn.Linear(columns, rows, bias=False)
  _, medusa = _classes(
      public / "vllm/vllm/model_executor/models/medusa.py",
      ["ResidualBlock", "Medusa"], nn=nn, torch=torch, VllmConfig=None,
      SamplingMetadata=None, SamplerOutput=None, Optional=typing.Optional,
      Iterable=typing.Iterable, ParallelLMHead=lm_head,
      DEFAULT_VOCAB_PADDING_SIZE=64, LogitsProcessor=lambda *_: None)
  config = dict(architectures=["MedusaModel"], model_type="medusa",
                hidden_size=_WIDTH, vocab_size=_VOCAB, num_heads=3,
                num_hidden_layers=2, medusa_fc_bias=True,
                truncated_vocab_size=_VOCAB, max_paths=64, topk=10)
  part = types.SimpleNamespace
  model = _randomise(medusa(vllm_config=part(speculative_config=part(
      draft_model_config=part(hf_config=part(**config))))), 8)
  hidden = _draw(9, _ROWS, _WIDTH)
  with torch.no_grad():
    logits = torch.stack([head(states) for head, states in zip(
        model.lm_heads, model(hidden))])
  return config, model.state_dict(), dict(hidden=hidden, logits=logits), (
      "model.safetensors")


def _hydra(public, layers):
  mlp_head = _file(public / "Hydra/hydra/model/hydra_heads/mlp_head.py")
  embedding = _embedding(4)
  heads = _randomise(mlp_head.HydraMLP(
      layers, 4, True, lambda ids: embedding[ids],
      types.SimpleNamespace(hidden_size=_WIDTH, vocab_size=_VOCAB)), 5)
  hidden, tokens = _draw(6, _ROWS, _WIDTH), _tokens(7, _ROWS)
  with torch.no_grad():
    logits, _ = heads(hidden[None], tokens[None])
  config = dict(hydra_num_heads=4, hydra_num_layers=layers,
                hydra_head_arch="mlp", grounded_heads=True,
                hidden_state_offset=0, transformers_version="4.31.0",
                base_model_name_or_path="lmsys/vicuna-7b-v1.3")
  return config, heads.state_dict(), dict(
      hidden=hidden, tokens=tokens, embedding=embedding,
      logits=torch.cat(logits)), "hydra_lm_head.safetensors"


def _eagle_module(public, name):
  _bare(public / "EAGLE", "eagle.model")
  return importlib.import_module(f"eagle.model.{name}")


def _eagle_config(config):
  """As the transformers of its time made it of such a file."""
  heads = config["num_attention_heads"]
  return types.SimpleNamespace(**{
      "num_key_value_heads": heads, "rope_scaling": None, "pretraining_tp": 1,
      **config})


def _eagle1(public, bias):
  cnets = _eagle_module(public, "cnets1")
  config = _LLAMA | dict(architectures=["LlamaForCausalLM"])
  del config["num_key_value_heads"]
  if not bias:
    config |= dict(bias=False, num_key_value_heads=2, rope_theta=100.0)
  model = _randomise(cnets.Model(_eagle_config(config), bias=bias), 10)
  features, tokens = _draw(11, _ROWS, _WIDTH), _tokens(12, _ROWS + _STEPS)
  hidden = _steps(lambda features, tokens, past: model(
      features, tokens, past_key_values=past, use_cache=True), features, tokens)
  head = _draw(13, _VOCAB, _WIDTH)
  weights = dict(model.state_dict())
  if not bias:  # some files leave the target's embedding out
    del weights["embed_tokens.weight"]
  return config, weights, dict(
      features=features, tokens=tokens, hidden=hidden, logits=hidden @ head.T,
      embedding=_embedding(14, model), head=head), "model.safetensors"


def _eagle3(public):
  cnets = _eagle_module(public, "cnets")
  config = _LLAMA | dict(architectures=["LlamaForCausalLM"],
                         draft_vocab_size=len(_USED))
  model = _randomise(cnets.Model(_eagle_config(config)), 20)
  model.d2t[:], model.t2d[:] = _offsets()
  features = _draw(21, _ROWS, 3 * _WIDTH)
  tokens = _tokens(22, _ROWS + _STEPS)
  hidden = _steps(lambda features, tokens, past: model(
      features, tokens, past_key_values=past, use_cache=True), features, tokens)
  with torch.no_grad():
    logits = model.lm_head(model.norm(hidden))
  weights = dict(model.state_dict())
  del weights["embed_tokens.weight"]
  return config, weights, dict(
      features=features, tokens=tokens, hidden=hidden, logits=logits,
      embedding=_embedding(23, model)), "model.safetensors"


@torch.no_grad()
def _specforge(public):
  """EAGLE-3.1: normed taps, the whole vocabulary, as it is trained."""
  torch.compile = lambda *args, **kwargs: lambda function: function
  _bare(public / "SpecForge", "specforge.modeling.draft")
  _stub("specforge.utils", print_with_rank=print)
  _stub("specforge.distributed", get_sp_ring_group=None,
        get_sp_ulysses_group=None)
  module = importlib.import_module("specforge.modeling.draft.llama3_eagle")
  config = _LLAMA | dict(
      architectures=["LlamaForCausalLMEagle3"], head_dim=8, rope_theta=100.0,
      draft_vocab_size=_VOCAB, fc_norm=True, norm_output=True,
      eagle_config=dict(eagle_aux_hidden_state_layer_ids=[1, 5, 8]))
  given = transformers.LlamaConfig(**config)
  model = _randomise(module.LlamaForCausalLMEagle3(given), 30)
  size = _ROWS + _STEPS
  features, tokens = _draw(31, size, 3 * _WIDTH), _tokens(32, size)
  mask = module.prepare_decoder_attention_mask(
      torch.ones(1, size, dtype=torch.bool), (1, size), features[None], 0)
  cache, states, ids = [[], []], model.project_hidden_states(features[None]), (
      tokens[None])
  every, logits = [], []
  for _ in range(1 + _STEPS):
    states = model.backbone(
        input_embeds=model.embed_input_ids(ids), hidden_states=states,
        cache_hidden=cache, attention_mask=mask,
        position_ids=torch.arange(size)[None], use_cache=True)
    every.append(states[0])
    logits.append(model.compute_logits(states)[0])
    ids = torch.nn.functional.pad(ids[:, 1:], (0, 1))
  return *_saved(model), _training(
      features, tokens, every, logits, _embedding(33, model)), (
          "model.safetensors")


def _specjax(public):
  """EAGLE-3 in pure JAX, as it is trained and as it is saved."""
  for package in ("specjax.models.draft", "specjax.ops"):
    _bare(public / "SpecJAX", package)
  eagle3 = importlib.import_module("specjax.models.draft.eagle3")
  import jax
  import jax.numpy as jnp
  config = eagle3.Eagle3Config(
      hidden_size=_WIDTH, intermediate_size=24, num_heads=4, num_kv_heads=2,
      head_dim=8, vocab_size=_VOCAB, draft_vocab_size=len(_USED),
      rope_theta=100.0, rms_norm_eps=2.0**-17)
  rng, params = np.random.default_rng(90), {}
  for name, x in eagle3.init_eagle3_params(
      config, jax.random.PRNGKey(0)).items():
    noise = rng.normal(size=x.shape)
    noise = (1 + np.round(10 * noise) / 32 if x.ndim == 1 else
             1.6 * noise * x.shape[1]**-0.5)
    params[name] = noise.astype(np.float16).astype(np.float32)
  size = _ROWS + _STEPS
  features, tokens = _draw(91, size, 3 * _WIDTH), _tokens(92, size)
  embedding = _embedding(93)
  states = jnp.array(features)[None] @ params["fc.weight"].T
  ids, keys, values, every, logits = tokens[None], [], [], [], []
  for step in range(1 + _STEPS):
    out, states, keys, values = eagle3.eagle3_forward(
        params, states, np.array(ids), jnp.array(embedding), config, keys,
        values, position_offset=step)
    every.append(torch.tensor(np.array(states[0])))
    logits.append(torch.tensor(np.array(out[0])))
    ids = torch.nn.functional.pad(ids[:, 1:], (0, 1))
  places = np.full(_VOCAB, -1, np.int32)
  places[_USED] = np.arange(len(_USED))
  with tempfile.TemporaryDirectory() as directory:
    eagle3.save_eagle3_checkpoint(
        params, dict(d2t=_USED.astype(np.int64), t2d=places), directory,
        cfg=config)
    weights = load_file(pathlib.Path(directory, "model.safetensors"))
    saved = json.loads(pathlib.Path(directory, "config.json").read_text())
  return saved, weights, _training(
      features, tokens, every, logits, embedding), "model.safetensors"


def _training(features, tokens, states, logits, embedding):
  """All rows of every step, and those that drafting would compute."""
  chain = lambda rows: torch.cat(
      [rows[0][:_ROWS], *(row[_ROWS - 1:_ROWS] for row in rows[1:])])
  return dict(features=features[:_ROWS], tokens=tokens, hidden=chain(states),
              logits=chain(logits), embedding=embedding,
              all_features=features, all_logits=torch.stack(logits))


def _deepspec(public):
  """EAGLE-3 of five taps, with a copy of the embedding."""
  if str(public / "DeepSpec") not in sys.path:
    sys.path.insert(0, str(public / "DeepSpec"))
  from deepspec.modeling.eagle3.qwen3.modeling import Qwen3Eagle3Model
  config = _QWEN | dict(
      architectures=["Qwen3Eagle3Model"], num_hidden_layers=1, ttt_length=7,
      layer_types=["full_attention"], draft_num_hidden_layers=1,
      target_layer_ids=[1, 3, 5, 7, 9], step_loss_decay=0.8)
  model = _randomise(Qwen3Eagle3Model(transformers.Qwen3Config(
      **config, attn_implementation="sdpa")), 80)

  def run(states, tokens, past):
    past = DynamicCache() if past is None else past
    seen = past.get_seq_length()
    return model(
        hidden_states=states, input_ids=tokens, past_key_values=past,
        position_ids=torch.arange(seen, seen + tokens.shape[1])[None]), past

  features = _draw(81, _ROWS, 5 * _WIDTH)
  tokens = _tokens(82, _ROWS + _STEPS)
  hidden = _steps(run, features, tokens)
  with torch.no_grad():
    logits = model.compute_logits(hidden)
  return config, model.state_dict(), dict(
      features=features, tokens=tokens, hidden=hidden, logits=logits,
      embedding=_embedding(83, model)), "model.safetensors"


def _speculators(public):
  """Their package, which imports more than its models need."""
  root = public / "speculators/src"
  if str(root) not in sys.path:
    sys.path.insert(0, str(root))
    sys.meta_path.append(_Absent())
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: (
        "0" if name == "speculators" else version(name))


def _speculators_config(config, algorithm):
  from speculators.config import SpeculatorsConfig
  from speculators.config import VerifierConfig
  from speculators.proposals.greedy import GreedyTokenProposalConfig
  return dict(
      transformer_layer_config=config, speculators_config=SpeculatorsConfig(
          algorithm=algorithm, default_proposal_method="greedy",
          proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
          verifier=VerifierConfig(name_or_path=None, architectures=[])))


@torch.no_grad()
def _speculators_eagle3(public):
  _speculators(public)
  from speculators.models.eagle3 import Eagle3SpeculatorConfig
  from speculators.models.eagle3.core import Eagle3DraftModel
  # Their eager attention adds a mask of booleans to the scores in later steps.
  layer = transformers.LlamaConfig(
      **_LLAMA | dict(head_dim=8, attn_implementation="sdpa"))
  config = Eagle3SpeculatorConfig(
      **_speculators_config(layer, "eagle3"), draft_vocab_size=len(_USED),
      norm_before_residual=True, norm_before_fc=True, norm_output=True,
      eagle_aux_hidden_state_layer_ids=[2, 6, 9])
  model = Eagle3DraftModel(config)
  _randomise(model, 40)
  d2t, t2d = _offsets()
  model.load_vocab_mappings(t2d, d2t)
  size = _ROWS + _STEPS
  features, tokens = _draw(41, size, 3 * _WIDTH), _tokens(42, size)
  seen = []
  model.lm_head.register_forward_hook(
      lambda _, given, logits: seen.append((given[0][0], logits[0])))
  model(features[None], tokens[None],
        torch.zeros(1, size, dtype=torch.long), ttt_steps=1 + _STEPS)
  chain = lambda k: torch.cat([seen[0][k][:_ROWS], *(
      row[k][_ROWS - 1:_ROWS] for row in seen[1:])])
  weights = {name: x for name, x in model.state_dict().items()
             if not name.startswith("verifier_")}
  return json.loads(config.to_json_string()), weights, dict(
      features=features[:_ROWS], tokens=tokens, hidden=chain(0),
      logits=chain(1), embedding=_embedding(43, model)), "model.safetensors"


_exported = None  # directory of the files that speculators loads


def _made(make, config, seed, offsets=True):
  """A model of random weights, or of those that specjax has exported."""
  if _exported is None:
    model = _randomise(make(config), seed)
    if offsets:
      d2t, t2d = _offsets()
      model.load_vocab_mappings(t2d, d2t)
    return model
  from speculators import SpeculatorModel
  from speculators import SpeculatorModelConfig
  config = SpeculatorModelConfig.from_pretrained(_exported)
  config.transformer_layer_config._attn_implementation = "eager"
  model = SpeculatorModel.from_pretrained(_exported, config=config)
  assert isinstance(model, make), type(model)
  return model.eval()


@torch.no_grad()
def _eagle3_windows():
  """EAGLE-3 whose layer has a window.

  speculators moves the window only in the first step of its training: in later
  steps a position keeps the keys of its first step. vLLM serves the layer with
  a window that ends at the drafted token. So the steps here read their keys
  with the mask that the first step of training has for longer sequences.
  """
  from speculators.models.eagle3 import Eagle3SpeculatorConfig
  from speculators.models.eagle3.core import Eagle3DraftModel
  layer = transformers.LlamaConfig(**_LLAMA | _WINDOW | dict(
      head_dim=8, layer_types=["sliding_attention"],
      attn_implementation="eager"))
  config = Eagle3SpeculatorConfig(
      **_speculators_config(layer, "eagle3"), draft_vocab_size=len(_USED),
      norm_before_residual=True, norm_before_fc=True, norm_output=True,
      eagle_aux_hidden_state_layer_ids=[2, 6, 9])
  model = _made(Eagle3DraftModel, config, 140)

  def run(states, tokens, past):
    past = DynamicCache() if past is None else past
    seen, rows = past.get_seq_length(), tokens.shape[1]
    if not seen:
      states = model.fc(model.input_norm(states))
    total = seen + rows
    mask = model._build_attn_mask(
        torch.zeros(total, dtype=torch.long), total, "cpu",
        model.sliding_window)
    at = torch.arange(seen, total)[None]
    both = torch.cat([model.embed_tokens(tokens), states], dim=-1)
    [layer] = model.layers
    return model.norm(layer(
        both, attention_mask=mask[..., seen:, :], position_ids=at,
        past_key_values=past, cache_position=at[0],
        position_embeddings=model.rotary_emb(both, at))), past

  features, tokens = _draw(141, _LONG, 3 * _WIDTH), _tokens(142, _LONG + _STEPS)
  first = []
  hook = model.lm_head.register_forward_hook(
      lambda _, given, logits: first.append(given[0][0]))
  model(features[None], tokens[None, :_LONG],
        torch.zeros(1, _LONG, dtype=torch.long), ttt_steps=1)
  hook.remove()
  hidden = _steps(run, features, tokens, _LONG)
  torch.testing.assert_close(hidden[:_LONG], first[0])
  return *_saved(model), dict(
      features=features, tokens=tokens, hidden=hidden,
      logits=model.lm_head(hidden), embedding=_embedding(143, model)), (
          "model.safetensors")


def _saved(model):
  """The configuration and the tensors that their own code writes."""
  with tempfile.TemporaryDirectory() as directory:
    model.save_pretrained(directory)
    directory = pathlib.Path(directory)
    return (json.loads((directory / "config.json").read_text()),
            load_file(directory / "model.safetensors"))


@torch.no_grad()
def _peagle():
  """P-EAGLE of speculators: all depths of a conditional drop, in one pass."""
  from speculators.models.peagle import PEagleDraftModel
  from speculators.models.peagle import PEagleSpeculatorConfig
  core = importlib.import_module("speculators.models.peagle.core")
  layer = _QWEN | _WINDOW | dict(layer_types=_MIXED)
  del layer["num_target_layers"]
  config = PEagleSpeculatorConfig(
      **_speculators_config(transformers.Qwen3Config(
          **layer, attn_implementation="eager"), "peagle"),
      draft_vocab_size=len(_USED), norm_before_residual=True, fc_norm=True,
      eagle_aux_hidden_state_layer_ids=[2, 6, 9], mask_token_id=40)
  model = _made(PEagleDraftModel, config, 150)
  features, tokens = _draw(151, _LONG, 3 * _WIDTH), _tokens(152, _LONG)
  drop, drawn, seen = core.generate_cod_sample_indices, [], []
  core.compute_metrics = lambda **_: (None, {})
  core.generate_cod_sample_indices = lambda **options: (
      drawn.append(drop(**options)), drawn[-1])[1]
  model.lm_head.register_forward_hook(
      lambda _, given, logits: seen.append((given[0][0], logits[0])))
  torch.manual_seed(0)
  model(features[None], tokens[None], torch.zeros(1, _LONG, dtype=torch.long),
        verifier_last_hidden_states=_draw(153, 1, _LONG, _WIDTH), num_depths=3)
  [(anchors, depths)], [(hidden, logits)] = drawn, seen
  return *_saved(model), dict(
      features=features, tokens=tokens, anchors=anchors, depths=depths,
      hidden=hidden, logits=logits, embedding=_embedding(154, model)), (
          "model.safetensors")


@torch.no_grad()
def _peagle_specforge(public):
  """P-EAGLE of SpecForge, whose files do not name the token of the mask."""
  for package in ("specforge.modeling.draft", "specforge.algorithms.peagle"):
    _bare(public / "SpecForge", package)
  _stub("specforge.core.loss", LogSoftmaxLoss=None)
  _stub("specforge.utils", print_with_rank=print)
  _stub("specforge.distributed", get_sp_ring_group=None,
        get_sp_ulysses_group=None)
  make = importlib.import_module("specforge.modeling.draft.peagle")
  training = importlib.import_module("specforge.algorithms.peagle.model")
  config = transformers.LlamaConfig(**_LLAMA | dict(
      head_dim=8, num_hidden_layers=2, draft_vocab_size=_VOCAB,
      rope_theta=100.0,
      eagle_config=dict(eagle_aux_hidden_state_layer_ids=[1, 5, 8])))
  model = _randomise(make.PEagleDraftModel(config), 160)
  features, tokens = _draw(161, _ROWS, 3 * _WIDTH), _tokens(162, _ROWS)
  torch.manual_seed(0)
  anchors, depths = training.generate_cod_sample_indices(
      _ROWS, torch.ones(_ROWS), num_depths=3)
  first, count = depths == 0, len(depths)
  mask = training.create_block_mask(training.create_peagle_mask_mod(
      anchors, depths, torch.tensor([_ROWS]), _ROWS), B=None, H=None,
      Q_LEN=count, KV_LEN=count, device="cpu")
  ids = torch.where(first, tokens[anchors], 40)
  states = torch.where(first[:, None], features[anchors], model.mask_hidden[0])
  hidden = model.backbone(
      model.embed_input_ids(ids)[None],
      model.project_hidden_states(states)[None], attention_mask=mask,
      position_ids=(anchors + depths)[None])
  config, weights = _saved(model)
  return config | dict(mask_token_id=40), weights, dict(
      features=features, tokens=tokens, anchors=anchors, depths=depths,
      hidden=model.norm(hidden)[0], logits=model.compute_logits(hidden)[0],
      embedding=_embedding(163, model)), "model.safetensors"


_DEEPSEEK = {
    "token_layernorm": "enorm", "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj", "final_layernorm": "shared_head.norm"}
_QWEN_NEXT = {
    "token_layernorm": "mtp.pre_fc_norm_embedding", "input_proj": "mtp.fc",
    "hidden_layernorm": "mtp.pre_fc_norm_hidden", "final_layernorm": "mtp.norm"}


def _mtp_model(public, seed=50):
  """A module of speculators, its configuration, and that of the layer."""
  _speculators(public)
  from speculators.models.mtp import MTPSpeculatorConfig
  from speculators.models.mtp.core import MTPDraftModel
  plain = _QWEN | dict(num_hidden_layers=1, layer_types=["full_attention"])
  del plain["num_target_layers"]
  config = MTPSpeculatorConfig(**_speculators_config(
      transformers.Qwen3Config(**plain, attn_implementation="eager"), "mtp"))
  return _randomise(MTPDraftModel(config), seed), config, plain


def _mtp_run(model):
  """What a module's head reads, at the next tokens."""
  [layer], made = model.mtp_layers, []
  layer.final_layernorm.register_forward_hook(
      lambda _, given, normed: made.append(normed))

  def run(states, tokens, past):
    past = DynamicCache() if past is None else past
    seen, rows = past.get_seq_length(), tokens.shape[1]
    at = torch.arange(seen, seen + rows)[None]
    hidden = torch.full((rows, rows), -torch.inf).triu(1)
    layer(hidden_states=states, token_embeddings=model.embed_tokens(tokens),
          attention_mask=hidden[None, None] if rows > 1 else None,
          position_ids=at, position_embeddings=model.rotary_emb(states, at),
          past_key_values=past)
    return made[-1], past

  return run


def _in_deepseek(models, plain):
  """Configuration and weights of a target's files with these modules."""
  weights = {"model.norm.weight": torch.ones(_WIDTH)}
  for i, model in enumerate(models, _LAYERS):
    for name, x in model.mtp_layers[0].state_dict().items():
      module, _, rest = name.partition(".")
      weights[f"model.layers.{i}.{_DEEPSEEK.get(module, module)}.{rest}"] = x
    weights |= {f"model.layers.{i}.{name}.weight": module.weight
                for name, module in (
                    ("embed_tokens", models[0].embed_tokens),
                    ("shared_head.head", models[0].lm_head))}
  return _mtp_target(plain, len(models)), weights


def _mtp_target(plain, modules):
  return plain | dict(
      num_hidden_layers=_LAYERS, num_nextn_predict_layers=modules,
      layer_types=["full_attention"] * _LAYERS)


@torch.no_grad()
def _mtp(public, kind):
  """A module for multi-token prediction, with the names of three makers."""
  model, config, plain = _mtp_model(public)
  features, tokens = _draw(51, _ROWS, _WIDTH), _tokens(52, _ROWS + _STEPS)
  hidden = _steps(_mtp_run(model), features, tokens)
  state = model.mtp_layers[0].state_dict()
  if kind == "deepseek":
    config, weights = _in_deepseek([model], plain)
  elif kind == "qwen":
    weights = {"model.norm.weight": torch.ones(_WIDTH)}
    for name, x in state.items():
      module, _, rest = name.partition(".")
      weights[f"{_QWEN_NEXT[module]}.{rest}" if module in _QWEN_NEXT
              else f"mtp.layers.0.{name}"] = x
    config = _mtp_target(plain, 1)
  else:
    weights = {f"mtp_layers.0.{name}": x for name, x in state.items()}
    config = json.loads(config.to_json_string())
  return config, weights, dict(
      features=features, tokens=tokens, hidden=hidden,
      logits=model.lm_head(hidden), embedding=_embedding(53, model),
      head=model.lm_head.weight), "model.safetensors"


@torch.no_grad()
def _mtp_mimo():
  """MiMo's module: Qwen 2's decoder layer, whose input is W [state; token].

  vLLM's `mimo_mtp.py` has the order and the names; the layer is transformers'.
  """
  from transformers.models.qwen2 import modeling_qwen2 as qwen2
  plain = _mtp_target(_QWEN | dict(
      model_type="mimo", attention_bias=True, head_dim=8), 1)
  del plain["num_target_layers"]
  config = transformers.Qwen2Config(
      **plain | dict(num_hidden_layers=1, layer_types=["full_attention"]),
      attn_implementation="eager")
  norm = lambda: qwen2.Qwen2RMSNorm(_WIDTH, eps=config.rms_norm_eps)
  model = _randomise(nn.ModuleDict(dict(
      token_layernorm=norm(), hidden_layernorm=norm(), final_layernorm=norm(),
      input_proj=nn.Linear(2 * _WIDTH, _WIDTH, bias=False),
      block=qwen2.Qwen2DecoderLayer(config, 0))), 60)
  embed, head = _draw(61, _VOCAB, _WIDTH), _draw(62, _VOCAB, _WIDTH)
  rotary = qwen2.Qwen2RotaryEmbedding(config)

  def run(states, tokens, past):
    past = DynamicCache() if past is None else past
    seen, rows = past.get_seq_length(), tokens.shape[1]
    at = torch.arange(seen, seen + rows)[None]
    hidden = torch.full((rows, rows), -torch.inf).triu(1)
    x = model["input_proj"](torch.cat([
        model["hidden_layernorm"](states),
        model["token_layernorm"](embed[tokens])], dim=-1))
    x = model["block"](x, attention_mask=hidden[None, None] if rows > 1 else
                       None, position_embeddings=rotary(x, at),
                       past_key_values=past)
    return model["final_layernorm"](x), past

  features, tokens = _draw(63, _ROWS, _WIDTH), _tokens(64, _ROWS + _STEPS)
  hidden = _steps(run, features, tokens)
  weights = {f"model.mtp_layers.0.{name.removeprefix('block.')}": x
             for name, x in model.state_dict().items()}
  return plain, weights | {"model.norm.weight": torch.ones(_WIDTH)}, dict(
      features=features, tokens=tokens, hidden=hidden, logits=hidden @ head.T,
      embedding=embed, head=head), "model.safetensors"


@torch.no_grad()
def _mtp_chained(public):
  """Two modules of DeepSeek's; the second is fed what the first's head read."""
  made = [_mtp_model(public, seed) for seed in (50, 54)]
  models, plain = [model for model, *_ in made], made[0][2]
  features, tokens = _draw(55, _ROWS, _WIDTH), _tokens(56, _ROWS + 1)
  hidden, every = features[None], []
  for k, model in enumerate(models):
    model.embed_tokens.weight.copy_(models[0].embed_tokens.weight)
    hidden, _ = _mtp_run(model)(hidden, tokens[None, k:k + _ROWS], None)
    every.append(hidden[0])
  config, weights = _in_deepseek(models, plain)
  hidden = torch.stack(every)
  return config, weights, dict(
      features=features, tokens=tokens, hidden=hidden,
      logits=models[0].lm_head(hidden), embedding=_embedding(53, models[0]),
      head=models[0].lm_head.weight), "model.safetensors"


@torch.no_grad()
def _speculators_block(public, kind, window=None, rows=_ROWS):
  """DFlash and DFlash 2 over the whole vocabulary, DSpark over a part of it.

  The block is that of one anchor, which sees what is before it; speculators
  has no code that decodes, so that the drafted tokens are those of the text.
  """
  if window is None:
    _speculators(public)
  core = importlib.import_module(f"speculators.models.{kind}.core")
  anchored = importlib.import_module("speculators.models.dflash.core")
  spark, second, size = kind == "dspark", kind == "dflash2", 5
  layer = _QWEN | (window or {})
  del layer["num_target_layers"]
  more = dict(draft_vocab_size=len(_USED), markov_rank=4) if spark else dict(
      draft_vocab_size=_VOCAB)
  if second:
    more |= _CONVOLVED | dict(selector_rank=4, selector_top_k=5)
  name = {"dspark": "DSpark", "dflash": "DFlash", "dflash2": "DFlash2"}[kind]
  make = getattr(core, f"{name}DraftModel")
  config = make.config_class(**_speculators_config(
      transformers.Qwen3Config(**layer, attn_implementation="eager"), kind),
      block_size=size, mask_token_id=40, aux_hidden_state_layer_ids=[2, 6, 9],
      sliding_window_non_causal=bool(window) and not spark, **more)
  model = _made(make, config, 75, spark)
  head = _draw(76, _VOCAB, _WIDTH)
  if _exported is None:
    model.lm_head.weight.copy_(head[torch.tensor(_USED)] if spark else head)
  anchored.select_anchors = lambda *_: (
      torch.tensor([rows]), torch.tensor([True]))
  total = rows + 2 * size
  features, tokens = _draw(77, total, 3 * _WIDTH), _tokens(78, total)
  given = dict(
      hidden_states=features[None], input_ids=tokens[None],
      loss_mask=torch.ones(1, total), max_anchors=1,
      verifier_last_hidden_states=torch.zeros(1, total, _WIDTH),
      document_ids=torch.zeros(1, total, dtype=torch.long))
  hidden, base, *_ = model._backbone_forward(**given)
  expected = dict(
      features=features[:rows], anchor=tokens[rows:rows + 1],
      hidden=hidden[0], logits=base[0], embedding=_embedding(79, model),
      head=head)
  if spark:
    seen = []
    core.compute_metrics = lambda logits, targets, confidence, *_, **__: (
        seen.append((logits, confidence)), {})
    model(**given)
    [(logits, confidence)] = seen
    expected |= dict(
        base=base[0], logits=logits[0], confidence=confidence[0],
        drafted=tokens[rows + 1:rows + 1 + size])
  if second:
    candidates, scores = model.candidate_selector.select(
        base, hidden, tokens[None, rows - 1:rows + size - 1])
    expected |= dict(
        drafted=tokens[rows + 1:rows + size], candidates=candidates[0, 1:],
        probs=scores[0, 1:].softmax(-1))
  return *_saved(model), expected, "model.safetensors"


@torch.no_grad()
def _dflash(module, window=None, rows=_ROWS):
  size = 6
  config = _QWEN | (window or {}) | dict(
      architectures=["DFlashDraftModel"], block_size=size,
      auto_map={"AutoModel": "dflash.DFlashDraftModel"},
      dflash_config=dict(mask_token_id=40, target_layer_ids=[1, 5, 8]))
  model = _randomise(module.DFlashDraftModel(transformers.Qwen3Config(
      **config, attn_implementation="eager")), 60)
  features = _draw(61, rows, 3 * _WIDTH)
  embedding, head = _embedding(62), _draw(63, _VOCAB, _WIDTH)
  anchor = _tokens(64, 1)
  block = torch.cat([anchor, torch.full((size - 1,), 40)])
  hidden = model(
      position_ids=torch.arange(rows + size)[None],
      noise_embedding=embedding[block][None], target_hidden=features[None])[0]
  # Published files of the clone's time have the old keys of transformers.
  config, weights = (config, model.state_dict()) if module.__name__ == (
      "model") else _saved(model)
  return config, weights, dict(
      features=features, anchor=anchor, hidden=hidden, logits=hidden @ head.T,
      embedding=embedding, head=head), "model.safetensors"


def _block_of(module, kind, more, seed):
  """A backbone of z-lab's, and what it computes for one block."""
  size = 6
  config = _QWEN | dict(
      architectures=[kind], block_size=size, dflash_config=dict(
          mask_token_id=40, target_layer_ids=[1, 5, 8], **more))
  model = _randomise(getattr(module, kind)(transformers.Qwen3Config(
      **config, attn_implementation="eager")), seed)
  features, anchor = _draw(seed + 1, _ROWS, 3 * _WIDTH), _tokens(seed + 2, 1)
  embedding, head = _embedding(seed + 3), _draw(seed + 4, _VOCAB, _WIDTH)
  block = torch.cat([anchor, torch.full((size - 1,), 40)])
  hidden = model(
      position_ids=torch.arange(_ROWS + size)[None],
      noise_embedding=embedding[block][None], target_hidden=features[None])
  return config, model, dict(
      features=features, anchor=anchor, hidden=hidden[0],
      base=hidden[0] @ head.T, embedding=embedding, head=head)


_CONVOLVED = dict(conv_kernel_size=2, conv_group_size=4)


@torch.no_grad()
def _dflash_2():
  config, model, expected = _block_of(
      importlib.import_module("dflash.model"), "DFlash2DraftModel",
      _CONVOLVED | dict(selector_rank=4, selector_top_k=5), 80)
  torch.manual_seed(85)
  tokens, candidates, probs = model.propose(
      expected["hidden"][None, 1:], expected["anchor"],
      lambda hidden: hidden @ expected["head"].T, 1.0)
  # What is uploaded has no `.weight` here; z-lab's code adds it on loading.
  weights = {name.replace("codebook.weight", "codebook"): x
             for name, x in model.state_dict().items()}
  return config, weights, expected | dict(
      drafted=tokens[0], candidates=candidates[0], probs=probs[0]), (
          "model.safetensors")


@torch.no_grad()
def _domino():
  root = pathlib.Path(importlib.metadata.distribution("specforge").locate_file(
      ""))
  _bare(root, "specforge.modeling.draft")
  _stub("specforge.utils", get_device_type=lambda: "cpu", padding=None)
  config, model, expected = _block_of(
      importlib.import_module("specforge.modeling.draft.domino"),
      "DominoDraftModel", dict(
          projector_type="domino", emb_dim=4, gru_hidden_dim=5,
          pure_draft_prefix_len=1, shift_label=True), 90)
  # The last token, from the last slot, has no place in their block.
  embed = lambda tokens: expected["embedding"][tokens]
  given = torch.full((1, len(expected["hidden"])), 40)
  given[0, 0] = expected["anchor"]
  tokens = model._sample_draft_tokens(
      types.SimpleNamespace(
          lm_head=lambda hidden: hidden @ expected["head"].T,
          model=types.SimpleNamespace(embed_tokens=embed)),
      expected["hidden"][None], given)
  before = torch.cat([expected["anchor"][None], tokens], dim=1)
  logits = model.apply_logits_head(
      expected["base"][None, None], prev_token_embeddings=embed(before)[None],
      hidden_states=expected["hidden"][None, None])[0, 0]
  return config, model.state_dict(), expected | dict(
      drafted=logits.argmax(-1), logits=logits), "model.safetensors"


class _Replicated(nn.Linear):
  """A layer of SGLang, which returns its bias too."""

  def __init__(self, inputs, outputs, quant_config=None, prefix=""):
    super().__init__(inputs, outputs)
    self.input_size = inputs

  def forward(self, x):
    return super().forward(x), None


@torch.no_grad()
def _lilicorr():
  """SGLang's head on z-lab's backbone with the convolutions of DFlash 2."""
  count = 4
  more = dict(
      lilicorr_hidden_size=8, lilicorr_candidate_topk=count,
      lilicorr_num_layers=2, lilicorr_num_heads=2, lilicorr_mlp_ratio=1.5,
      lilicorr_factor_dim=5, lilicorr_vector_eps=1e-6, lilicorr_logit_scale=7.0)
  unused = dict(selector_rank=1, selector_top_k=1)
  config, model, expected = _block_of(
      importlib.import_module("dflash.model"), "DFlash2DraftModel",
      _CONVOLVED | more | unused, 100)
  source = importlib.metadata.distribution("sglang").locate_file(
      "sglang/srt/models/lilicorr.py")
  *_, make = _classes(
      pathlib.Path(source), ["_apply_2d", "LiLiCorrMLP",
                             "LiLiCorrLatticeAttention", "LiLiCorrLayer",
                             "LiLiCorrHead"],
      nn=nn, torch=torch, F=nn.functional, Optional=typing.Optional,
      Tuple=tuple, ReplicatedLinear=_Replicated, RMSNorm=nn.RMSNorm,
      LiLiCorrConfig=None, add_prefix=lambda name, prefix: name)
  own = types.SimpleNamespace(
      **{key.removeprefix("lilicorr_"): x for key, x in more.items()},
      resolve_hidden_size=lambda model_hidden_size: 8)
  head = _randomise(make(
      model_hidden_size=_WIDTH, block_size=config["block_size"],
      rms_norm_eps=config["rms_norm_eps"], config=own), 105)
  head.materialize_inference_buffers(torch.device("cpu"), torch.float32)
  logs, candidates = expected["base"][1:].log_softmax(-1).topk(count)
  context = model.hidden_norm(model.fc(expected["features"]))
  start, pairs = head.log_factors(*head.score(
      token_embeddings=expected["embedding"][candidates][None, None],
      candidate_log_probs=logs[None, None],
      pass_hidden=expected["hidden"][None, None, 1:],
      anchor_hidden=context[None, -1:], anchor_valid=torch.ones(1, 1).bool()))
  rows, drafted = [start[0, 0]], []
  for slot in range(len(candidates)):
    index = rows[-1].argmax()
    drafted.append(candidates[slot, index])
    if slot < len(candidates) - 1:
      rows.append(pairs[0, 0, slot, index])
  config["architectures"] = ["LiLiCorrDraftModel"]
  for key in unused:
    del config["dflash_config"][key]
  weights = {name: x for name, x in model.state_dict().items()
             if "selector" not in name}
  weights |= {f"lilicorr.{name}": x for name, x in head.state_dict().items()}
  return config, weights, expected | dict(
      drafted=torch.stack(drafted), candidates=candidates,
      probs=torch.stack(rows).softmax(-1)), "model.safetensors"


@torch.no_grad()
def _dflare():
  folder = importlib.metadata.distribution("angelslim").locate_file(
      "angelslim/compressor/speculative/train/models/draft")
  sys.modules["draft"] = package = types.ModuleType("draft")
  package.__path__ = [str(folder)]
  config, model, expected = _block_of(
      importlib.import_module("draft.qwen_dflare"), "QwenDFlareDraftModel", {},
      110)
  return config, model.state_dict(), expected | dict(
      logits=expected["base"]), "model.safetensors"


@torch.no_grad()
def _assistant():
  """As `SinglePositionMultiTokenCandidateGenerator` drafts with it."""
  from transformers.models.gemma4_assistant import modeling_gemma4_assistant
  golden = _HERE.parent / "gemma4"
  target = transformers.AutoModelForCausalLM.from_pretrained(
      golden, dtype=torch.float32, attn_implementation="eager")
  recorded = np.load(golden / "expected.npz")
  text = torch.tensor(recorded["tokens"][:int(recorded["prompt"]) + 1])[None]
  like = json.loads((golden / "config.json").read_text())
  config = transformers.Gemma4AssistantConfig(
      text_config=transformers.Gemma4TextConfig(**{
          key: x for key, x in like.items()
          if key not in ("per_layer_config", "dtype")} | dict(
              hidden_size=12, intermediate_size=20, num_hidden_layers=3,
              layer_types=[_MIXED[0], *_MIXED], num_kv_shared_layers=3,
              global_head_dim=16, hidden_size_per_layer_input=0,
              vocab_size_per_layer_input=0, use_double_wide_mlp=False)),
      backbone_hidden_size=_WIDTH, use_ordered_embeddings=True,
      num_centroids=8, centroid_intermediate_top_k=3,
      attn_implementation="eager",
      architectures=["Gemma4AssistantForCausalLM"])
  model = _randomise(modeling_gemma4_assistant.Gemma4AssistantForCausalLM(
      config), 120)
  model.masked_embedding.token_ordering.copy_(torch.tensor(
      np.random.default_rng(121).permutation(_VOCAB)))
  out = target.model(text[:, :-1], return_shared_kv_states=True)
  read, states = out.last_hidden_state[:, -1:], out.shared_kv_states
  token, found = text[:, -1:], []
  for _ in range(1 + _STEPS):
    out = model(
        inputs_embeds=torch.cat([target.model.embed_tokens(token), read], -1),
        position_ids=torch.tensor([[text.shape[1] - 1]]),
        shared_kv_states=states, use_cache=False)
    token, read = out.logits.argmax(-1), out.last_hidden_state
    found.append((token[0], read[0], out.logits[0]))
  drafted, hidden, logits = map(torch.cat, zip(*found))
  return *_saved(model), dict(
      tokens=text[0], drafted=drafted, hidden=hidden, logits=logits), (
          "model.safetensors")


def _uno():
  """Noise tokens after a text pass through an adapter of PEFT."""
  import peft
  golden = _HERE.parent / "qwen3"
  model = peft.get_peft_model(
      transformers.AutoModelForCausalLM.from_pretrained(
          golden, dtype=torch.float32, attn_implementation="eager"),
      peft.LoraConfig(r=2, lora_alpha=6, task_type="CAUSAL_LM", target_modules=[
          f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "down")]))
  tokens, noise = _tokens(131, 9), torch.arange(9) >= 5
  generator = torch.Generator().manual_seed(130)
  for name, module in model.named_modules():
    if name.endswith(("lora_A.default", "lora_B.default")):
      x = module.weight
      x.data = torch.randn(x.shape, generator=generator).half().float()
    if name.endswith("lora_B.default"):
      module.register_forward_hook(lambda _, __, out: out * noise[:, None])
  with torch.no_grad():
    logits = model(tokens[None]).logits[0]
  with tempfile.TemporaryDirectory() as directory:
    model.save_pretrained(directory)
    config = json.loads(
        pathlib.Path(directory, "adapter_config.json").read_text())
    weights = load_file(pathlib.Path(directory, "adapter_model.safetensors"))
  return config | {"base_model_name_or_path": "qwen3"}, weights, dict(
      tokens=tokens, noise=noise, logits=logits), "adapter_model.safetensors"


def _dflash_specforge(public):
  _bare(public / "SpecForge", "specforge.modeling.draft")
  return _dflash(importlib.import_module("specforge.modeling.draft.dflash"))


@torch.no_grad()
def _dspark(public, kind):
  """DeepSpec's files hold embedding and head, SpecForge's do not."""
  size = 5
  head = dict(markov_rank=4, markov_head_type="vanilla",
              enable_confidence_head=True, confidence_head_with_markov=True)
  if kind == "deepspec":
    sys.path.insert(0, str(public / "DeepSpec"))
    from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel
    config = _QWEN | head | dict(
        architectures=["Qwen3DSparkModel"], block_size=size, num_anchors=512,
        mask_token_id=40, target_layer_ids=[1, 5, 8])
    make = Qwen3DSparkModel
  else:
    _bare(public / "SpecForge", "specforge.modeling.draft")
    make = importlib.import_module(
        "specforge.modeling.draft.dspark").DSparkDraftModel
    config = _QWEN | dict(
        architectures=["DSparkDraftModel"], block_size=size,
        auto_map={"AutoModel": "dspark.DSparkDraftModel"}, dflash_config=dict(
            attention_mode="gqa", projector_type="dspark", mask_token_id=40,
            target_layer_ids=[1, 5, 8], confidence_head_alpha=1.0,
            **head | dict(markov_head_type=kind)))
  model = _randomise(make(transformers.Qwen3Config(
      **config, attn_implementation="eager")), 70)
  features, anchor = _draw(71, _ROWS, 3 * _WIDTH), _tokens(72, 1)
  own = kind == "deepspec"
  embedding = _embedding(73, model if own else None)
  output = model.lm_head.weight if own else _draw(74, _VOCAB, _WIDTH)
  block = torch.cat([anchor, torch.full((size - 1,), 40)])
  given = dict(position_ids=torch.arange(_ROWS + size)[None],
               noise_embedding=embedding[block][None])
  hidden = (model._forward_backbone(
      target_hidden_states=features[None], **given) if own else model(
          target_hidden=features[None], **given))
  base = hidden @ output.T
  tokens, logits = model.markov_head.sample_block_tokens(
      base, first_prev_token_ids=anchor, hidden_states=hidden)
  before = torch.cat([anchor[None], tokens[:, :-1]], dim=1)
  confidence = (model.predict_confidence_step if own else
                model.predict_confidence)(hidden, prev_token_ids=before)
  config, weights = (_saved(model) if kind == "rnn" else
                     (config, model.state_dict()))
  return config, weights, dict(
      features=features, anchor=anchor, hidden=hidden[0], base=base[0],
      drafted=tokens[0], logits=logits[0], confidence=confidence[0],
      embedding=embedding, head=output), "model.safetensors"


CASES = {
    "medusa": lambda public: _medusa(public, 1, False),
    "medusa_shared_blocks": lambda public: _medusa(public, 2, True),
    "medusa_vllm": _medusa_vllm,
    "hydra": lambda public: _hydra(public, 1),
    "hydra_shared_blocks": lambda public: _hydra(public, 3),
    "eagle1": lambda public: _eagle1(public, True),
    "eagle1_plain": lambda public: _eagle1(public, False),
    "eagle3": _eagle3,
    "eagle3_specforge": _specforge,
    "eagle3_speculators": _speculators_eagle3,
    "eagle3_deepspec": _deepspec,
    "eagle3_specjax": _specjax,
    "mtp_deepseek": lambda public: _mtp(public, "deepseek"),
    "mtp_qwen": lambda public: _mtp(public, "qwen"),
    "mtp_speculators": lambda public: _mtp(public, "speculators"),
    "mtp_mimo": lambda _: _mtp_mimo(),
    "mtp_chained": _mtp_chained,
    "dflash": lambda public: _dflash(
        _file(public / "dflash/dflash/model.py")),
    "dflash_specforge": _dflash_specforge,
    "dflash_speculators": lambda public: _speculators_block(public, "dflash"),
    "dflash2": lambda _: _dflash_2(),
    "domino": lambda _: _domino(),
    "lilicorr": lambda _: _lilicorr(),
    "dflare": lambda _: _dflare(),
    "uno": lambda _: _uno(),
    "assistant": lambda _: _assistant(),
    "dspark": lambda public: _dspark(public, "deepspec"),
    "dspark_gated": lambda public: _dspark(public, "gated"),
    "dspark_rnn": lambda public: _dspark(public, "rnn"),
    "dspark_speculators": lambda public: _speculators_block(public, "dspark"),
    "eagle3_windows": lambda _: _eagle3_windows(),
    "peagle_speculators": lambda _: _peagle(),
    "peagle_specforge": _peagle_specforge,
    "dflash_windows": lambda _: _dflash(
        importlib.import_module("dflash.model"), _WINDOW | dict(
            sliding_window=7, layer_types=_MIXED), _LONG),
    "dflash_windows_speculators": lambda _: _speculators_block(
        None, "dflash", _WINDOW | dict(layer_types=_MIXED), _LONG),
    "dflash2_windows_speculators": lambda _: _speculators_block(
        None, "dflash2", _WINDOW | dict(layer_types=_MIXED), _LONG),
    "dspark_windows_speculators": lambda _: _speculators_block(
        None, "dspark", _WINDOW | dict(layer_types=_MIXED[::-1]), _LONG),
}


def _compare(directory):
  """Prints the largest differences of exported drafters from the records."""
  global _exported
  for _exported in sorted(pathlib.Path(directory).iterdir()):
    name = _exported.name.split("-")[0]
    if name not in CASES:
      continue
    _, _, found, _ = CASES[name](None)
    recorded = np.load(_HERE / name / "expected.npz")
    differences = {key: float(np.abs(found[key].numpy() - recorded[key]).max())
                   for key in ("hidden", "logits", "confidence")
                   if key in recorded}
    print(_exported.name, differences)
    assert all(x < 1e-5 for x in differences.values())


def main():
  torch.set_num_threads(1)
  if sys.argv[1] == "--exported":
    return _compare(sys.argv[2])
  public, *wanted = sys.argv[1:]
  for name in wanted or CASES:
    config, weights, expected, file = CASES[name](pathlib.Path(public))
    directory = _HERE / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    adapter = "adapter_" if "peft_type" in config else ""
    (directory / f"{adapter}config.json").write_text(
        json.dumps(config, indent=1) + "\n")
    save_file({key: (x.half() if x.is_floating_point() else x).clone()
               for key, x in weights.items()}, directory / file,
              metadata={"format": "pt"})
    np.savez_compressed(directory / "expected.npz", **{
        key: x.detach().numpy() for key, x in expected.items()})
    print(name, {key: tuple(x.shape) for key, x in expected.items()})


if __name__ == "__main__":
  main()

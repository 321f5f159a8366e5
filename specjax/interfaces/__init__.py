"""What a rule or a drafter may leave out, and what holds where it does.

This is the one list of it. `exact`, `analysis`, the studies and most of the
loop ask a `Rule` (`rules`) and the functions of `parts`; who else needs
something looks for it on the part under the name that it has here. What a
drafter says of its drafts is in `declared`.

A verification rule (`specjax.types.Verifier`) has `law`. Optional are

  lossless   bool, default True: the output follows the target's law.
  requires   names out of `CAPABILITIES` that the drafter must have; default
             ("chain",), for most rules are written for chains. A rule for any
             tree that makes no use of q says `requires = ()`.
  init       `(gamma) -> state`: the rule has a state, where gamma is N - 1.
             Then `law`, and `survival`, get it as third argument, and None
             stands for a fresh one. Other rules are called with two arguments.
  by_row     `(draft, target_probs) -> LawByRow`, the same law, of which the
             loop makes the one row that it draws from; its `.law()` will do for
             `law`. It gets the state as `law` does. What is certified is this
             form. If a subclass overrides `law` alone, the inherited one is
             ignored. Default: the rows of `law`.
  commit     `(state, draft, target_probs, verdict) -> state` after a round;
             without it the state stays as it is.
  survival   `(draft, target_probs) -> [N]`, P(tau >= i | the first i drafted
             tokens), for chains; default: P(depth of the stop >= i | draft).

A drafter (`specjax.types.Drafter`) has `num_nodes`, `init`, `propose` and
`commit`. What `propose` returns may have another structure than the state, such
as a reserved cache, which `commit` settles; but not of a drafter that a
controller or a `Fallback` may leave out of a round. Optional are

  chain, iid, conditional, autoregressive, deterministic, full
             bools, default False, see `CAPABILITIES`.
  num_uniforms  how many uniform numbers it needs for a row and round. Then
             `propose` gets them as `[B, num_uniforms]` float32 in [0, 1) in
             place of keys: the loop draws the uniforms of many rounds at once,
             which is far cheaper than keys are. Coin i must not decide how many
             uniforms there are. Default: `propose` gets one key for each row.
  bind       `(target, transform) -> drafter`: the drafter specialised to a
             target, or a `ValueError` where the two do not fit. The transform
             takes the temperature of each row: `transform(logits,
             state.temperature[:, None])`. A drafter that follows its own
             paths by `transform.constraints` and `state.constraints`
             (`specjax.decoding.constraining`) drafts nothing that these forbid.
  context_length
             longest sequence that it can draft for; default: no limit.
  gamma      as a field, the tokens of a chain: a controller replaces it. The
             state must have the same form for every length.
  with_gamma `(gamma) -> drafter`: the same with chains of another length, where
             a field is not enough; None where there is no such length.
  catch_up   `(params, state, since) -> drafter`: its state after reading what
             rounds in which a controller let it rest have added to the
             `since [B]` tokens that it had read. In such a round `commit` gets
             a draft of the root alone. A drafter with a model needs it.
  tells, lacking
             for a drafter such as `Fallback`, which asks a second one where its
             first has no draft. `lacking`, `(params, state) -> [B] bool`, gives
             the rows in which the next `propose` will ask the second, before
             anything is drawn; `tells`, a bool, says whether that can be known.
             A controller then keeps separate costs for the two kinds of round.
             Default: False, and all rounds are of one kind.
  follow     `() -> drafter`: the same drafter, such that any text may be
             committed, for use inside and beside others (`Cascade`, `Fallback`,
             `Merge`): tokens are taken back, those of others are committed,
             rounds pass in which it is not asked, and `commit` gets drafts of
             others. Default: only a drafter without state is used there.
  grows      bool, default True: zeros after the end of its state's arrays are
             what more slots (`prompt.capacity`) would have been, see
             `Decoder.grow`. Models, caches and constraints may say so, too.
  shares_pass
             bool, default False: the verifying pass goes on from what `propose`
             left in the target's cache, and so cannot read a part of a draft
             alone. A controller refuses it.
  reads_cache
             bool, default False: it reads the target's cache, which must have
             written all of the text before.
  proposal   a word for how its tokens are drawn, for tables and readers.
  param_specs
             `(axis, size)`: the `PartitionSpec` of `params["drafter"]`, or of
             whole branches of it, on a mesh; see `param_specs` below.
  target_pass
             `(params, drafter, draft, depths, ancestors, cache) -> ModelOutput`
             for a drafter that has run a part of the target: what the target's
             own pass over the draft would return, logits and cache, from what
             `propose` left in its state. Default: the target reads the draft.

A cache (`specjax.types.Cache`) has `lengths`, `commit` and `rollback`. Optional
are

  reserve    `(size) -> cache`: the same, for whom feeds token after token. The
             next `size` tokens count as committed by `commit` and `rollback` as
             ever, and the cache need not write them yet.
  settle     `() -> cache`: the same with all of them written, of the form that
             it had before. Default of these two: the cache writes what it is
             told at once.
  until      `(lengths [B]) -> cache`: the same, before prompts of these lengths
             are read into it; what comes after them, until tokens are taken
             back, is padding. Default: it is overwritten in time.
  after      `(x) -> cache`: the same, when a `Transformer` has computed the
             hidden states x from it; see `KVCache.after`.
  with_rows  `(slots [R], fresh) -> cache`: the same with the R rows of another
             cache in the place of some, see `Decoder.insert`. Default: every
             leaf has the rows B first.
  take_rows  `(rows [R]) -> cache`: these rows alone, in order, copied. A cache
             with `with_rows` must have it for a `serving.Queue`.
  grow       `(form, longer) -> cache`: the same with more slots in every row.
             `form` is the shapes of an empty cache of that capacity, and
             `longer(array, form)` an array with zeros after its end. Default:
             these zeros, see `Decoder.grow`.
  heads_axis a static field: the mesh axis over which the heads are split where
             attention runs on a TPU; a `Placement` sets it to None where the
             model is replicated. Default: nothing is set.

A model (`specjax.types.ModelFn`) tells its own options; besides these

  changes_law
             bool, default False: the output follows autoregressive decoding
             with this model, which has another law than the models that it is
             made of (`Decoder.changes_law`).
"""

from specjax.interfaces.declared import CAPABILITIES
from specjax.interfaces.declared import capabilities
from specjax.interfaces.parts import bind
from specjax.interfaces.parts import cannot_grow
from specjax.interfaces.parts import check_drafter
from specjax.interfaces.parts import check_model
from specjax.interfaces.parts import context_length
from specjax.interfaces.parts import follow
from specjax.interfaces.parts import has_model
from specjax.interfaces.parts import logits_at
from specjax.interfaces.parts import num_uniforms
from specjax.interfaces.parts import param_specs
from specjax.interfaces.parts import reserved
from specjax.interfaces.parts import settled
from specjax.interfaces.parts import target_pass
from specjax.interfaces.parts import with_gamma
from specjax.interfaces.rules import check_pair
from specjax.interfaces.rules import Rule
from specjax.interfaces.rules import rule

__all__ = [
    "CAPABILITIES",
    "Rule",
    "bind",
    "cannot_grow",
    "capabilities",
    "check_drafter",
    "check_model",
    "check_pair",
    "context_length",
    "follow",
    "has_model",
    "logits_at",
    "num_uniforms",
    "param_specs",
    "reserved",
    "rule",
    "settled",
    "target_pass",
    "with_gamma",
]

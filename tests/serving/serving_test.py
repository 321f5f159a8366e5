"""Continuous batching: each sequence is the one of its prompt alone."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import testing
from specjax.decoding import rounds
from specjax.decoding.controller import Controller
from specjax.interfaces import checks
from specjax.serving import Queue
from specjax.serving import Request

_VOCAB, _ROUNDS = 5, 4
_PAIR = testing.tiny_pair(_VOCAB)


def _decoder(cache=sj.caches.KVCache):
  target, drafter = (sj.models.Transformer(model.config, cache=cache)
                     for model in (_PAIR.target, _PAIR.drafter))
  return sj.Decoder(target=target, verifier=sj.verifiers.Block(), eos=4,
                    drafter=sj.drafters.DraftModel(model=drafter, gamma=3))


_DECODER = _decoder()


def _queue(**options):
  """A queue of a small batch."""
  return Queue(_DECODER, _PAIR.params, **{
      "slots": 3, "max_length": 96, "max_ends": 1, "rounds": _ROUNDS,
      **options})


def _alone(decoder, params, request):
  """The output of `generate` for one request."""
  return decoder.generate(
      params, [request.prompt], jax.random.key(request.seed),
      max_new_tokens=request.max_new_tokens,
      temperature=None if request.temperature is None else [
          request.temperature],
      eos=None if request.eos is None else [request.eos]).tokens[0].tolist()


def _requests():
  """Ragged prompts, limits, ends, temperatures and seeds."""
  rng = np.random.default_rng(0)
  return [Request(
      prompt=rng.integers(_VOCAB, size=length).tolist(), max_new_tokens=new,
      temperature=(0.0, 1.0, None)[i % 3], eos=((), None, 0)[i // 2 % 3],
      seed=2**32 - 1 - 7 * i)
          for i, (length, new) in enumerate(zip(
              (1, 40, 2, 17, 33, 5, 32, 9), (19, 7, 25, 0, 14, 21, 1, 12)))]


@functools.cache
def _texts():
  return [_alone(_DECODER, _PAIR.params, item) for item in _requests()]


def _streamed(queue, requests):
  """{number: (the tokens of its updates, its result)}, submitted at once."""
  found = {queue.submit(item): [[], None] for item in requests}
  while not queue.idle:
    for number, tokens, result in queue.step():
      assert found[number][1] is None
      found[number] = [found[number][0] + tokens.tolist(), result]
  return found


@pytest.mark.parametrize("cache", [sj.caches.KVCache, sj.caches.Paged(page=16)])
def test_sequences_do_not_depend_on_the_batch(cache):
  # Broken: a sequence depends on other rows, its slot or its time of arrival; a
  # seed, an end, a limit or a temperature is that of another row; a slot keeps
  # state of the row before.
  queue = Queue(_decoder(cache), _PAIR.params, slots=3, max_length=96,
                max_ends=1, rounds=_ROUNDS)
  results = list(queue.results(_requests()))
  assert [item.number for item in results] == list(range(8))
  assert [item.tokens.tolist() for item in results] == _texts()
  for item, request in zip(results, _requests()):
    new = len(item.tokens) - len(request.prompt)
    assert item.reason == ("limit" if new == request.max_new_tokens and (
        new == 0 or item.tokens[-1] not in np.ravel(
            4 if request.eos is None else request.eos)) else "eos")
    assert item.rounds + item.accepted >= new >= item.accepted
  assert {item.reason for item in results} == {"limit", "eos"}

  # In another order, in a batch that grows and shrinks, by updates.
  queue = _queue(slots=(1, 3))
  found = _streamed(queue, _requests()[::-1])
  for (tokens, result), text, request in zip(
      found.values(), _texts()[::-1], _requests()[::-1]):
    assert request.prompt + tokens == text == result.tokens.tolist()


@pytest.mark.parametrize("drafter, own", [
    (sj.drafters.Online(model=_PAIR.drafter, gamma=2, learning_rate=0.3),
     _PAIR.params["drafter"]),
    (sj.drafters.Hierarchy(
        view=sj.models.cache_views.Recent(sinks=1, window=4), gamma=2,
        drafter=sj.drafters.Empty()),
     {"target": _PAIR.params["target"], "drafter": None}),
], ids=["Online", "Hierarchy"])
def test_drafters_with_a_memory_of_the_row(drafter, own):
  # Broken: a row keeps the learned weights or the cache view of the row before
  # it in its slot.
  queue = Queue(
      sj.Decoder(target=_PAIR.target, verifier=sj.verifiers.Block(), eos=4,
                 drafter=drafter),
      {**_PAIR.params, "drafter": own}, slots=2, max_length=96, max_ends=1,
      rounds=_ROUNDS)
  requests = _requests()
  forward, backward = ([item.tokens.tolist() for item in queue.results(order)]
                 for order in (requests, requests[::-1]))
  assert forward == backward[::-1]
  for item, text, greedy in zip(requests, forward, _texts()):
    if item.temperature == 0:  # any drafter
      assert text == greedy


def test_a_slot_is_filled_as_soon_as_it_is_free():
  # Broken: a batch waits for its slowest row, or a chunk for its last round.
  model = testing.MarkovModel(vocab_size=4)
  decoder = sj.Decoder(target=model, verifier=sj.verifiers.Token(),
                       drafter=sj.drafters.Empty())
  queue = Queue(decoder, {"target": model.init(jax.random.key(0))}, slots=2,
                max_length=64, rounds=8)
  for new in (3, 30, 2, 4):
    queue.submit(Request(prompt=[1], max_new_tokens=new))
  sizes = lambda: {u.number: (len(u.tokens), u.result is not None)
                   for u in queue.step()}
  assert sizes() == {0: (3, True), 1: (3, False)}
  assert queue.waiting == 2
  assert sizes() == {2: (2, True), 1: (2, False)}
  assert sizes() == {3: (4, True), 1: (8, False)}  # no request waits
  assert sizes() == {1: (8, False)}
  # Of an endless iterator only requests that soon have room are taken.
  taken = itertools.count()
  endless = (Request(prompt=[2], max_new_tokens=1 + i % 3) for i in taken)
  results = queue.results(endless, order="completion")
  first = [item.number for item in itertools.islice(results, 6)]
  assert first == [4, 5, 6, 7, 8, 1]  # the one of 30 tokens was in a slot
  assert next(taken) < 6 + 3 * 2


def test_cancelled_requests_do_not_change_others():
  # Broken: a slot is lost, or the sequence of another row changes.
  queue = _queue()
  requests = _requests()
  numbers = [queue.submit(item) for item in requests]
  running = next(u.number for u in queue.step() if u.result is None)
  waiting = numbers[7]
  assert queue.cancel(running) and queue.cancel(waiting)
  ended = {u.number: u.result for u in queue.step() if u.result}
  assert ended[running].reason == ended[waiting].reason == "cancelled"
  partial = ended[running].tokens.tolist()
  assert partial == _texts()[running][:len(partial)]
  assert len(requests[running].prompt) < len(partial) < len(_texts()[running])
  assert ended[waiting].tokens.tolist() == requests[7].prompt
  assert not queue.cancel(running) and not queue.cancel(99)
  while not queue.idle:
    ended |= {u.number: u.result for u in queue.step() if u.result}
  for number, text in zip(numbers, _texts()):
    if number in ended and ended[number].reason != "cancelled":
      assert ended[number].tokens.tolist() == text
  assert len(ended) >= 5


@pytest.mark.parametrize("change,words", [
    (dict(prompt=[]), "prompt"), (dict(prompt=[_VOCAB]), "5"),
    (dict(max_new_tokens=95), "max_new_tokens is 95.* 96"),
    (dict(max_new_tokens=-1), "max_new_tokens is -1"),
    (dict(max_new_tokens=None), "max_new_tokens is None"),
    (dict(max_new_tokens=float("inf")), "max_new_tokens is inf"),
    # In 8 bits 250 + 10 is 4, which fits every slot.
    (dict(prompt=[1] * 10, max_new_tokens=np.uint8(250)), "250"),
    (dict(temperature=-1.0), "temperature is -1"),
    (dict(temperature={}), "temperature is"), (dict(eos=(1, 2)), "eos has 2"),
    (dict(eos=9), "eos .*9"), (dict(eos="end"), "eos .*'end'"),
    (dict(seed=2**32), "seed is 4294967296"), (dict(seed=None), "seed is None"),
    (dict(context={"reference": np.zeros(3)}), "context is")])
def test_bad_requests_are_refused(change, words):
  # Broken: an error is raised on the device, or a row is never done.
  queue = _queue()
  bad = Request(**{"prompt": [1, 2], "max_new_tokens": 3, **change})
  with pytest.raises(ValueError, match=words) as error:
    queue.submit(bad)
  assert "\n" not in str(error.value) and queue.idle
  if "context" in change:
    good, refused = queue.results([_requests()[0], bad])
    assert refused.reason == "refused" and "context" in refused.error
    assert good.tokens.tolist() == _texts()[0]


@pytest.mark.parametrize("options,words", [
    (dict(slots=0), "slots is 0"), (dict(rounds=0), "rounds is 0"),
    (dict(slots=2.7), "slots is 2.7"), (dict(slots="2"), "slots is '2'"),
    (dict(rounds=2**31), "rounds is 2147483648"),
    (dict(max_length=float("nan")), "max_length is nan"),
    (dict(max_length=513), "max_length is 513.* 512"),
    (dict(slots=2, controllers={1: Controller(
        lengths=(0, 3), seconds=(1, 1.5))}), r"controllers .*\[1\]")])
def test_bad_options_are_refused(options, words):
  with pytest.raises(ValueError, match=words):
    _queue(**options)
  with pytest.raises(ValueError, match="order is 'size'"):
    next(_queue().results(order="size"))


def test_a_step_that_fails_loses_nothing(monkeypatch):
  # Broken: a cancelled request never ends, or tokens are lost, when the prefill
  # or a check of debug mode fails.
  queue = _queue()
  requests = _requests()[:5]
  texts = {queue.submit(item): list(item.prompt) for item in requests}
  reasons = {}

  def step():
    for number, tokens, result in queue.step():
      texts[number] += tokens.tolist()
      if result is not None:
        assert number not in reasons and result.tokens.tolist() == texts[number]
        reasons[number] = result.reason

  def fails(*_):
    raise MemoryError

  step()
  running = next(number for number in range(3) if number not in reasons)
  assert queue.waiting and queue.cancel(running)
  for module, name in ((rounds, "start"), (checks, "raise_if_bad")):
    with monkeypatch.context() as patch:
      patch.setattr(module, name, fails)
      with pytest.raises(MemoryError):
        step()
  while not queue.idle:
    step()
  assert reasons.pop(running) == "cancelled" and len(reasons) == 4
  assert all(texts[number] == _texts()[number] for number in reasons)

  # A request that is cancelled after its end, before the update, ends once.
  number = queue.submit(requests[3])
  texts[number] = list(requests[3].prompt)
  with monkeypatch.context() as patch:
    patch.setattr(checks, "raise_if_bad", fails)
    with pytest.raises(MemoryError):
      step()
  assert queue.cancel(number)
  step()
  assert reasons[number] == "limit" and queue.idle


def test_a_request_that_comes_while_results_are_read():
  # Broken: it is decoded, and its result is lost.
  queue = _queue()
  requests = _requests()
  numbers = []
  for result in queue.results([requests[0], requests[1]]):
    assert result.tokens.tolist() == _texts()[(0, 1, 3)[result.number]]
    if not numbers:
      queue.submit(requests[3])
    numbers.append(result.number)
  assert numbers == [0, 1, 2]


def test_results_that_another_reader_took():
  # Broken: the iteration never ends.
  queue = _queue()
  requests = _requests()
  results = queue.results([requests[3], requests[0]])  # of 0 and 19 tokens
  assert next(results).number == 0
  while not queue.idle:
    queue.step()
  steps = itertools.count()
  queue.step = lambda: [] if next(steps) < 9 else pytest.fail("for ever")
  with pytest.raises(RuntimeError, match="request 1"):
    list(results)


def test_only_the_request_with_non_finite_numbers_fails():
  # Broken: one bad row ends the others, or its slot stays bad.
  model = testing.MarkovModel(vocab_size=_VOCAB)
  table = model.init(jax.random.key(0)).at[:, 3].set(-jnp.inf)
  table = table.at[2].set(jnp.array([-jnp.inf] * 3 + [0, -jnp.inf]))
  table = table.at[:2, 2].set(-jnp.inf).at[4, 2].set(-jnp.inf)
  table = table.at[3].set(jnp.nan)  # only 2 leads there, and nothing to 2
  decoder = sj.Decoder(target=model, verifier=sj.verifiers.Token(),
                       drafter=sj.drafters.Empty())
  queue = Queue(decoder, {"target": table}, slots=2, max_length=64)
  requests = [Request(prompt=[prompt], max_new_tokens=9, seed=5)
              for prompt in (0, 2, 2, 0, 3, 0)]
  results = list(queue.results(requests))
  good = results[0].tokens.tolist()
  assert good == _alone(decoder, {"target": table}, requests[0])
  assert [item.tokens.tolist() for item in results] == [
      good, [2, 3], [2, 3], good, [3], good]
  assert [item.reason for item in results] == [
      "limit", "failed", "failed", "limit", "failed", "limit"]
  assert results[2].error.startswith(
      "the target's logits of request 2 are not finite")


def test_narrow_integers_do_not_overflow():
  # Broken: 270 + 250 is 8 in the 8 bits of max_new_tokens.
  with pytest.raises(ValueError, match="520"):
    _DECODER.generate(_PAIR.params, [[1] * 270], jax.random.key(0),
                      max_new_tokens=np.uint8(250))


def test_each_row_reads_its_own_context():
  # Broken: a row copies from the context of another row.
  cycle = [0, 1, 2, 3] * 8
  model = testing.MarkovModel(vocab_size=4)
  table = 9.0 * jnp.roll(jnp.eye(4), 1, axis=1)
  decoder = sj.Decoder(
      target=model, verifier=sj.verifiers.Token(),
      drafter=sj.drafters.Reference(gamma=3, vocab_size=4),
      transform=sj.LogitsTransform(temperature=0))
  blank = {"reference": np.full(32, -1, np.int32)}
  known = {"reference": np.array(cycle, np.int32)}
  queue = Queue(decoder, {"target": table}, slots=2, max_length=32,
                context=blank)
  results = list(queue.results(
      Request(prompt=[0, 1], max_new_tokens=12, context=own)
      for own in (known, None, None, known, None)))
  assert [item.rounds for item in results] == [3, 12, 12, 3, 12]
  assert {tuple(item.tokens) for item in results} == {tuple(cycle[:14])}


def test_each_size_has_its_controller():
  # Broken: a batch uses the costs of another size; drafts that are longer than
  # the decoder's have no room.
  model = testing.MarkovModel(vocab_size=4)
  table = 9.0 * jnp.roll(jnp.eye(4), 1, axis=1)
  decoder = sj.Decoder(
      target=model, verifier=sj.verifiers.Token(),
      drafter=sj.drafters.DraftModel(model=model, gamma=1),
      transform=sj.LogitsTransform(temperature=0))
  costs = lambda second: Controller(
      lengths=(0, 4), seconds=(1.0, second), credit=0.0)
  queue = Queue(
      decoder, {"target": table, "drafter": table}, slots=(1, 2),
      max_length=126, controllers={1: costs(1.1), 2: costs(9.0)})
  request = Request(prompt=[0], max_new_tokens=125)

  def decoded(count):  # in so many steps, for a row without room never ends
    for _ in range(count):
      queue.submit(request)
    return [update.result for _ in range(30) for update in queue.step()
            if update.result is not None]

  alone, = decoded(1)
  assert alone.tokens.tolist() == [i % 4 for i in range(126)]
  beside = decoded(2)
  assert len(beside) == 2
  assert alone.rounds < 50 and alone.accepted > 75
  assert min(item.rounds for item in beside) > 100
  assert len({tuple(item.tokens) for item in (alone, *beside)}) == 1

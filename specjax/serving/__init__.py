"""Batches that stay full: requests in, slots refilled, texts out as they come.

  submit -> waiting -> read into a free slot -> chunks of rounds -> updates

A batch that waits for its slowest row computes ever more rows that are done. A
`Queue` puts the next request into the slot of a row that is done (continuous
batching, Orca: Yu et al., OSDI 2022). A chunk is one compiled program: it ends
after so many rounds, or as soon as a slot is free that somebody waits for. Host
code runs between chunks only.

A row's random numbers are made from the seed of its request, so that in float32
its text depends neither on its neighbours, nor on its slot, nor on when it
came: it is the one that `Decoder.generate` writes of this prompt alone, with
`jax.random.key(seed)`. With a controller that holds at temperature 0 only: all
rows of a batch draft as many tokens, so above it a row's text depends on the
rows beside it, though its law does not.

No server is here. One that streams texts to whoever asks takes a task that
steps the queue in a thread, and a generator for each request:

  >>> import asyncio
  >>> import jax
  >>> import specjax as sj
  >>> async def pump(queue, streams):
  ...   while True:
  ...     for update in await asyncio.to_thread(queue.step):
  ...       if update.number in streams:     # else the client has left
  ...         streams[update.number].put_nowait(update)
  ...     if queue.idle:
  ...       await asyncio.sleep(0.01)
  >>> async def answer(queue, streams, request):
  ...   number = queue.submit(request)       # a ValueError is the client's 400
  ...   streams[number], result = asyncio.Queue(), None
  ...   try:
  ...     while result is None:
  ...       _, tokens, result = await streams[number].get()
  ...       yield tokens
  ...   finally:                             # done, or the client has left
  ...     queue.cancel(number)
  ...     del streams[number]

It is tried here with three clients, one of which leaves, and a model that is a
table:

  >>> async def client(*arguments):
  ...   return [t async for tokens in answer(*arguments) for t in tokens]
  >>> async def main(queue):
  ...   streams = {}
  ...   task = asyncio.create_task(pump(queue, streams))
  ...   clients = [
  ...       asyncio.create_task(client(queue, streams, sj.serving.Request(
  ...           prompt=prompt, max_new_tokens=6)))
  ...       for prompt in ([1, 2], [3], [0])]
  ...   await asyncio.sleep(0)               # all have asked
  ...   clients.pop().cancel()
  ...   texts = await asyncio.wait_for(asyncio.gather(*clients), 60)  # seconds
  ...   task.cancel()
  ...   return texts
  >>> model = sj.testing.MarkovModel(vocab_size=4)
  >>> decoder = sj.Decoder(
  ...     target=model, verifier=sj.verifiers.Block(),
  ...     drafter=sj.drafters.LanguageModel(model=model, gamma=3))
  >>> table = model.init(jax.random.key(0))
  >>> queue = sj.serving.Queue(
  ...     decoder, {"target": table, "drafter": table}, slots=2, max_length=32)
  >>> [len(text) for text in asyncio.run(main(queue))]
  [6, 6]
"""

from specjax.serving.queue import Queue
from specjax.serving.requests import Request
from specjax.serving.requests import Result
from specjax.serving.requests import Update

__all__ = ["Queue", "Request", "Result", "Update"]

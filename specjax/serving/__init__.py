"""Continuous batching: requests are decoded in the slots of one batch.

  submit -> waiting -> prefill of a free slot -> chunks of rounds -> updates

A `Queue` puts the next request into the slot of a row that is done (Orca: Yu et
al., OSDI 2022), so the batch does not wait for its slowest row. A chunk is one
compiled program. It ends after a fixed number of rounds, or as soon as a slot
is free for a waiting request. Host code runs only between chunks.

The random numbers of a row depend only on the seed of its request. So in
float32, the sequence of a row does not depend on other rows, its slot or its
time of arrival. It equals the output of `Decoder.generate` for this prompt
alone with `jax.random.key(seed)`. With a controller, this is true only at
temperature 0: all rows of a batch have the same draft length, so at a higher
temperature the sequence depends on the other rows. Its distribution does not.

The package contains no server. A streaming server needs a task that calls
`Queue.step` in a thread, and a generator for each request:

  >>> import asyncio
  >>> import jax
  >>> import specjax as sj
  >>> async def pump(queue, streams):
  ...   while True:
  ...     for update in await asyncio.to_thread(queue.step):
  ...       if update.number in streams:     # else the client has disconnected
  ...         streams[update.number].put_nowait(update)
  ...     if queue.idle:
  ...       await asyncio.sleep(0.01)
  >>> async def answer(queue, streams, request):
  ...   number = queue.submit(request)       # a ValueError is a bad request
  ...   streams[number], result = asyncio.Queue(), None
  ...   try:
  ...     while result is None:
  ...       _, tokens, result = await streams[number].get()
  ...       yield tokens
  ...   finally:                             # done, or disconnected
  ...     queue.cancel(number)
  ...     del streams[number]

The example below has three clients and a table as model. One client
disconnects:

  >>> async def client(*arguments):
  ...   return [t async for tokens in answer(*arguments) for t in tokens]
  >>> async def main(queue):
  ...   streams = {}
  ...   task = asyncio.create_task(pump(queue, streams))
  ...   clients = [
  ...       asyncio.create_task(client(queue, streams, sj.serving.Request(
  ...           prompt=prompt, max_new_tokens=6)))
  ...       for prompt in ([1, 2], [3], [0])]
  ...   await asyncio.sleep(0)               # all requests are submitted
  ...   clients.pop().cancel()
  ...   texts = await asyncio.wait_for(asyncio.gather(*clients), 60)  # seconds
  ...   task.cancel()
  ...   return texts
  >>> model = sj.testing.MarkovModel(vocab_size=4)
  >>> decoder = sj.Decoder(
  ...     target=model, verifier=sj.verifiers.Block(),
  ...     drafter=sj.drafters.DraftModel(model=model, gamma=3))
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

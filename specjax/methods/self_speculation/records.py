"""The method that trains a layer after the target's first ones."""

from specjax import verifiers
from specjax.methods.records import LearningRate
from specjax.methods.records import Method
from specjax.methods.records import Option
from specjax.methods.self_speculation import kangaroo_network
from specjax.methods.self_speculation import kangaroo_objective
from specjax.methods.self_speculation import strategies
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import TOKEN

KANGAROO = Method(
    name="kangaroo", heads=kangaroo_network.KangarooAdapter,
    learning_rate=LearningRate(
        bundled=1e-3, published=5e-5,
        source="start_train.py of the Kangaroo repository"),
    objective=lambda target, heads: kangaroo_objective.Kangaroo(
        model=target, adapter=heads),
    measure=lambda target, heads: kangaroo_objective.Kangaroo(
        model=target, adapter=heads),
    chain=lambda heads: strategies.kangaroo(
        heads, heads.num_forecasts, stop=None, verifier=TOKEN),
    strategy=lambda heads, verifier, gamma, tree: strategies.kangaroo(
        heads, gamma, stop=None, verifier=verifier or BLOCK),
    compared=lambda heads, tree: {"": tuple(
        strategies.kangaroo(heads, heads.num_forecasts, None, rule)
        for rule in (BLOCK, TOKEN, verifiers.GreedyBlock()))},
    head_options=(Option("exit", 1, "kangaroo: number of target layers that "
                         "run before the adapter"),))

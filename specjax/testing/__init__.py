"""Fakes and assertions for tests of new rules and drafters.

`assert_lossless` proves a verification rule lossless by enumeration.
`assert_drafter_exact` tests a drafter in the decoding loop: draft tokens must
follow the distributions q in the drafts, and the output must follow the target.
`assert_state_exact` compares a drafter's draft after some rounds with its draft
after a prefill of the same tokens.
`joint_law` and `chi_square` compare samples with an exact distribution. The
package also contains small models, drafters and tokenizers.
"""

from specjax.testing.drafts import assert_drafter_exact
from specjax.testing.drafts import DraftReport
from specjax.testing.fakes import LengthCache
from specjax.testing.fakes import ListTokenizer
from specjax.testing.fakes import MarkovModel
from specjax.testing.fakes import OracleDrafter
from specjax.testing.fakes import tiny_pair
from specjax.testing.fakes import TinyPair
from specjax.testing.laws import assert_lossless
from specjax.testing.laws import chi_square
from specjax.testing.laws import joint_law
from specjax.testing.states import assert_state_exact
from specjax.testing.states import state_difference
from specjax.testing.states import StateDifference

__all__ = [
    "DraftReport",
    "LengthCache",
    "ListTokenizer",
    "MarkovModel",
    "OracleDrafter",
    "StateDifference",
    "TinyPair",
    "assert_drafter_exact",
    "assert_lossless",
    "assert_state_exact",
    "chi_square",
    "joint_law",
    "state_difference",
    "tiny_pair",
]

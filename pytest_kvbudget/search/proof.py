"""What a closed bracket still lacks to be a proof, where boots differ from one to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from pytest_kvbudget.search import noise as noise_model
from pytest_kvbudget.search.rungs import RungState

if TYPE_CHECKING:
    from pytest_kvbudget.search.noise import Noise
    from pytest_kvbudget.search.rungs import Rung

ENOUGH_PASSES: Final = 3
ENOUGH_FAILURES: Final = 2


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """How much a ladder believes one boot."""

    noise: Noise | None = None
    """``None``: boots repeat exactly, and one is enough."""
    cold_extra_bytes: float | None = 0
    """What the first boot of a compile key takes beyond a warm one; ``None`` where nobody knows."""

    def winner_settled(self, rung: Rung, failed: Rung | None) -> bool:
        """A winner's one pass had two sigma left, or it passed three times, once of them warm.

        Where the neighbour failed by arithmetic on pinned numbers and noise moves no limit that was stated, there is
        nothing to repeat.
        """
        if self.noise is None:
            return True
        # whose cache never gets warm is not waited for
        warm = any(trial.warm is not False for trial in rung.passes) or len(rung.passes) > ENOUGH_PASSES
        if len(rung.passes) >= ENOUGH_PASSES and warm:
            return True
        last = rung.passes[-1]
        slack = noise_model.slack_bytes(last)
        if slack is not None:
            return slack >= noise_model.PROOF_SIGMAS * self.noise.sigma_bytes
        return self.noise.sigma_bytes == 0 or (failed is not None and noise_model.by_exact_limit(failed.trial))

    def failure_settled(self, rung: Rung) -> bool:
        """A cold failure counts as a warm one: it was short of more than being cold costs.

        What failed before anything was compiled is not known to be cold: engines differ in what they compile before
        they size the KV cache. A failure that was repeated with a warm cache is settled, whatever it was before, and
        one that failed twice too; one that passed in a boot of which nobody knows whether it was warm is mixed, and
        stays so.
        """
        if not rung.cold_only or self.cold_extra_bytes == 0 or len(rung.failures) >= ENOUGH_FAILURES or rung.passes:
            return True
        if noise_model.by_exact_limit(rung.trial):
            return True  # arithmetic on pinned numbers, which a cache does not move
        short = noise_model.deficit_bytes(rung.trial)
        return self.cold_extra_bytes is not None and short is not None and short > self.cold_extra_bytes

    def floor_settled(self, rung: Rung) -> bool:
        """The floor's failure is clear: it failed twice, or by more than two sigma, or by arithmetic."""
        if self.noise is None or rung.state is RungState.MIXED or len(rung.failures) >= ENOUGH_FAILURES:
            return True
        if rung.trial.cause is not None and rung.trial.cause.by_gate:
            return True  # a test's own word is no matter of memory, and of no noise in it
        short = noise_model.deficit_bytes(rung.trial)
        clear = short is not None and short > noise_model.PROOF_SIGMAS * self.noise.sigma_bytes
        return clear or self.noise.sigma_bytes == 0 or noise_model.by_exact_limit(rung.trial)


def other_set(winner: Rung, failed: Rung) -> str | None:
    """The winner's device set, where its neighbour has to be booted again on it; ``None`` where they share one."""
    known = winner.sets - {None}
    if not known or None in failed.sets or winner.sets & failed.sets:
        return None
    return min(name for name in known if name is not None)

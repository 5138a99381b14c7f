"""What a simulation found, as data without tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mla_index.diagnosis import Diagnosis
from mla_index.explanation import Explanation


@dataclass(frozen=True, slots=True)
class Check:
    """A measured value that must not exceed its bound; NaN exceeds every bound."""

    name: str
    value: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the bound holds."""
        return self.value <= self.bound

    def as_dict(self) -> dict[str, object]:
        """The same as JSON can hold it; NaN and infinity as null."""
        value = self.value if math.isfinite(self.value) else None
        return {"name": self.name, "value": value, "bound": self.bound, "passed": self.passed}


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What one rank came to.

    Args:
        rank: its number; 0 where there is only one.
        blocks: of its cache that hold tokens.
        saved_blocks: that sharing saves.
        block_bytes: bytes of a block, of one layer.
        diagnosis: of the selection, as this rank sees it.
        empty_rows: rows of which it has no entry.
    """

    rank: int
    blocks: int
    saved_blocks: int
    block_bytes: int
    diagnosis: Diagnosis
    empty_rows: int

    def as_dict(self) -> dict[str, object]:
        """The same as JSON can hold it."""
        invalid = {reason.name.lower(): n for reason, n in self.diagnosis.counts.items()}
        return {
            "rank": self.rank,
            "blocks": self.blocks,
            "saved_blocks": self.saved_blocks,
            "block_bytes": self.block_bytes,
            "empty_rows": self.empty_rows,
            "entries": {"valid": self.diagnosis.valid, **invalid},
        }


@dataclass(frozen=True)
class Report:
    """What was simulated and what came out.

    Args:
        trace: where the requests come from.
        lengths: tokens of each request.
        rows: query rows, T.
        topk: tokens selected for each, K.
        heads: query heads.
        short_rows: rows with fewer than K tokens to select from.
        interleave: adjacent tokens on one rank, in the second part.
        device: that it ran on.
        explanations: by operation, who served it and why.
        single: the rank of the first part.
        ranks: those of the second part; none where there was none.
        rows_empty_somewhere: rows of which at least one of these has no entry.
        seconds: by stage, in the order of the stages.
        checks: the errors against their bounds.
    """

    trace: str
    lengths: tuple[int, ...]
    rows: int
    topk: int
    heads: int
    short_rows: int
    interleave: int
    device: str
    explanations: dict[str, Explanation]
    single: RankFacts
    ranks: tuple[RankFacts, ...]
    rows_empty_somewhere: int
    seconds: dict[str, float]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every bound holds."""
        return all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, object]:
        """The same as JSON can hold it."""
        return {
            "trace": self.trace,
            "requests": len(self.lengths),
            "tokens": sum(self.lengths),
            "rows": self.rows,
            "topk": self.topk,
            "heads": self.heads,
            "short_rows": self.short_rows,
            "interleave": self.interleave,
            "device": self.device,
            "passed": self.passed,
            "checks": [check.as_dict() for check in self.checks],
            "single": self.single.as_dict(),
            "ranks": [rank.as_dict() for rank in self.ranks],
            "rows_empty_somewhere": self.rows_empty_somewhere,
            "seconds": dict(self.seconds),
            "backends": {op: answer.as_dict() for op, answer in self.explanations.items()},
        }

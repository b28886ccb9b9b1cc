"""A linear layer and cross-entropy as one operation that never holds the logits, on one device or over a
tensor-parallel group."""

from .functional import TokenStats, linear_cross_entropy, linear_log_probs
from .module import LinearCrossEntropyLoss, VocabParallelEmbedding, VocabParallelLMHead
from .parallel.shard import VocabShard
from .planner import Plan, plan
from .style import VocabParallelHead

__version__ = "0.1.0"

__all__ = [
    "LinearCrossEntropyLoss",
    "Plan",
    "TokenStats",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "VocabParallelLMHead",
    "VocabShard",
    "linear_cross_entropy",
    "linear_log_probs",
    "plan",
]

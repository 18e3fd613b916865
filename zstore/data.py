"""Metrics of samples, by which `data_efficiency` draws them."""

from zstore.engine.extras.curriculum.analysis import Metric, analyze, tokens_of

__all__ = ["Metric", "analyze", "tokens_of"]

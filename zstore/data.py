"""Metrics of samples, by which `data_efficiency` draws them."""

from zstore.engine.data.analysis import Metric, analyze, tokens_of

__all__ = ["Metric", "analyze", "tokens_of"]

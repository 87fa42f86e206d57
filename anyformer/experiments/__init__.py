"""Experiments: each a command, each a module with ``run(folder, ...)``; figures are drawn by :mod:`anyformer.charts`."""

from anyformer.experiments.lower_bound import our_bound as our_bound
from anyformer.experiments.lower_bound import symmetric_bound as symmetric_bound
from anyformer.experiments.lower_bound import two_feature_bound as two_feature_bound

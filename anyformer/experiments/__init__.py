"""Experiments: each a command, each a module of noun and law; figures are drawn by :mod:`anyformer.charts`."""

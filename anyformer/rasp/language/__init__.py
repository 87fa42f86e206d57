"""The published ``.rasp`` language: its grammar, its evaluator (which builds expressions of ``anyformer.rasp``), its library and its prompt."""

"""anyformer: a fixed transformer can be any transformer; its input embedding is the program."""

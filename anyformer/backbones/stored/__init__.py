"""The stored program: a fixed 0/1 transformer of linear width that multiplies by what the program stores."""

from anyformer.backbones.stored.machine import StoredProgram as StoredProgram
from anyformer.backbones.stored.machine import StoredRecipe as StoredRecipe

"""Machines on which programs are learned: the paper's experiments."""

from anyformer.backbones.frozen.machine import Frozen as Frozen
from anyformer.backbones.frozen.machine import FrozenMasked as FrozenMasked
from anyformer.backbones.frozen.machine import FrozenRandom as FrozenRandom
from anyformer.backbones.frozen.recipe import FrozenMaskedRecipe as FrozenMaskedRecipe
from anyformer.backbones.frozen.recipe import FrozenRandomRecipe as FrozenRandomRecipe
from anyformer.backbones.frozen.recipe import FrozenRecipe as FrozenRecipe
from anyformer.backbones.frozen.recipe import attention_class as attention_class

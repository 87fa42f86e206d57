"""Hugging Face models as targets, and the way back. ``transformers`` (extra ``hf``) is imported when a model is met, never before."""

from anyformer.targets.huggingface.families import own_forward as own_forward
from anyformer.targets.huggingface.reading import read_huggingface as read_huggingface
from anyformer.targets.huggingface.writing import to_huggingface as to_huggingface

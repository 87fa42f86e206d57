"""Train the small Llama of examples/hugging_face_llama.py on one-hop induction ("what followed this letter last time?").

    python examples/llama/train.py        about two minutes on one core; writes examples/llama/model and examples/llama/training.json

The result is committed, so that the example need not train.
"""

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from anyformer.learning.training import TrainingConfig, train
from anyformer.tasks import KHop

HERE = Path(__file__).parent
TASK = KHop(vocab=23, hops=1)
CONFIG = TrainingConfig(steps=1500, learning_rate=3e-3, seed=1, evaluate_every=100, evaluation_size=1024, stop_at=0.999)


class Logits(nn.Module):
    """A causal language model of transformers, as the trainer calls it."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).logits


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(CONFIG.seed)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    special = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=TASK.vocab, max_position_embeddings=128, **sizes, **special))
    history = train(Logits(model), TASK, CONFIG, lambda step, loss, accuracy, left: print(step, f"{loss:.3f} {accuracy:.4f} {left:.0f} s"))
    model.save_pretrained(HERE / "model")
    result = {"command": "python examples/llama/train.py", "task": "one-hop", "steps": history.steps[-1]}
    result |= {"accuracy": history.accuracies[-1], "parameters": sum(p.numel() for p in model.parameters())}
    (HERE / "training.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

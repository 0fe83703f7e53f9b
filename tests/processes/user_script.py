"""An ordinary training script, as in the README, with the five lines that a plan adds; run by a test under torchrun."""

import json
import sys
from pathlib import Path

import torch

import executor

plan_file, kind, out = sys.argv[1:]
torch.manual_seed(0)
if kind == "llama":
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=131,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=8,
        )
    )
else:
    from executor.decoder import Decoder
    from tests.processes.layouts import MODEL

    model = Decoder(MODEL)
tokens = torch.randint(131, (6, 4, 16), generator=torch.Generator().manual_seed(0))
loader = [(batch, batch.roll(-1, dims=1)) for batch in tokens[:1].expand(6, -1, -1)]

parallel = executor.apply(plan_file, model)
optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
losses = []
for inputs, labels in loader:
    loss = parallel.step(inputs, labels)
    parallel.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss))

Path(f"{out}.{torch.distributed.get_rank()}").write_text(json.dumps(losses))

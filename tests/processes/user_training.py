"""A user's own training of an unmodified transformers model: own optimizer with groups, scheduler, DataLoader, accumulation.

user_training.py PLAN KIND OUT: KIND `plain` runs it in one process without a plan, `applied` with the lines that a plan adds
(marked +), `loader` with a loader of another batch size. Losses and learning rates go to OUT.RANK as JSON.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

plan_file, kind, out = sys.argv[1:]
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=131,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        tie_word_embeddings=True,
    )
)
tokens = torch.randint(131, (24, 16), generator=torch.Generator().manual_seed(1))
batch_size = 3 if kind == "loader" else 4
order = torch.Generator().manual_seed(2)
loader = DataLoader(TensorDataset(tokens), batch_size=batch_size, shuffle=True, generator=order)

if kind != "plain":
    import executor  # +

    parallel = executor.apply(plan_file, model)  # +
    parameters = list(parallel.parameters())  # +
else:
    parameters = list(model.parameters())
decayed, others = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() == 1]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2, betas=(0.9, 0.95))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))

losses, rates, norms = [], [], []
accumulated = 2
for _ in range(2):
    for number, (inputs,) in enumerate(loader):
        if kind == "plain":
            loss = model(inputs, labels=inputs).loss
            loss.backward()
        else:
            loss = parallel.step(inputs)  # +
        losses.append(float(loss))
        if (number + 1) % accumulated == 0:
            for parameter in parameters:
                parameter.grad /= accumulated
            clip = torch.nn.utils.clip_grad_norm_
            norms.append(float(clip(parameters, 0.5) if kind == "plain" else parallel.clip_grad_norm_(0.5)))  # +
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append(scheduler.get_last_lr()[0])

rank = os.environ.get("RANK", "0")
Path(f"{out}.{rank}").write_text(json.dumps({"losses": losses, "rates": rates, "norms": norms}))

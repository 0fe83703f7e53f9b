"""A user's script that does everything wrong once; each rank leaves what it was told, by name."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import executor
from executor.decoder import Decoder
from executor.errors import LateRankError, RefusedError
from tests.processes.layouts import MODEL, SEQ, Case

layout, out = sys.argv[1:]
plan = Case(layout=layout).plan
rows, rank = plan.decision.workload.gbs, int(os.environ["RANK"])
told: dict[str, str] = {}


def note(name: str, call: Callable[[], object]) -> None:
    try:
        told[name] = str(call())
    except (RefusedError, LateRankError) as error:
        told[name] = f"{type(error).__name__}: {error}"


model = Decoder(MODEL, seed=0)
model.embedding.weight.requires_grad_(False)
parallel = executor.apply(plan, model, timeout_s=60)
good = torch.zeros(rows, SEQ, dtype=torch.long)
note("twice", lambda: executor.apply(plan, model))
note("clip before", lambda: float(parallel.clip_grad_norm_(1.0)))
note("shape", lambda: parallel.step(good[0]))
note("floats", lambda: parallel.step(good.float()))
note("list", lambda: parallel.step(good.tolist()))
note("empty", lambda: parallel.step(good[:, :0]))
note("token", lambda: parallel.step(good + MODEL.vocab))
note("label", lambda: parallel.step(good, good - 1))
note("clip", lambda: parallel.clip_grad_norm_(-1.0))
note("rows", lambda: parallel.step(good[:1].expand(rows + 1, -1)))
with torch.no_grad():
    note("no grad", lambda: parallel.step(good))
note("no targets", lambda: float(parallel.step(good, torch.full_like(good, -100))))
told["gradients"] = str(max(float(p.grad.abs().max()) for p in parallel.parameters() if p.grad is not None))
note("int32", lambda: round(float(parallel.step(good.int())), 6))
told["int64"] = str(round(float(parallel.step(good)), 6))
if rank == 0:
    note("alone", lambda: float(parallel.step(good)))
Path(f"{out}.{rank}").write_text(json.dumps(told))
os._exit(0)

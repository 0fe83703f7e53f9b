"""What each of 8 ranks does in the equivalence test; rank 0 writes what it found as JSON to the path given."""

import copy
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import executor
from executor.decoder import Decoder
from executor.errors import RefusedError
from executor.mesh import start_process_group
from executor.parallelize import IGNORE
from executor.train import random_batch
from executor.train import train as run_training
from executor.verify import one_process, selfcheck
from tests.processes.layouts import CASES, MODEL, SEQ, TRAINED, Case

NUM_STEPS = 3
MAX_NORM = 0.5


def check(case: Case) -> dict[str, object]:
    module = Decoder(case.model, seed=1)
    reference = copy.deepcopy(module)
    parallel = executor.apply(case.plan, module, check=False)
    own = {name for name, _ in parallel.named_parameters()}
    freed = all(p.is_meta for name, p in module.named_parameters() if name not in own)
    found = selfcheck(parallel, reference)
    return {
        "ok": found.ok,
        "freed": freed,
        "text": str(found),
        "loss": found.loss_error,
        "gradient": found.gradient_error,
    }


def train(case: Case) -> dict[str, object]:
    """Relative errors of loss and norm over some steps, and of the weights after them."""
    module = Decoder(case.model, seed=1)
    reference = copy.deepcopy(module)
    parallel = executor.apply(case.plan, module, check=False)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5)
    one_optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    error = 0.0
    for number in range(NUM_STEPS):
        inputs, labels = random_batch(case.decision.workload.gbs, SEQ, case.model.vocab, number)
        labels[0, 3:] = IGNORE
        pairs = [
            (parallel.step(inputs, labels), one_process(reference, inputs, labels)),
            (parallel.clip_grad_norm_(MAX_NORM), torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)),
        ]
        error = max([error, *(float((a - b).abs() / b) for a, b in pairs)])
        optimizer.step()
        one_optimizer.step()
        optimizer.zero_grad()
    for name, parameter in parallel.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        expected = dict(reference.named_parameters(remove_duplicate=False))[name]
        error = max(error, float((whole - expected).detach().abs().max() / expected.abs().max()))
    errors = torch.tensor(error)
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    return {"error": float(errors)}


def training() -> list[dict[str, object]]:
    """The loop of `meshwright run`, in two layouts of one global batch."""
    found = []
    for case in (
        Case(layout="dpr8", num_micro_batches=2),
        Case(layout="pp2 dps2 tp2 zero2 sched=1f1b", num_micro_batches=8),
    ):
        result = run_training(case.plan, num_steps=2)
        found.append(
            {
                "check": str(result.check),
                "not_compared": result.not_compared,
                "losses": [step.loss for step in result.steps],
                "norms": [step.gradient_norm for step in result.steps],
                "seconds": [step.seconds for step in result.steps],
                "phases_s": [step.phases_s for step in result.steps],
                "parts_s": [step.parts_s for step in result.steps],
            }
        )
    return found


def planted_faults() -> dict[str, bool]:
    """Faults that the self-check must find: name -> found."""
    found = {}
    for name, case in (
        ("gradients off by a thousandth", Case(layout="dpr8")),
        ("gradients not averaged", Case(layout="dpr8", num_micro_batches=1)),
        ("a recompute that is not there", Case(layout="dpr8", recompute={"full": 1})),
        ("other ranks", Case(layout="pp2 tp4 sched=1f1b")),
        ("parameters kept", Case(layout="dps8 zero3")),
    ):
        module = Decoder(case.model, seed=1)
        reference = copy.deepcopy(module)
        parallel = executor.apply(case.plan, module, check=False)
        if name == "gradients off by a thousandth":
            parallel.stages[0].get_submodule("layers.1.mlp_norm").weight.register_hook(lambda g: g * 1.001)
        elif name == "gradients not averaged":
            parallel.modules = parallel.stages
        else:
            parallel.decision = {
                "a recompute that is not there": Case(layout="dpr8", recompute={"selective": 1}),
                "other ranks": Case(layout="pp2 tp4 sched=1f1b", order=("pp", "tp")),
                "parameters kept": Case(layout="dps8 zero2"),
            }[name].decision
        found[name] = not selfcheck(parallel, reference).ok
    return found


def refusals() -> dict[str, str]:
    """Errors that need ranks: name -> message."""
    found = {}
    module = Decoder(Case(layout="dpr8").model, seed=dist.get_rank())
    attempts = {
        "different weights": lambda: executor.apply(Case(layout="dpr8").plan, module),
        "other number of ranks": lambda: executor.apply(Case(layout="dpr4").plan, Decoder(CASES[0].model)),
        "batch": lambda: executor.apply(Case(layout="dpr8").plan, Decoder(CASES[0].model), check=False).step(
            torch.zeros(5, SEQ, dtype=torch.long)
        ),
        "sequence": lambda: executor.apply(Case(layout="dpr2 tp4").plan, Decoder(CASES[0].model), check=False).step(
            torch.zeros(4, 15, dtype=torch.long)
        ),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except RefusedError as error:
            found[name] = str(error)
    return found


def transformers_llama() -> dict[str, dict[str, object]]:
    """An unmodified LlamaForCausalLM under three layouts; absent where transformers is."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return {}
    found = {}
    for case, tied in (
        (Case(layout="pp2 dps2 tp2 zero3 sched=1f1b", recompute={"selective": 2}), False),
        (Case(layout="pp2 vpp2 dpr2 tp2 sched=interleaved", model=replace(MODEL, tie_embeddings=True)), True),
        (Case(layout="dpr2 dps4 zero2", recompute={"full": 4}), False),
    ):
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
                tie_word_embeddings=tied,
            )
        )
        reference = copy.deepcopy(model)
        result = selfcheck(executor.apply(case.plan, model, check=False), reference)
        found[case.layout] = {"ok": result.ok, "text": str(result)}
    return found


def main(path: Path) -> None:
    start_process_group(60)
    found: dict[str, object] = {}
    for part in ("refusals", "planted_faults", "training", "transformers_llama"):
        start_s = time.monotonic()
        found[part] = globals()[part]()
        print(f"{part}: {time.monotonic() - start_s:.1f} s", file=sys.stderr, flush=True)
    for part, cases in (("check", CASES), ("train", TRAINED)):
        for number, case in enumerate(cases):
            start_s = time.monotonic()
            found[f"{part}/{number}"] = globals()[part](case)
            print(f"{part} {case.layout}: {time.monotonic() - start_s:.1f} s", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

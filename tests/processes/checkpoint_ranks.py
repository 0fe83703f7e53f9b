"""What each of 8 ranks does in the test of checkpoints; rank 0 writes what it found as JSON to the path given."""

import copy
import json
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import executor
from cost_models.records import Precision
from executor.decoder import Decoder
from executor.errors import CheckpointError
from executor.mesh import start_process_group
from executor.train import random_batch
from tests.processes.layouts import CASES, MODEL, SEQ, TIED, Case

DIVIDED = tuple(case for case in CASES if case.precision is Precision.FP32)
"""Every fp32 layout of the equivalence test."""
Whole = dict[str, torch.Tensor]


def pairs() -> list[tuple[Case, Case]]:
    """(saved under, loaded under): a sample of the layouts, each once as either, among those of its model."""
    found = []
    for model, every in ((MODEL, 3), (TIED, 2)):
        own = [case for case in DIVIDED if case.model == model][::every]
        found += list(zip(own, own[1:] + own[:1], strict=True))
    return found


def built(case: Case, seed: int) -> tuple[executor.Parallel, torch.optim.Optimizer]:
    """A model under a layout, its weights decayed and its biases and norms not."""
    parallel = executor.apply(case.plan, Decoder(case.model, seed=seed), check=False)
    decayed = [p for p in parallel.parameters() if p.dim() > 1]
    others = [p for p in parallel.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return parallel, torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)


def step(parallel: executor.Parallel, optimizer: torch.optim.Optimizer, number: int) -> None:
    inputs, labels = random_batch(parallel.decision.workload.gbs, SEQ, parallel.vocab, number)
    parallel.step(inputs, labels)
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def whole(parallel: executor.Parallel, optimizer: torch.optim.Optimizer) -> Whole:
    """Every tensor of this rank's weights and optimizer, undivided, under the names of an undivided model."""
    found = {}
    for name, parameter in parallel.named_weights():
        state = {f"{name} {key}": value for key, value in optimizer.state[parameter].items()}
        for key, value in {name: parameter, **state}.items():
            found[key] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return found


def exchanged(own: Whole) -> Whole:
    everywhere: list[Whole] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, own)
    return {key: value for one in everywhere for key, value in one.items()}


def round_trip(saved_under: Case, loaded_under: Case, folder: Path) -> dict[str, object]:
    parallel, optimizer = built(saved_under, seed=1)
    for number in range(2):
        step(parallel, optimizer, number)
    for group in optimizer.param_groups:
        group["lr"] = 3e-3  # as a scheduler does
    executor.save(folder, parallel, optimizer, extra={"step": 2})
    expected = exchanged(whole(parallel, optimizer))
    del parallel, optimizer
    parallel, optimizer = built(loaded_under, seed=2)
    extra = executor.load(folder, parallel, optimizer)
    own = whole(parallel, optimizer)
    different = [key for key, value in own.items() if not torch.equal(value, expected[key])]
    rates = {(group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
    step(parallel, optimizer, 2)  # it goes on
    counts = torch.tensor([len(different), int(not rates <= {(3e-3, 0.1), (3e-3, 0.0)})])
    dist.all_reduce(counts)
    return {"different": int(counts[0]), "rates": int(counts[1]), "extra": extra, "tensors": len(own)}


def said(attempt: object) -> str:
    """The message of a CheckpointError, which every rank must raise alike."""
    try:
        attempt()  # type: ignore[operator]
    except CheckpointError as error:
        told: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(told, str(error))
        return str(error) if len(set(told)) == 1 else f"ranks differ: {told}"
    return "nothing was raised"


def on_first_rank(work: object) -> None:
    if dist.get_rank() == 0:
        work()  # type: ignore[operator]
    dist.barrier()


def faults(folder: Path) -> dict[str, str]:
    case = Case(layout="dps8 zero3")
    parallel, optimizer = built(case, seed=1)
    step(parallel, optimizer, 0)
    good, crashed = folder / "good", folder / ".crashed.partial"
    executor.save(good, parallel, optimizer)
    before = copy.deepcopy(whole(parallel, optimizer))
    found = {
        "exists": said(lambda: executor.save(good, parallel, optimizer)),
        "missing": said(lambda: executor.load(folder / "nowhere", parallel)),
        "another optimizer": said(lambda: executor.load(good, parallel, torch.optim.SGD(parallel.parameters()))),
        "one group": said(lambda: executor.load(good, parallel, torch.optim.AdamW(parallel.parameters()))),
    }
    on_first_rank(lambda: shutil.copytree(good, crashed))
    found["crashed"] = said(lambda: executor.load(folder / "crashed", parallel))
    executor.save(folder / "crashed", parallel)  # over what a crash left
    found["weights alone"] = said(lambda: executor.load(folder / "crashed", parallel, optimizer))
    for name, damage in {
        "truncated": lambda path: path.write_bytes(path.read_bytes()[:-10]),
        "lost": lambda path: path.unlink(),
    }.items():
        on_first_rank(lambda name=name: shutil.copytree(good, folder / name))
        on_first_rank(lambda name=name, damage=damage: damage(sorted((folder / name).glob("__3*"))[0]))
        found[name] = said(lambda name=name: executor.load(folder / name, parallel))
    on_first_rank(lambda: (folder / "crashed" / "meshwright.json").unlink())
    found["no marker"] = said(lambda: executor.load(folder / "crashed", parallel))
    other, _ = built(Case(layout="dpr8", model=TIED), seed=1)
    found["another model"] = said(lambda: executor.load(good, other))
    after = whole(parallel, optimizer)
    found["changed"] = ", ".join(key for key in before if not torch.equal(before[key], after[key]))
    return found


def main(folder: Path) -> None:
    start_process_group(60)
    found: dict[str, object] = {"faults": faults(folder)}
    for number, (saved_under, loaded_under) in enumerate(pairs()):
        start_s = time.monotonic()
        found[str(number)] = round_trip(saved_under, loaded_under, folder / str(number))
        print(f"{saved_under.layout} -> {loaded_under.layout}: {time.monotonic() - start_s:.1f} s", file=sys.stderr)
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

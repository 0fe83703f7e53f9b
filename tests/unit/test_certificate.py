"""The certificate derived again from the request: it holds, and each wrong number that is planted in it is caught."""

from dataclasses import replace
from typing import Any

import pytest

from cost_models.records import Certificate, Plan
from planner.certificate import derived_again
from planner.errors import InputError
from tests.unit.test_plan import plan_for


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_for()


def _with(plan: Plan, **changes: Any) -> Plan:
    assert plan.certificate is not None
    return replace(plan, certificate=replace(plan.certificate, **changes))


def test_all_of_it_comes_out_again(plan: Plan) -> None:
    document = derived_again(plan)
    assert document["faults"] == []
    proof = plan.certificate
    assert isinstance(proof, Certificate)
    assert len(document["cells"]) == proof.num_cells
    assert sum(cell["opened"] for cell in document["cells"]) == len(proof.cells)
    assert sum(cell["reason"] == "chosen" for cell in document["cells"]) == 1
    assert all(cell["opened"] or "nothing closes" not in cell["reason"] for cell in document["cells"])


def test_a_plan_under_pins_and_one_on_fewer_gpus_come_out_again() -> None:
    assert derived_again(plan_for(pin="tp=4, pp>=2"))["faults"] == []


def test_planted_numbers_are_caught(plan: Plan) -> None:
    proof = plan.certificate
    assert proof is not None
    opened = next(number for number, cell in enumerate(proof.cells) if cell.objective_s is not None)

    def cells(**changes: Any) -> tuple[Any, ...]:
        wrong = replace(proof.cells[opened], **changes)
        return (*proof.cells[:opened], wrong, *proof.cells[opened + 1 :])

    objective_s = proof.cells[opened].objective_s
    assert objective_s is not None
    for changes, words in (
        ({"cells": cells(bound_s=1.01 * objective_s)}, "its bound is said to be"),
        ({"cells": cells(objective_s=0.99 * objective_s)}, "found again: none"),
        ({"cells": cells(objective_s=1.01 * objective_s)}, "its best J is said to be"),
        ({"cells": cells(cell="pp1")}, "not in the space"),
        ({"cells": proof.cells[1:]}, "was left closed"),
        ({"objective_s": 0.99 * proof.objective_s}, "the certificate's J"),
        ({"bound_s": 1.01 * proof.objective_s}, "proved bound"),
        ({"num_cells": proof.num_cells + 1}, "the certificate counts"),
        ({"limit_s": 2 * proof.limit_s}, "was left closed"),
        ({"least_bound_s": 1.01 * proof.simulated_s}, "min R"),
        ({"least_bound_s": (proof.least_bound_s + 2 * proof.simulated_s) / 3}, "bound every plan of the space"),
        ({"simulated_s": 0.99 * proof.simulated_s}, "simulated_s is said to be"),
        ({"objective_of_choice_s": 0.99 * proof.objective_s}, "J of the choice"),
        ({"objective_of_choice_s": 1.01 * proof.objective_of_choice_s}, "J of the choice"),
        ({"gap_objective": 0.01}, "gap_objective"),
        ({"gap_simulated": proof.gap_simulated / 2}, "gap_simulated"),
        ({"bound_s": 0.99 * proof.bound_s}, "the status is optimal"),
        ({"restrictions": proof.restrictions[1:]}, "leaves out"),
    ):
        assert any(words in fault for fault in derived_again(_with(plan, **changes))["faults"]), (changes, words)


def test_without_a_proof_or_with_another_calibration_there_is_nothing_to_derive(plan: Plan) -> None:
    with pytest.raises(InputError, match="edited by hand"):
        derived_again(replace(plan, certificate=None))
    other = replace(plan, provenance=replace(plan.provenance, calibration="another"))
    with pytest.raises(InputError, match="made with calibration another"):
        derived_again(other)


def test_a_planted_promise_is_caught(plan: Plan) -> None:
    predicted = plan.predicted
    assert predicted is not None
    other, *others = plan.alternatives
    stages = (replace(predicted.stages[0], forward_s=2.0), *predicted.stages[1:])
    for changed, words in (
        (replace(predicted, memory_gib_max=1.0), "predicted.memory_gib_max"),
        (replace(predicted, mfu=0.9), "predicted.mfu"),
        (replace(predicted, stages=stages), "predicted.stages[0].forward_s"),
    ):
        assert any(words in fault for fault in derived_again(replace(plan, predicted=changed))["faults"])
    promised = replace(plan, alternatives=(replace(other, step_s=2 * other.step_s), *others))
    assert any("alternatives[0].step_s" in fault for fault in derived_again(promised)["faults"])
